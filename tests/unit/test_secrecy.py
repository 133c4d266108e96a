"""What is hidden of a text, and that no recipe holds a secret."""

from pathlib import Path

import pytest

from hftune import ConfigError, DataError, Recipe, TrackConfig, TrainingError
from hftune.data.files import file_format
from hftune.data.sources import mixture_name
from hftune.distributed.failure_report import Report
from hftune.secrecy import without_secrets
from hftune.tracking.console import warning
from tests.support.tasks import Tagging

PLANTED = "Pl4ntedPl4ntedPl4nted"
ADDRESSES = (
    f"https://me:{PLANTED}@host/x.json",
    f"http:/me:{PLANTED}@host/x.json",  # as pathlib writes it
    f"postgresql://me:{PLANTED}@host:5432/db",
    f"https://me:pass/word@{PLANTED}@host/x",
    f"https://{PLANTED}@host/x.json",
    f"https://me@mail.org:pass/word{PLANTED}@host/x",
    f"https://{PLANTED}:x-oauth-basic@host/x",
    f"https://{PLANTED}:@host/x",
    f"https://host/x.json?sig={PLANTED}&se=2026",
    f"https://host/x#access_token={PLANTED}",
    f"https://hooks.slack.com/services/T0/B0/{PLANTED}",
    f"https://host/x.json?X-Amz-Expires=9&X-Amz-Signature={PLANTED}#part",
    f"s3://bucket/x.json?AWSAccessKeyId={PLANTED}",
    f"hf_{PLANTED}",
    f"hf_oauth_{PLANTED}",
    f"ghp_{PLANTED}",
    f"sk-ant-api03-{PLANTED}",
)
PLAIN = (
    "https://host:8080/a@b?max_tokens=5&monkey=1",
    "https://host?user=me@mail.org",
    "https://host/x?author=me&tokenizer=bert&design=3",
    "outputs/hf_bert-base-uncased-finetuned-imdb",
    "models/sk-ant-colony-optimization",
    "ssh://git@host/x",
    "git+ssh://git@host:me/code@v1",
    "hdfs://me@host:8020/a@b",
    "abfss://container@account.dfs.core.windows.net/x",
    "hf://datasets/a/b@main/x.json",
    "sqlite:////a/mlflow.db",
    "write to me@host: see https://host",
    "https://me:${oc.env:A_PASSWORD}@host/x?sig=${oc.env:A_TOKEN}",
)


@pytest.mark.parametrize("text", ADDRESSES)
def test_secrets_are_hidden_and_the_rest_stays(text):
    assert PLANTED not in without_secrets(text) and "..." in without_secrets(text)
    assert without_secrets(text)[:3] in (text[:3], "...") and without_secrets(f"{text}\nnext").endswith("\nnext")


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_stays(text):
    assert without_secrets(text) == text


def test_what_is_typed_beside_a_reference_is_hidden():
    assert without_secrets(f"https://me:${{oc.env:A}}{PLANTED}@host/x") == "https://me:...@host/x"


def test_a_signed_address_tells_the_format_of_its_file():
    assert file_format(f"https://host/x.jsonl.gz?a=b.c&sig={PLANTED}") == file_format("https://host/x.jsonl#part") == "json"


@pytest.mark.parametrize("said", [ConfigError, DataError, TrainingError, warning])
@pytest.mark.parametrize("text", ADDRESSES)
def test_no_message_shows_a_secret(said, text):
    assert PLANTED not in f"{said(f'{text} cannot be loaded')} {getattr(said(text), 'problems', '')}"


@pytest.mark.parametrize("text", ADDRESSES)
def test_neither_a_report_nor_the_name_of_a_data_set_shows_a_secret(text):
    report = Report(f"Traceback (most recent call last):\nOSError: {text} does not answer")
    assert PLANTED not in report.text and "does not answer" in report.sentence
    assert PLANTED not in mixture_name({"data_files": text}, 0) + mixture_name({"data_files": [text, text]}, 0)


@pytest.mark.parametrize("text", ADDRESSES)
@pytest.mark.parametrize(
    "key",
    ["task.data_files.train", "task.model", "output_dir", "track.project", "track.notes", "track.tags", "task.label_names"],
)
def test_a_recipe_that_holds_a_secret_is_refused(key, text):
    value = [text] if key in ("track.tags", "task.label_names") else text
    with pytest.raises(ConfigError, match=rf"^{key}=.*holds a password or token.*write {key}='\$\{{oc.env:NAME\}}'") as caught:
        Recipe.load("text_classification_demo", {key: value})
    assert PLANTED not in str(caught.value)


@pytest.mark.parametrize("text", PLAIN[:-1])
def test_a_recipe_with_any_other_address_is_not(text):
    assert Recipe.load("text_classification_demo", {"track.notes": text}).track.notes == text


def test_a_recipe_of_python_that_holds_a_secret_is_refused_before_anything_is_written(tmp_path):
    recipe = Recipe(task=Tagging(), track=TrackConfig(notes=ADDRESSES[0]), output_dir=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"track.notes=https://me:\.\.\.@host/x.json holds a password"):
        recipe.validate()
    assert not Path(recipe.output_dir).exists()


def test_a_secret_of_the_environment_is_used(monkeypatch):
    monkeypatch.setenv("A_PASSWORD", PLANTED)
    recipe = Recipe.load("text_classification_demo", {"task.data_files.train": "https://me:${oc.env:A_PASSWORD}@host/x.json"})
    assert recipe.task.data_files["train"] == ADDRESSES[0] and PLANTED not in recipe.to_yaml()


def test_options_of_a_file_system_that_are_secrets_must_be_references(monkeypatch):
    monkeypatch.setenv("KEY", PLANTED)
    recipe = Recipe.load(
        "text_classification_demo", "task.storage_options={secret: '${oc.env:KEY}', endpoint_url: 'http://there'}"
    )
    assert recipe.task.source.options == {"secret": PLANTED, "endpoint_url": "http://there"} and PLANTED not in recipe.to_yaml()
    for options in ({"secret": PLANTED}, {"client_kwargs": {"headers": {"Authorization": f"Bearer {PLANTED}"}}}):
        with pytest.raises(ConfigError, match=r"task\.storage_options\..*=\.\.\. holds a password or token") as caught:
            Recipe.load("text_classification_demo", {"task.storage_options": options})
        assert PLANTED not in str(caught.value)
