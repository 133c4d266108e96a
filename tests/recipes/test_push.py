"""hftune push, as typed, to a Hub on loopback: what lies there afterwards, who can load it, and what is said if it cannot be."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

import hftune
from hftune import Recipe
from hftune.tracking.console import short
from tests.support.hub import Handler, Hub
from tests.support.hub_contents import bert, yelp
from tests.support.runs import Group, Run, train_on

LFS = (".safetensors", ".bin", ".png")


class WritingHandler(Handler):
    """Answers what the library asks when it writes, and passes on what it reads."""

    def do_GET(self) -> None:
        if self.path.startswith("/api/whoami-v2"):
            return self.whoami()
        return super().do_GET()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        parts = [urllib.parse.unquote(part) for part in urllib.parse.urlsplit(self.path).path.strip("/").split("/")]
        if parts[:3] == ["api", "repos", "create"]:
            return self.create(json.loads(self.body()))
        if parts == ["api", "validate-yaml"]:
            return self.validate(json.loads(self.body())["content"])
        if parts[0] == "api" and len(parts) > 4 and parts[4] in ("branch", "preupload", "commit"):
            return self.write("/".join(parts[2:4]), parts[4], parts[5], self.body())
        if parts[-3:] == ["lfs", "objects", "batch"]:
            return self.lfs(json.loads(self.body()))
        return super().do_GET()

    def do_PUT(self) -> None:
        digest, data = self.path.rsplit("/", 1)[1], self.body()
        if hashlib.sha256(data).hexdigest() != digest:
            return self.send(400, {"error": "not what was announced"})
        self.server.hub.objects[digest] = data
        return self.send(200, {})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def account(self) -> dict[str, Any] | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.server.hub.accounts.get(token)

    def refuse(self, code: int, message: str) -> None:
        self.send(code, {"error": message}, {"X-Error-Message": message})

    def whoami(self) -> None:
        if self.server.hub.is_down:
            return self.refuse(503, "Service unavailable")
        account = self.account()
        if account is None:
            return self.refuse(401, "Invalid username or password.")
        orgs = [{"name": name} for name in account["orgs"]]
        return self.send(
            200, {"type": "user", "name": account["name"], "orgs": orgs, "auth": {"accessToken": {"role": account["role"]}}}
        )

    def may_write(self, owner: str) -> bool:
        account = self.account()
        return account is not None and account["role"] == "write" and owner in (account["name"], *account["orgs"])

    def validate(self, card: str) -> None:
        """Check the metadata of a README.md, of all that the real Hub checks the licence alone."""
        found = yaml.safe_load(card.split("---")[1])
        licence = found.get("license")
        errors = [] if licence in (None, "mit", "apache-2.0", "other") else [{"message": '"license" must be one of [mit, ...]'}]
        self.send(400 if errors else 200, {"errors": errors, "warnings": []})

    def create(self, asked: dict[str, Any]) -> None:
        hub, owner = self.server.hub, asked["organization"]
        if not self.may_write(owner):
            return self.refuse(403, f'You don\'t have the rights to create a model under the namespace "{owner}".')
        name = f"{owner}/{asked['name']}"
        if f"models/{name}" in hub.state["revisions"]:
            return self.send(409, {"error": "You already created this model repo", "url": f"{hub.address}/{name}"})
        hub.state["private"][f"models/{name}"] = asked.get("visibility") == "private"
        hub.commit("models", name, {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
        return self.send(200, {"url": f"{hub.address}/{name}", "name": name})

    def write(self, name: str, what: str, revision: str, data: bytes) -> None:
        hub = self.server.hub
        if not self.may_write(name.partition("/")[0]):
            return self.refuse(403, "Forbidden: you must have write access.")
        revisions = hub.state["revisions"][f"models/{name}"]
        if what == "branch":
            if revision in revisions:
                return self.send(409, {"error": "Reference already exists"})
            hub.commit("models", name, hub.files(name), revision)
            return self.send(200, {})
        if what == "preupload":
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(LFS) else "regular", "shouldIgnore": False}
                for file in json.loads(data)["files"]
            ]
            return self.send(200, {"files": modes})
        files, (header, *operations) = hub.files(name, revision), map(json.loads, data.splitlines())
        for operation in operations:
            value = operation["value"]
            is_lfs = operation["key"] == "lfsFile"
            files[value["path"]] = hub.objects[value["oid"]] if is_lfs else base64.b64decode(value["content"])
        commit = hub.commit("models", name, files, revision)
        hub.messages.append(header["value"]["summary"])
        return self.send(200, {"success": True, "commitOid": commit, "commitUrl": f"{hub.address}/{name}/commit/{commit}"})

    def lfs(self, asked: dict[str, Any]) -> None:
        address = self.server.hub.address
        actions = [{"upload": {"href": f"{address}/lfs/{item['oid']}"}} for item in asked["objects"]]
        objects = [{**item, "actions": action} for item, action in zip(asked["objects"], actions, strict=True)]
        self.send(200, {"transfer": "basic", "objects": objects})


class WritableHub(Hub):
    """A Hub with accounts, each with a token: "secret" belongs to tester, who is a member of the organization team."""

    handler = WritingHandler

    def __init__(self, root: Path):
        super().__init__(root)
        self.accounts = {
            "secret": {"name": "tester", "orgs": ["team"], "role": "write"},
            "reader": {"name": "tester", "orgs": [], "role": "read"},
        }
        self.objects: dict[str, bytes] = {}
        self.messages: list[str] = []
        """Of all commits that were pushed."""
        self.is_down = False
        self._write()

    def start(self) -> str:
        self.address = super().start()
        return self.address

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a model repository."""
        folder = self.root / "models" / name / self.state["revisions"][f"models/{name}"][revision]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SHORT = ("train.max_steps=2", "train.batch_size=8", "train.micro_batch_size=4", "eval.every=1")
