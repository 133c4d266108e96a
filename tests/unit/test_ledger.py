"""The chain of ledger.jsonl: what is written, which lines count after a resume, and what shows that somebody changed it."""

import errno
import json
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import numpy as np
import pytest
import torch

from hftune.batch_plan import BatchPlan, format_digest, samples_digest
from hftune.commands import audit as audit_command
from hftune.errors import ConfigError, TrainingError, first_few
from hftune.models.weights import weights_digest
from hftune.replay.audit import audit
from hftune.replay.ledger import read_ledger
from hftune.tracking.facts import hardware, of_all
from hftune.tracking.ledger import NOTHING, Ledger, plan_facts
from tests.support.events import checkpoint_written, step_taken

PLAN = BatchPlan(10, 4, seed=1)
"""Three steps an epoch."""


def begin(folder, step=0, **facts):
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.start(step, {"world_size": 1, **plan_facts(PLAN), **facts})
    return ledger


def where(step):
    return {"step": step, "place": divmod(step - 1, PLAN.num_steps)}


def used(step):
    epoch, place = divmod(step - 1, PLAN.num_steps)
    samples = np.concatenate([micro_batch.samples for micro_batch in PLAN.epoch(epoch)[place]])
    return {"num_samples": len(samples), "digest": format_digest(*samples_digest(samples))}


def take(ledger, *steps, loss=0.1):
    for step in steps:
        ledger.on_step(
            step_taken(**where(step), **used(step), loss=loss + step / 7, grad_norm=1 / step, lr=1e-3 / 3, num_items=4.0)
        )


def texts(folder):
    return (folder / "ledger.jsonl").read_bytes().splitlines()


