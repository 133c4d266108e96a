"""What the shipped recipes take from the Hub, tiny: the same names, layouts, columns and kinds of model."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch
import yaml

from hftune.data.demo import articles, paragraphs
from hftune.data.vocabulary import train_vocabulary
from hftune.models.pretrained import train_wordpiece, wordpiece_tokenizer
from tests.support.hub import Hub
from tests.support.tasks import few_digits, few_reviews

STARS = ["1 star", "2 star", "3 stars", "4 stars", "5 stars"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "initializer_range": 0.2}


def fill(hub: Hub) -> dict[str, str]:
    """Put all that the recipes need on a Hub; return the commits by repository."""
    return {
        "google-bert/bert-base-cased": bert(hub, "google-bert/bert-base-cased"),
        "Lowin/chinese-bigbird-base-4096": bigbird(hub),
        "Yelp/yelp_review_full": yelp(hub, "Yelp/yelp_review_full"),
        "ylecun/mnist": mnist(hub),
        "Salesforce/wikitext": wikitext(hub),
        "csebuetnlp/xlsum": xlsum(hub),
    }


def bert(hub: Hub, name: str, seed: int = 0) -> str:
    """A pretrained BERT as safetensors, with its tokenizer; its positions are bert-base's."""
    from transformers import BertConfig, BertForMaskedLM

    tokenizer = wordpiece_tokenizer(train_wordpiece([row["text"] for row in few_reviews("train")], 300))
    torch.manual_seed(seed)
    model = BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **SIZES))
    return hub.commit("models", name, saved(model, tokenizer))


def bigbird(hub: Hub) -> str:
    """Lowin's layout: config.json, vocab.txt and a pickle of weights, and nothing that says which tokenizer it is."""
    from transformers import BigBirdConfig, BigBirdForMaskedLM

    texts = [text for row in articles("train")[:60] for text in (row["content"], row["title"])]
    words = train_vocabulary(texts, 1500)
    torch.manual_seed(0)
    model = BigBirdForMaskedLM(BigBirdConfig(vocab_size=len(words), max_position_embeddings=4096, **SIZES))
    torch.save(model.state_dict(), weights := io.BytesIO())
    config = {**model.config.to_diff_dict(), "architectures": ["BigBirdForMaskedLM"], "model_type": "big_bird"}
    files = {"pytorch_model.bin": weights.getvalue(), "vocab.txt": "\n".join(words).encode(), "config.json": as_json(config)}
    return hub.commit("models", "Lowin/chinese-bigbird-base-4096", files)


def yelp(hub: Hub, name: str, skip: int = 0) -> str:
    """Reviews with stars as class labels; ``skip``: leave out so many of the training ones."""
    features = datasets.Features({"label": datasets.ClassLabel(names=STARS), "text": datasets.Value("string")})
    parts = {
        split: [{"label": row["label"], "text": row["text"]} for row in few_reviews(part)]
        for split, part in (("train", "train"), ("test", "eval"))
    }
    parts["train"] = parts["train"][skip:]
    return hub.commit("datasets", name, with_card({"yelp_review_full": parts}, features))


def mnist(hub: Hub) -> str:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("0123456789"))})
    parts = {split: list(few_digits(part)) for split, part in (("train", "train"), ("test", "eval"))}
    return hub.commit("datasets", "ylecun/mnist", with_card({"mnist": parts}, features))


def wikitext(hub: Hub) -> str:
    """Two of its four configurations."""
    parts = {split: paragraphs(part)[: 3 * count] for split, part, count in WIKITEXT}
    features = datasets.Features({"text": datasets.Value("string")})
    configs = {"wikitext-2-v1": parts, "wikitext-2-raw-v1": parts}
    return hub.commit("datasets", "Salesforce/wikitext", with_card(configs, features))


WIKITEXT = (("train", "train", 40), ("validation", "eval", 10), ("test", "test", 9))


def xlsum(hub: Hub) -> str:
    """A loading script at main, which is not run any more, and the Hub's own conversion to parquet at another revision."""
    name = "csebuetnlp/xlsum"
    hub.commit("datasets", name, {"xlsum.py": b"raise RuntimeError('a legacy script was run')\n", "README.md": b"# XL-Sum\n"})
    files = {".gitattributes": b"*.parquet filter=lfs\n"}
    for split, part, count in (("train", "train", 40), ("validation", "eval", 12), ("test", "eval", 11)):
        rows = [xlsum_row(number, row) for number, row in enumerate(articles(part)[:count])]
        for language in ("chinese_simplified", "welsh"):
            files[f"{language}/{split}/0000.parquet"] = parquet(rows)
    return hub.commit("datasets", name, files, revision="refs/convert/parquet")


def xlsum_row(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    said = {"id": f"world-{number}", "url": f"https://example.org/{number}", "title": row["title"]}
    return {**said, "summary": row["title"], "text": row["content"]}


def with_card(configs: Mapping[str, Mapping[str, list[dict[str, Any]]]], features: datasets.Features) -> dict[str, bytes]:
    """Lay out configurations of splits as parquet files, with a README that says so in its ``configs:``."""
    files, cards, infos = {}, [], []
    for config, parts in configs.items():
        cards.append(
            {"config_name": config, "data_files": [{"split": split, "path": f"{config}/{split}-*"} for split in parts]}
        )
        splits = []
        for split, rows in parts.items():
            data = files[f"{config}/{split}-00000-of-00001.parquet"] = parquet(rows, features)
            splits.append({"name": split, "num_bytes": len(data), "num_examples": len(rows)})
        size = sum(split["num_bytes"] for split in splits)
        said = {"config_name": config, "features": features._to_yaml_list(), "splits": splits}
        infos.append({**said, "download_size": size, "dataset_size": size})
    card = {"license": "other", "dataset_info": infos if len(infos) > 1 else infos[0], "configs": cards}
    files["README.md"] = f"---\n{yaml.safe_dump(card, sort_keys=False)}---\n# A data set\n".encode()
    return files


def parquet(rows: Iterable[Mapping[str, Any]], features: datasets.Features | None = None) -> bytes:
    datasets.Dataset.from_list(list(rows), features=features).to_parquet(file := io.BytesIO())
    return file.getvalue()


def saved(*parts: Any) -> dict[str, bytes]:
    """What save_pretrained writes."""
    with TemporaryDirectory() as folder:
        for part in parts:
            part.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def as_json(config: Mapping[str, Any]) -> bytes:

    return json.dumps(config, indent=2, default=str).encode()