YELP = ("recipe=yelp", *SHORT, "task.max_length=64", "task.max_eval_samples=8")
PRIVATE = ("--private", "--revision", "v1", "--message", "The first one")
TEXT = "The food was superb."
LOADED = f"""
import json, pathlib, sys
import hftune
from huggingface_hub import snapshot_download
from transformers import pipeline

text = {TEXT!r}
by_transformers = pipeline("text-classification", model="tester/yelp", device="cpu")(text)[0]["label"]
by_hftune = hftune.load_model(snapshot_download("tester/yelp"), device="cpu").predict([text])[0]["label"]
digits = hftune.load_model(snapshot_download("team/digits", revision="v1"), device="cpu").recipe.task.label_names
pathlib.Path(sys.argv[1]).write_text(json.dumps([by_transformers, by_hftune, digits]))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    hub = WritableHub(tmp_path_factory.mktemp("hub"))
    hub.commits = {"task.model": bert(hub, "google-bert/bert-base-cased"), "task.dataset": yelp(hub, "Yelp/yelp_review_full")}
    address, home = hub.start(), tmp_path_factory.mktemp("home")
    hub.variables = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_DATASETS_CACHE": str(home / "datasets")}
    hub.variables |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    yield hub
    hub.stop()


@pytest.fixture(scope="module")
def runs(hub, tmp_path_factory):
    jobs = {"yelp": YELP, "digits": ("recipe=mnist_demo", *SHORT, "task.max_train_samples=50", "task.max_eval_samples=20")}
    return train_on(1, jobs, tmp_path_factory.mktemp("runs"), variables=hub.variables)


def typed(hub, folder, *words, token="secret"):
    """Return the exit code of ``hftune push``, and the lines that it printed."""
    log = folder / "push.log"
    log.unlink(missing_ok=True)
    variables = {"HF_TOKEN": token} if token else {}
    job = ["hftune.cli", ["push", *map(str, words)], None, variables]
    (code,) = Group(1, [job], log, hub.variables, as_typed=True).wait()
    return code, log.read_text().splitlines()


@pytest.fixture(scope="module")
def pushed(hub, runs, tmp_path_factory):
    """What was said when both runs were pushed."""
    folder = tmp_path_factory.mktemp("pushed")
    said = typed(hub, folder, runs["yelp"].folder, "tester/yelp")
    assert typed(hub, folder, runs["digits"].folder, "team/digits", *PRIVATE)[0] == 0
    return said


def test_one_commit_has_model_card_recipe_and_result(hub, runs, pushed):
    folder, files = runs["yelp"].folder, hub.files("tester/yelp")
    model = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "hftune.json"} <= model.keys()
    extra = {name: (folder / name).read_bytes() for name in ("recipe.yaml", "result.json")}
    pushed_files = {name: files[name] for name in files if name not in (".gitattributes", "README.md")}
    assert pushed_files == {name: data for name, data in (model | extra).items() if name != "README.md"}
    best = runs["yelp"].result["best"]
    assert hub.messages[0] == f"accuracy {short(best['value'])} after step {best['step']}" and len(hub.messages) == 2
    code, lines = pushed
    assert code == 0 and lines[-1] == f"{hub.address}/tester/yelp"
    assert re.fullmatch(rf"Pushing {len(files) - 1} files \(.+ KiB\) to tester/yelp \.\.\.", lines[-2])


def test_card_names_the_model_by_its_place(hub, runs, pushed):
    here = (runs["yelp"].folder / "model" / "README.md").read_text()
    there = hub.files("tester/yelp")["README.md"].decode()
    assert f'model="{runs["yelp"].folder}/model"' in here and 'model="tester/yelp"' in there
    assert str(runs["yelp"].folder) not in there
    data = ModelCard(there).data
    assert (data.base_model, data.datasets) == ("google-bert/bert-base-cased", ["Yelp/yelp_review_full"])
    scores = {result.metric_type: result.metric_value for result in data.eval_results}
    assert scores["accuracy"] == pytest.approx(runs["yelp"].result["best"]["value"], rel=1e-5)
    for key, commit in hub.commits.items():
        assert f"{key}_revision={commit}" in there


def test_private_repository_and_branch_are_created(hub, pushed):
    assert hub.state["private"] == {"models/tester/yelp": False, "models/team/digits": True}
    assert [*hub.files("team/digits")] == [".gitattributes"] and "model.safetensors" in hub.files("team/digits", "v1")
    assert hub.messages[1] == "The first one"


def test_what_was_pushed_is_loaded_by_transformers_by_hftune_and_by_a_recipe(hub, runs, pushed, tmp_path):
    (tmp_path / "load.py").write_text(LOADED)
    out = tmp_path / "further"
    further = ["yelp", [*YELP[1:], "task.model=tester/yelp", f"output_dir={out}"], None, {}]
    log = tmp_path / "log"
    load = [str(tmp_path / "load.py"), [str(tmp_path / "found.json")], None, {"HF_TOKEN": "secret"}]
    (code,) = Group(1, [load, further], log, hub.variables).wait()
    assert code == 0, log.read_text()
    by_transformers, by_hftune, digits = json.loads((tmp_path / "found.json").read_text())
    here = hftune.load_model(runs["yelp"].folder, device="cpu").predict([TEXT])[0]["label"]
    assert by_transformers == by_hftune == here and here.endswith(("star", "stars"))
    assert digits == [*"0123456789"]
    assert Run(out).result["commits"]["task.model"] == hub.state["revisions"]["models/tester/yelp"]["main"]


def test_run_in_training_pushes_its_best_model_so_far(hub, runs, tmp_path):
    out = shutil.copytree(runs["yelp"].folder, tmp_path / "out")
    (out / "result.json").unlink()
    (out / "model" / "README.md").unlink()
    best = json.loads((out / "model" / "hftune.json").read_text())
    before = sorted(out.rglob("*"))
    code, lines = typed(hub, tmp_path, out, "tester/half")
    assert code == 0
    assert lines[0].startswith(f"{out} is not finished. This is its best model so far: accuracy {short(best['value'])} after")
    files = hub.files("tester/half")
    assert "result.json" not in files and files["model.safetensors"] == (out / "model" / "model.safetensors").read_bytes()
    assert "Its training was not finished when this card was written." in files["README.md"].decode()
    assert sorted(out.rglob("*")) == before


TOKEN = " Create a token with write access at HUB/settings/tokens, and log in with `hf auth login` or set HF_TOKEN."
REFUSALS = [
    ("tester/new", None, "The Hub (HUB) accepts uploads only from users who are logged in.", TOKEN),
    ("tester/new", "reader", "The token of tester may only read.", TOKEN),
    ("tester/new", "expired", "tester/new was not pushed: the Hub (HUB) does not accept your token, which", TOKEN),
    ("other/new", "secret", "other/new was not pushed: tester may not write there (403: You", "HUB/settings/tokens."),
    ("tester/yelp --private", "secret", "tester/yelp exists and is public, and --private is for", "choose a different name."),
]


@pytest.mark.parametrize(("words", "token", "said", "hint"), REFUSALS)
def test_refusal_is_one_sentence_that_says_what_to_do_and_nothing_is_uploaded(
    hub, runs, pushed, tmp_path, words, token, said, hint
):
    commits = len(hub.messages)
    code, (line,) = typed(hub, tmp_path, runs["yelp"].folder, *words.split(), token=token)
    assert code == 2 and line.startswith(f"hftune: {said.replace('HUB', hub.address)}")
    assert line.endswith(hint.replace("HUB", hub.address))
    assert len(hub.messages) == commits and "models/tester/new" not in hub.state["revisions"]


def test_hub_that_is_down_and_metadata_that_it_refuses(hub, runs, tmp_path):
    out = shutil.copytree(runs["yelp"].folder, tmp_path / "out")
    hub.is_down = True
    try:
        code, lines = typed(hub, tmp_path, out, "tester/new")
    finally:
        hub.is_down = False
    assert code == 2 and lines[-1].startswith(f"hftune: tester/new was not pushed: the Hub ({hub.address}) answers 503. Try")
    path = out / "model" / "README.md"
    path.write_text(path.read_text().replace("tags:\n", "license: my own\ntags:\n"))
    code, lines = typed(hub, tmp_path, out, "tester/licence")
    assert code == 2 and lines[-1].startswith("hftune: tester/licence was not pushed: Invalid metadata in README.md. ")
    assert lines[-1].endswith(" Correct model/README.md.")


def test_secret_of_a_recipe_is_not_pushed(hub, runs, tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "s3cr3t")
    out = shutil.copytree(runs["yelp"].folder, tmp_path / "out")
    recipe = Recipe.load(out / "recipe.yaml", "track.run_name=${oc.env:A_SECRET}", "track.project=${oc.env:A_SECRET}")
    (out / "recipe.yaml").write_text(recipe.to_yaml())
    assert typed(hub, tmp_path, out, "tester/secret")[0] == 0
    files = hub.files("tester/secret")
    assert b"${oc.env:A_SECRET}" in files["recipe.yaml"]
    assert not [name for name, data in files.items() if b"s3cr3t" in data]
    (out / "recipe.yaml").write_text(recipe.to_yaml().replace("${oc.env:A_SECRET}", "https://me:s3cr3t@host/x", 1))
    code, (line,) = typed(hub, tmp_path, out, "tester/more")
    assert code == 2 and "https://me:...@host/x holds a password" in line and line.endswith(" Write it as ${oc.env:NAME}.")