def rewritten(folder, lines):
    (folder / "ledger.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return read_ledger(folder).problems


@pytest.fixture
def whole(tmp_path):
    """A start, steps 1 to 4, the checkpoint of step 3 behind step 4, and steps 5 and 6."""
    ledger = begin(tmp_path)
    take(ledger, 1, 2, 3, 4)
    ledger.on_checkpoint(checkpoint_written(3, model="a" * 64, optimizer="b" * 64))
    take(ledger, 5, 6)
    ledger.file.close()
    return tmp_path


def test_each_line_holds_the_hash_of_the_one_before_and_numbers_are_exact(whole):
    before = NOTHING
    for text in texts(whole):
        assert json.loads(text)["prev"] == before
        before = sha256(text).hexdigest()
    record = read_ledger(whole)
    assert (record.problems, record.end) == ([], before)
    assert record.steps[4]["loss"] == 0.1 + 4 / 7 and record.steps[3]["grad_norm"] == 1 / 3
    assert record.checkpoints[3]["model"] == "a" * 64 and record.starts_of[6] is record.starts[0]


def test_lines_are_those_of_json_with_null_for_what_it_does_not_have(tmp_path):
    ledger = begin(tmp_path)
    results = {"loss": np.float64(1 / 3), "grad_norm": float("inf"), "lr": 1e-300, "num_items": 3}
    ledger.on_step(step_taken(**where(1), **used(1), **results))
    values = {
        "step": 1,
        "epoch": 0,
        "step_in_epoch": 0,
        **used(1),
        "loss": 1 / 3,
        "grad_norm": None,
        "lr": 1e-300,
        "items": 3.0,
    }
    start, step = texts(tmp_path)
    assert step.decode() == json.dumps({**values, "prev": sha256(start).hexdigest()})


def test_a_resume_adds_lines_and_says_which_ones_count(whole):
    before = (whole / "ledger.jsonl").read_bytes()
    hashes = {"step": 3, "model": "a" * 64, "optimizer": "b" * 64}
    ledger = begin(whole, 3, checkpoint=hashes, num_steps=5)
    ledger.on_checkpoint(checkpoint_written(4, model="c" * 64))
    take(ledger, 4, 5, loss=0.3)
    ledger.file.close()
    assert (whole / "ledger.jsonl").read_bytes().startswith(before)
    record = read_ledger(whole)
    assert record.problems == [] and [*record.steps] == [1, 2, 3, 4, 5] and [*record.checkpoints] == [3, 4]
    assert [start["after_step"] for start in record.starts] == [0, 3]
    assert (record.steps[3]["loss"], record.steps[4]["loss"]) == (0.1 + 3 / 7, 0.3 + 4 / 7)
    assert record.starts_of[3] is record.starts[0] and record.starts_of[4] is record.starts[1]
    with pytest.raises(KeyError):
        record.starts_of[6]
    found = audit(whole)
    assert (found.problems, found.steps, found.repeated, found.lines, found.end) == ([], 5, 3, 12, record.end)


@pytest.mark.parametrize("torn", [b'{"step": 7, "epo', b'{"step": 7, "epoch"\n', b"\0" * 300, b"\0\n\xff\n"])
def test_what_a_power_failure_left_of_a_line_is_cut_off(whole, torn):
    before = (whole / "ledger.jsonl").read_bytes()
    (whole / "ledger.jsonl").write_bytes(before + torn)
    assert read_ledger(whole).problems == [] and read_ledger(whole).end == sha256(texts(whole)[7]).hexdigest()
    take(begin(whole, 6), 7)
    assert (whole / "ledger.jsonl").read_bytes().startswith(before + b'{"format": 2, "after_step": 6, ')
    assert audit(whole).problems == [] and audit(whole).steps == 7


def test_a_whole_line_is_never_cut_off_whatever_it_says(whole):
    before = (whole / "ledger.jsonl").read_bytes() + b'{"of": "a newer version"}\n'
    (whole / "ledger.jsonl").write_bytes(before)
    begin(whole, 6)
    assert (whole / "ledger.jsonl").read_bytes().startswith(before) and read_ledger(whole).problems == [
        "Line 9 cannot be read."
    ]


def test_checkpoint_whose_line_a_kill_prevented_is_known_from_the_start_that_resumed_from_it(whole):
    hashes = {"step": 6, "model": "d" * 64, "optimizer": "e" * 64}
    take(begin(whole, 6, checkpoint=hashes), 7)
    record = read_ledger(whole)
    assert record.problems == [] and record.checkpoints[6]["model"] == "d" * 64


def test_checkpoint_that_was_exchanged_before_a_resume_is_found(whole):
    begin(whole, 3, checkpoint={"step": 3, "model": "a" * 64, "optimizer": "f" * 64})
    assert audit(whole).problems == ["Training resumed after step 3 from another checkpoint than was written there."]


def test_forged_lines_are_named(whole):
    lines = texts(whole)
    changed = lines[3].replace(b'"loss": 0.5', b'"loss": 0.4')
    assert changed != lines[3]
    broken = "does not follow: line {} was changed, or a line between them was removed."
    assert rewritten(whole, [*lines[:3], changed, *lines[4:]]) == [f"Line 5 {broken.format(4)}"]
    assert rewritten(whole, [*lines[:3], *lines[4:]]) == [f"Line 4 {broken.format(3)}"]
    assert rewritten(whole, [*lines[:4], lines[2], *lines[4:]]) == [
        "Line 5 does not follow line 4: it was written after line 2.",
        "Line 6 does not follow line 5: it was written after line 4.",
    ]
    assert rewritten(whole, [*lines[:3], b"never mind", *lines[4:]]) == ["Line 4 cannot be read.", f"Line 5 {broken.format(4)}"]
    begin(whole, 6)
    assert rewritten(whole, texts(whole)[8:]) == ["Line 1 is not the first: lines before it were removed."]


def test_forgery_whose_hashes_were_made_anew_has_another_end(whole):
    """The chain pins what was given away before; it proves nothing against who can write it."""
    before, lines, end = read_ledger(whole).end, [], NOTHING
    for text in texts(whole):
        lines.append(json.dumps({**json.loads(text.replace(b'"loss": 0.5', b'"loss": 0.4')), "prev": end}).encode())
        end = sha256(lines[-1]).hexdigest()
    assert rewritten(whole, lines) == [] and read_ledger(whole).end == end != before


def test_steps_and_checkpoints_from_two_threads_keep_the_chain_whole(tmp_path):
    ledger = begin(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        noted = threads.submit(
            lambda: [ledger.on_checkpoint(checkpoint_written(step, model="a" * 64)) for step in range(1, 200)]
        )
        take(ledger, *range(1, 200))
        noted.result()
    assert audit(tmp_path).problems == [] and len(texts(tmp_path)) == 1 + 2 * 199


def test_lines_that_do_not_fit_on_the_disk_wait_until_there_is_room(whole, monkeypatch):
    ledger = begin(whole, 6)
    file, before = ledger.file._file, (whole / "ledger.jsonl").read_bytes()
    monkeypatch.setattr(ledger.file, "_file", full := FullDisk(file, room=100))
    take(ledger, 7, 8)
    assert (whole / "ledger.jsonl").read_bytes()[:-100] == before
    with pytest.raises(OSError, match="No space"):  # no checkpoint is ahead of the ledger
        ledger.file.flush()
    full.room = 10_000
    take(ledger, 9)
    assert audit(whole).problems == [] and audit(whole).steps == 9


def test_lines_that_never_find_room_are_an_error_at_the_end(whole, monkeypatch):
    ledger = begin(whole, 6)
    monkeypatch.setattr(ledger.file, "_file", FullDisk(ledger.file._file, room=0))
    take(ledger, 7)
    with pytest.raises(TrainingError, match=r"ledger.jsonl cannot be written: No space left on device\. Free disk space"):
        ledger.file.close()


class FullDisk:
    """A file on a disk with some room."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= (written := self.file.write(data[: self.room]))
        return written

    def fileno(self):
        return self.file.fileno()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


def test_steps_left_out_are_listed_and_their_epochs_are_not_whole(tmp_path, capsys):
    ledger = begin(tmp_path)
    take(ledger, 1, 2, 3, 4)
    ledger.on_step(step_taken(**where(5)))
    take(ledger, 6)
    found = audit(tmp_path)
    assert (found.problems, found.skipped, found.steps, found.whole_epochs, found.samples) == ([], [5], 6, 1, 16)
    assert audit_command.run(type("Options", (), {"folder": str(tmp_path)})) == 0
    assert capsys.readouterr().out.splitlines()[2:4] == [
        "  skipped: 1 step (5)",
        "Every other step used the samples of its plan.",
    ]


def test_keys_that_were_changed_on_the_way_are_listed(whole, capsys):
    recipes = [{"train": {"lr": 0.1, "betas": [0.9, 0.99]}}, {"train": {"lr": 0.2, "betas": None}}]
    begin(whole, 6, recipe=recipes[0])
    begin(whole, 6, recipe=recipes[1])
    assert audit_command.run(type("Options", (), {"folder": str(whole)})) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "  started on 1 process",
        "  resumed after step 6 on 1 process",
        "  resumed after step 6 on 1 process, with train.lr=0.2, train.betas=null",
    ]
    assert first_few(map(str, range(1, 9))) == "1, 2, 3, 4, 5 and 3 more"


def test_what_is_no_ledger_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no ledger\.jsonl: name the output folder of a run\.$"):
        read_ledger(tmp_path)
    (tmp_path / "ledger.jsonl").write_text('{"step": 1, "epoch": 0, "step_in_epoch": 0}\n')
    with pytest.raises(ConfigError, match=r"does not say how a training started: no run has written it\.$"):
        read_ledger(tmp_path)
    for version in (1, 3):
        begin = {"format": version, "after_step": 0, "world_size": 2, "plan": {}}
        (tmp_path / "ledger.jsonl").write_text(json.dumps(begin) + "\n")
        with pytest.raises(ConfigError, match=rf"has format {version}, and this hftune reads format 2: a different one wrote"):
            read_ledger(tmp_path)


def test_hardware_is_that_of_all_processes():
    own = hardware(torch.device("cpu"))
    assert own["threads"] == torch.get_num_threads() and own["cpu_capability"] and own["cpu"]
    assert of_all([(0, own), (1, dict(own))]) == own
    assert of_all([(0, own), (1, own), (2, {**own, "threads": 99})]) == {**own, "others": {"2": {**own, "threads": 99}}}


def test_digest_of_weights_depends_on_names_shapes_types_and_bytes():
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.0)}
    digest = weights_digest(weights.items())
    assert weights_digest(reversed(weights.items())) == digest
    assert (
        weights_digest({"a": weights["a"].t().contiguous().t(), "b": weights["b"]}.items()) == digest
    )  # another layout in memory
    others = [
        {"a": weights["a"].view(3, 2), "b": weights["b"]},
        {"a": weights["a"], "c": weights["b"]},
        {"a": weights["a"] + 1e-6, "b": weights["b"]},
        {"a": weights["a"], "b": weights["b"].to(torch.bfloat16)},
    ]
    assert len({digest, *(weights_digest(other.items()) for other in others)}) == 5
