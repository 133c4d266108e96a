"""Write titles for real Chinese articles with a small model from scratch, against two baselines that learn next to nothing.

    python benchmarks/lctt_titles.py --data FOLDER [--processes 2] [--output-dir outputs/lctt_titles]

FOLDER holds lctt_train.jsonl, lctt_dev.jsonl and lctt_test.jsonl with content and title. Goal: half an hour of training on two
cores, and a higher ROUGE-L on characters than both baselines on the test articles:

first sentence       of the article, cut to the mean length of the training titles.
frequent words       the most frequent words of the training titles, in the order in which they mostly stand there; as many as
                     score best on dev. The same text for every article.

hftune trains the model twice, one thread a process. First (lctt_pretrain.yaml) on rows made of the training articles alone,
which teach it to read and to copy: a section and its heading, a passage and the sentence that is most like the rest of it, an
article and its title. Then (lctt_titles.yaml) on the articles and their titles, where dev picks the best epoch. The test
articles are looked at once, at the end. "minutes" are those of the clock, from the making of the rows to the last export,
evaluations on dev included; "CPU minutes" those of all processes, of which two cores have sixty in half an hour.
"""

# ruff: noqa: RUF001 - the punctuation of Chinese is full-width

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from record import parse_options, print_table, save

from hftune.metrics.rouge import CharTokenizer, WordTokenizer
from hftune.metrics.rouge import rouge as hftune_rouge

Row = dict[str, str]

HERE = Path(__file__).parent
SCORES = ("rouge_1_char", "rouge_2_char", "rouge_l_char")
PARTS = ("train", "dev", "test")
BEGINNING = 600
"""Characters of an article that its title is learned from: more than the model's tokens hold."""
SECTION, PASSAGE, PASSAGE_EVERY = 160, 150, 300
"""Characters of a section and a passage; characters between the starts of two passages."""
PASSAGES = 5
"""Most passages of one article."""

_SENTENCE = re.compile("[^。！？\n]+[。！？]?")
_ENDS_A_LINE_OF_TEXT = re.compile("[。！？；：:,，.!?;、]$")
_NUMBERING = re.compile(
    r"(第[一二三四五六七八九十\d]+[步章节部]?[:：、]?|步骤\s*\d+[:：、]?|[\d一二三四五六七八九十]+[.、:：)）]+)\s*"
)
_HAN = re.compile("[\u4e00-\u9fff]")


def main() -> None:
    options = parse()
    if not options.smoke:
        measure({part: read(options.data / f"lctt_{part}.jsonl") for part in PARTS}, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        options.output_dir = Path(folder)
        measure(generated(), options)


def measure(data: dict[str, list[Row]], options: argparse.Namespace) -> None:
    """Train, write the titles of the test articles, and compare them with the baselines'."""
    started = time.monotonic()
    train(data, options)
    minutes = (time.monotonic() - started) / 60
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_minutes = (used.ru_utime + used.ru_stime) / 60

    test = data["test"]
    written, parameters = write_titles(options.output_dir / "titles", [row["content"] for row in test])
    contenders = {
        "first sentence": first_sentences(data["train"], test),
        "frequent words": [frequent_words(data["train"], data["dev"])] * len(test),
        "hftune": written,
    }
    costs = {"hftune": (f"{minutes:.1f}", f"{cpu_minutes:.1f}", f"{parameters / 1e6:.1f}")}
    scores = {name: rouge(titles, test) for name, titles in contenders.items()}
    rows = [
        (name, *(f"{100 * score:.2f}" for score in found), *costs.get(name, ("", "", ""))) for name, found in scores.items()
    ]
    header = ("", "ROUGE-1", "ROUGE-2", "ROUGE-L", "minutes", "CPU minutes", "M parameters")
    title = f"titles of {len(test)} test articles, F1 on characters in %; {options.processes} processes"
    table = print_table(title, header, rows)
    for row, title in list(zip(test, written, strict=True))[:5]:
        print(f"\n  true  {row['title']}\n  ours  {title}", flush=True)
    ours, first, frequent = (f"{100 * scores[name][-1]:.1f} %" for name in ("hftune", "first sentence", "frequent words"))
    what = (
        f"titles of {len(test)} test articles, a {parameters / 1e6:.1f} M-parameter model from scratch in {cpu_minutes:.0f} "
        "CPU minutes, ROUGE-L on characters"
    )
    save(__file__, options, [table], {what: f"{ours}; first sentence {first}, frequent words {frequent}"})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with lctt_{train,dev,test}.jsonl (content, title)")
    parser.add_argument("--processes", type=int, default=2, help="that train, one thread each (default %(default)s)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/lctt_titles"), help="folder (default %(default)s)")
    parser.add_argument("--max-steps", type=int, help="of each training, to try the script; default: what the recipes say")
    options = parse_options(parser, smoke={"processes": 1, "max_steps": 2})
    if options.data is None and not options.smoke:
        parser.error("--data FOLDER is needed")
    return options


def generated() -> dict[str, list[Row]]:
    """Return a few generated articles instead of the real ones."""
    from hftune.data.demo import articles

    rows = articles("train")[:60]
    return {"train": rows[:48], "dev": rows[48:54], "test": rows[54:]}


def read(path: Path) -> list[Row]:
    """Read articles: content and title, nothing else of them."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [{"content": row["content"], "title": row["title"]} for row in rows]


def write(path: Path, rows: Iterable[Row]) -> str:
    """Write rows as JSON lines and return the path."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# Training


def train(data: dict[str, list[Row]], options: argparse.Namespace) -> None:
    """Make the rows and run both trainings; the model of the titles lies in output/titles/model."""
    output = options.output_dir
    output.mkdir(parents=True, exist_ok=True)
    titles = write(output / "titles.jsonl", data["train"])
    pretraining = write(output / "pretraining.jsonl", itertools.chain.from_iterable(map(pretraining_rows, data["train"])))
    dev = write(output / "dev.jsonl", data["dev"])
    run_hftune(HERE / "lctt_pretrain.yaml", pretraining, dev, output / "pretrained", options)
    model = f"task.model={output / 'pretrained' / 'model_last'}"
    run_hftune(HERE / "lctt_titles.yaml", titles, dev, output / "titles", options, model)


def run_hftune(recipe: Path, train: str, dev: str, output: Path, options: argparse.Namespace, *overrides: str) -> None:
    """Run a recipe on ``options.processes`` processes; stop with it where it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.processes}"]
    command = [sys.executable, *(launcher if options.processes > 1 else []), "-m", "hftune.run"]
    command += [f"recipe={recipe}", f"output_dir={output}", *overrides]
    command += [f"task.data_files.train={train}", f"task.data_files.eval={dev}"]
    if options.max_steps:
        command.append(f"train.max_steps={options.max_steps}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    if subprocess.run(command, env=environment).returncode:
        sys.exit(f"{recipe.name} failed.")


def pretraining_rows(article: Row) -> Iterator[Row]:
    """Yield what one article teaches. Its title has no mark before the source, the others do."""
    yield {"content": article["content"][:BEGINNING], "title": article["title"]}
    for body, heading in sections(article["content"]):
        yield {"content": f"小标题：{body}", "title": heading}
    for passage, sentence in passages(article["content"]):
        yield {"content": f"摘句：{passage}", "title": sentence}


def sections(content: str) -> Iterator[tuple[str, str]]:
    """Yield the beginning of each section and its heading, without number, where half of the heading stands in it."""
    lines = [line.strip() for line in content.split("\n")]
    for place, line in enumerate(lines):
        if not is_heading(line):
            continue
        body = "\n".join(itertools.takewhile(lambda line: not is_heading(line), lines[place + 1 :]))[:SECTION]
        heading = _NUMBERING.sub("", line, count=1) if _NUMBERING.match(line) else line
        if len(body) >= 40 and len(heading) >= 4 and len(_HAN.findall(heading)) >= 2 and common(heading, body) >= 0.5:
            yield body, heading


def is_heading(line: str) -> bool:
    return 4 <= len(line) <= 40 and not _ENDS_A_LINE_OF_TEXT.search(line)


def passages(content: str) -> Iterator[tuple[str, str]]:
    """Yield passages and the sentence of each that is most like its others, to be found and copied.

    Source: Zhang et al., PEGASUS: Pre-training with Extracted Gap-sentences for Abstractive Summarization, 2020, section 3.1.
    """
    text = "\n".join(line for line in content.split("\n") if not is_heading(line.strip()))
    count = 0
    for start in range(0, len(text), PASSAGE_EVERY):
        sentences = [sentence.strip() for sentence in _SENTENCE.findall(text[start : start + PASSAGE])]
        sentences = sentences[1 if start else 0 : -1]  # whole ones
        place = most_like_others(sentences)
        if place is None:
            continue
        yield "".join(sentences), sentences[place].rstrip("。！？")
        count += 1
        if count == PASSAGES:
            return


def most_like_others(sentences: Sequence[str]) -> int | None:
    """Return the place of the sentence with most characters in common with the others, for its length; None: none is fit."""
    fit = [place for place, sentence in enumerate(sentences) if 8 <= len(sentence) <= 40]
    if len(sentences) < 2 or not fit:
        return None
    counts = [Counter(CHARACTERS(sentence)) for sentence in sentences]
    everything = sum(counts, Counter())

    def likeness(place: int) -> float:
        return (counts[place] & (everything - counts[place])).total() / (counts[place].total() + 40)

    return max(fit, key=likeness)


def common(text: str, other: str) -> float:
    """Return the share of the characters of ``text`` that stand in ``other``, too."""
    count = Counter(CHARACTERS(text))
    return (count & Counter(CHARACTERS(other))).total() / max(1, count.total())


CHARACTERS = CharTokenizer().tokenize


# Contenders


def first_sentences(train: list[Row], rows: list[Row]) -> list[str]:
    """Return each article's first sentence, cut to the mean length of the training titles."""
    mean = round(fmean(len(row["title"]) for row in train))
    return [_SENTENCE.search(row["content"])[0].strip()[:mean] for row in rows]


def frequent_words(train: list[Row], dev: list[Row], most: int = 20) -> str:
    """Return the most frequent words of the training titles in their usual order, as many as score best on dev."""
    places, cut = defaultdict(list), WordTokenizer().tokenize
    for row in train:
        words = cut(row["title"])
        for place, word in enumerate(words):
            places[word].append(place / len(words))
    ranked = sorted(places, key=lambda word: (-len(places[word]), word))
    texts = [" ".join(sorted(ranked[:count], key=lambda word: fmean(places[word]))) for count in range(1, most + 1)]
    return max(texts, key=lambda text: rouge([text] * len(dev), dev)[-1])


def write_titles(output: Path, texts: list[str]) -> tuple[list[str], int]:
    """Write a title for each text with the best model of a run; return them and the number of the model's parameters."""
    import hftune  # not above: it loads torch, and so takes memory and time from the training

    trained = hftune.load_model(output)
    rows = trained.predict(texts, batch_size=50)
    return [row["generated"] for row in rows], sum(weights.numel() for weights in trained.model.parameters())


def rouge(titles: list[str], rows: list[Row]) -> list[float]:
    """Return ROUGE-1, ROUGE-2 and ROUGE-L on characters against the true titles."""
    scores = hftune_rouge(titles, [row["title"] for row in rows], "zh")
    return [scores[name] for name in SCORES]


if __name__ == "__main__":
    main()
