"""Where two runs diverge, and which difference is to blame: from ledgers made by hand, each with one thing planted."""

import copy

import numpy as np
import pytest

from hftune.replay.differences import first_use
from hftune.replay.divergence import find_divergence
from hftune.replay.findings import divergence_sentences, kinds_sentences
from hftune.replay.ledger import LedgerRecord
from hftune.replay.tolerance import TOLERANCE

NUM_ROWS, BATCH, NUM_STEPS = 40, 4, 30
START = {
    "format": 2, "after_step": 0, "world_size": 1, "micro_batch_size": 8, "micro_batch_tokens": None, "packed": False,
    "strategy": "DataParallel", "precision": "no", "plan": {"num_samples": NUM_ROWS, "batch_size": BATCH, "seed": 42},
    "recipe": {"seed": 42, "recipe": "a", "task": {"type": "text_classification", "model_config": {"hidden_dropout_prob": 0.1}},
               "train": {"lr": 1e-3, "eps": 1e-8, "micro_batch_size": 8, "log_every": 10}},
    "code": {"hftune/loop.py": "1f", "hftune/optim/optimizers.py": "2f", "hftune/reporting/page.py": "3f"},
    "packages": {"torch": "2.13.0"}, "hardware": {"device": "cpu", "threads": 1, "cpu_capability": "AVX2"},
    "data": {"train": {"rows": NUM_ROWS, "digest": "d", "root": "r"}}, "weights": "w",
}  # fmt: skip
ROWS = np.random.default_rng(0).integers(0, 256, (NUM_ROWS, 16), np.uint8)


def changed(values, *path, to):
    """Return a copy of nested values with one of them changed."""
    values = copy.deepcopy(values)
    place = values
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = to
    return values


def ledger(*starts, **at):
    """A run of 30 steps whose losses fall.

    Args:
        starts: the start lines, by default START.
        at: of each value of a line the step from which on it is different, and by how much.
    """
    record = LedgerRecord(starts=[*starts] or [START])
    for step in range(1, NUM_STEPS + 1):
        line = {"step": step, "num_samples": BATCH, "digest": f"d{step}", "loss": 2 / step, "grad_norm": 1.0, "items": 4.0}
        line["lr"] = 1e-3 * (step > 1)
        for name, (first, by) in at.items():
            if step >= first:
                line[name] = f"{line[name]}x" if name == "digest" else line[name] * (1 + by)
        record.steps[step] = line
        record.starts_of[step] = [start for start in record.starts if start["after_step"] < step][-1]
    return record


def diverged(b, a=None, rows=ROWS):
    return find_divergence(a or ledger(), b, None if rows is None else (ROWS, rows))


def other_rows(*indices):
    rows = ROWS.copy()
    rows[list(indices), 0] ^= 1
    return rows


def first_cause(found):
    return found.step, found.causes[0].verdict, found.causes[0].kind, found.causes[0].text


def used_in(row):
    return first_use(np.array([row]), START["plan"], NUM_STEPS)


def said(found):
    return divergence_sentences(found)


def test_equal_runs_do_not_diverge():
    found = diverged(ledger())
    assert (found.step, found.causes, found.tolerance) == (None, [], 0.0)
    assert found.same == ["recipe", "data", "code", "versions", "hardware", "processes"]
    assert said(found) == "Equal to the bit in all 30 steps. The runs do not diverge."


DROPOUT = ("recipe", "task", "model_config", "hidden_dropout_prob")
PLANTED = {
    "lr": ((("recipe", "train", "lr"), 9e-4), {"lr": (2, -0.1), "loss": (3, 0.01), "grad_norm": (3, 0.02)}, (2, "recipe", "train.lr: 0.001 | 0.0009")),
    "seed": ((("recipe", "seed"), 1), {"digest": (1, 0), "loss": (1, 0.1), "grad_norm": (1, 0.1)}, (1, "recipe", "seed: 42 | 1")),
    "dropout": ((DROPOUT, 0.12), {"loss": (1, 0.002), "grad_norm": (1, 0.01)}, (1, "recipe", "task.model_config.hidden_dropout_prob: 0.1 | 0.12")),
    "micro-batches": ((("recipe", "train", "micro_batch_size"), 4), {"loss": (1, 0.001), "grad_norm": (1, 0.01)}, (1, "recipe", "train.micro_batch_size: 8 | 4")),
    "eps": ((("recipe", "train", "eps"), 1e-6), {"loss": (3, 1e-5), "grad_norm": (3, 1e-5)}, (3, "recipe", "train.eps: 1e-08 | 1e-06")),
    "code": ((("code", "hftune/optim/optimizers.py"), "4f"), {"loss": (3, 1e-4), "grad_norm": (3, 1e-4)}, (3, "code", "hftune/optim/optimizers.py")),
    "library": ((("packages", "torch"), "2.14.0"), {"loss": (1, 1e-4)}, (1, "versions", "torch 2.13.0 | 2.14.0")),
    "threads": ((("hardware", "threads"), 2), {"loss": (1, 8e-8), "grad_norm": (2, 8e-8)}, (None, "hardware", "threads 1 | 2")),
    "processes": ((("world_size",), 2), {"loss": (1, 8e-8), "grad_norm": (2, 8e-8)}, (None, "processes", "processes 1 | 2")),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_difference_goes_before_three_that_cannot_have_done_it(name):
    (path, value), at, (step, kind, text) = PLANTED[name]
    start = changed(START, *path, to=value)
    assert first_cause(diverged(ledger(start, **at))) == (step, "likely", kind, text)
    start = changed(start, "recipe", "train", "log_every", to=1)
    start = changed(start, "code", "hftune/reporting/page.py", to="5f")
    found = diverged(ledger(start, **at), rows=other_rows(max(range(NUM_ROWS), key=used_in)))
    assert first_cause(found) == (step, "likely", kind, text)
    assert {cause.kind for cause in found.causes if cause.is_likely} == {kind}
    assert sum(cause.verdict == "no sign" for cause in found.causes) >= 2


def test_changed_row_is_named_with_the_step_that_first_uses_it():
    row = next(row for row in range(NUM_ROWS) if used_in(row) == 8)
    found = diverged(ledger(loss=(8, 0.02), grad_norm=(8, 0.1)), rows=other_rows(row))
    assert first_cause(found) == (8, "likely", "data", f"train: row {row} differs; it is first used in step 8")
    assert said(found).startswith("Equal to the bit up to step 7. They diverge in step 8: loss 0.25 | 0.255")


def test_row_that_is_used_later_and_key_that_would_have_shown_earlier_have_no_sign():
    early, late = (next(row for row in range(NUM_ROWS) if used_in(row) == step) for step in (8, 9))
    start = changed(START, "recipe", "train", "eps", to=1e-6)
    found = diverged(ledger(start, loss=(8, 0.02)), rows=other_rows(late))
    assert [(cause.verdict, cause.reason) for cause in found.causes] == [
        ("no sign", "it would have shown in step 3"),
        ("no sign", "after the runs have diverged"),
    ]
    found = diverged(ledger(changed(START, *DROPOUT, to=0.2), loss=(8, 0.02)), rows=other_rows(early))
    assert [(cause.kind, cause.verdict, cause.reason) for cause in found.causes] == [
        ("data", "likely", ""),
        ("recipe", "no sign", "it would have shown in step 1"),
    ]


def test_two_causes_with_signs_of_their_own_are_both_likely_and_a_hidden_one_is_possible():
    start = changed(changed(START, "recipe", "seed", to=1), "recipe", "train", "lr", to=9e-4)
    start = changed(start, "recipe", "train", "eps", to=1e-6)
    found = diverged(ledger(start, digest=(1, 0), lr=(2, -0.1), loss=(1, 0.1)))
    verdicts = {"seed": "likely", "train.lr": "likely", "train.eps": "possible"}
    assert {cause.name: cause.verdict for cause in found.causes} == verdicts


def test_micro_batches_do_not_outdo_a_key_that_may_do_anything():
    both = changed(changed(START, "recipe", "train", "micro_batch_size", to=4), "recipe", "task", "max_length", to=128)
    found = diverged(ledger(both, loss=(1, 0.1)))
    assert [cause.verdict for cause in found.causes] == ["likely", "likely"]


def test_more_rows_and_another_order_change_the_samples():
    start = changed(START, "plan", "num_samples", to=NUM_ROWS + 1)
    found = diverged(ledger(start, digest=(1, 0), loss=(1, 0.1)), rows=np.vstack([ROWS, ROWS[:1] ^ 7]))
    assert first_cause(found) == (1, "likely", "data", "train: 40 | 41 rows, 1 only in B (40)")
    found = diverged(ledger(loss=(1, 0.1)), rows=ROWS[::-1])
    assert found.causes[0].text == "train: the same rows in another order, from row 0 on"


def test_path_of_the_data_does_not_matter_if_the_rows_are_known():
    start = changed(START, "recipe", "task", "data_files", to={"train": "b.jsonl"})
    (cause,) = diverged(ledger(start)).causes
    assert cause.verdict == "no sign" and cause.text.endswith(": none | b.jsonl (the rows themselves are compared)")
    assert diverged(ledger(start, loss=(1, 0.1)), rows=None).causes[0].is_likely


def test_smallest_planted_cause_is_above_and_largest_rounding_below_the_tolerance():
    assert 2.0e-7 < TOLERANCE < 1.6e-5
    start = changed(START, "world_size", to=2)
    assert diverged(ledger(start, loss=(1, 2.0e-7))).step is None
    assert diverged(ledger(start, loss=(1, 1.6e-5))).step == 1
    assert diverged(ledger(loss=(1, 6e-8))).step == 1  # on equal machines every bit counts


def test_micro_batches_that_only_round_do_not_make_the_runs_diverge():
    found = diverged(ledger(changed(START, "recipe", "train", "micro_batch_size", to=4), loss=(1, 6e-8)))
    assert (found.step, found.rounding_step) == (None, 1)
    assert [(cause.name, cause.verdict) for cause in found.causes] == [("train.micro_batch_size", "likely")]


def test_rounding_that_grows_is_told_from_a_jump():
    start = changed(START, "world_size", to=2)
    grown = ledger(start)
    for step, line in grown.steps.items():
        line["loss"] *= 1 + 1e-7 * 1.3**step
    found = diverged(grown)
    assert found.has_drifted and found.causes[0].kind == "processes" and found.causes[0].is_likely
    assert said(found).endswith("The difference has grown from earlier ones, as rounding does: no step stands out.")
    jumped = ledger(changed(start, "recipe", "train", "eps", to=1e-6), loss=(3, 1e-4))
    jumped.steps[2]["loss"] *= 1 + 1e-7
    found = diverged(jumped)
    assert not found.has_drifted
    assert [(cause.kind, cause.verdict) for cause in found.causes] == [("recipe", "likely"), ("processes", "rounding only")]


def test_key_that_changed_on_a_resume_counts_from_its_step_on():
    resumed = {**changed(START, "recipe", "train", "lr", to=3e-4), "after_step": 10}
    found = diverged(ledger(START, resumed, lr=(11, -0.7), loss=(12, 0.01)))
    assert (found.step, found.causes[0].name, found.causes[0].verdict) == (11, "train.lr", "likely")
    (cause,) = diverged(ledger(START, resumed, loss=(5, 0.01))).causes
    assert (cause.verdict, cause.reason) == ("no sign", "after the runs have diverged")


def test_skipped_step_and_losses_that_are_not_finite():
    skipped = ledger(changed(START, "recipe", "train", "skip", to=[7]), loss=(8, 0.01))
    skipped.steps[7] = {"step": 7, "skipped": True}
    assert first_cause(diverged(skipped)) == (7, "likely", "recipe", "train.skip: none | [7]")
    assert said(diverged(skipped)).endswith("They diverge in step 7: skipped by B alone.")
    both = ledger()
    both.steps[7] = {"step": 7, "skipped": True}
    assert "They diverge in step 8: loss" in said(diverged(skipped, both))
    broken = ledger()
    broken.steps[5]["loss"] = None
    assert said(diverged(broken)).endswith("They diverge in step 5: loss 0.4 | not finite.")
    assert diverged(broken, broken).step is None


def test_runs_without_a_common_step_are_said_to_have_none():
    found = diverged(LedgerRecord())
    assert said(found) == "The runs have no step in common." and not [*kinds_sentences(found)]


def test_resume_in_between_changes_no_verdict():
    start = changed(START, "recipe", "train", "eps", to=1e-6)
    found = diverged(ledger(start, loss=(3, 1e-4)), ledger(START, {**START, "after_step": 2}))
    assert (found.step, found.causes[0].name, found.causes[0].verdict) == (3, "train.eps", "likely")


def test_different_code_that_only_looks_at_runs_leaves_bits_comparable():
    found = diverged(ledger(changed(START, "code", "hftune/reporting/page.py", to="9f"), loss=(5, 1e-7)))
    assert (found.step, found.tolerance) == (5, 0.0)
    (cause,) = found.causes
    assert (cause.text, cause.verdict) == ("hftune/reporting/page.py (which does not train)", "no sign")


def test_frozen_weights_of_another_base_model_differ():
    assert first_cause(diverged(ledger({**START, "base": "other"}, loss=(1, 0.1))))[2:] == ("versions", "base none | other")


def test_clipping_may_show_late_and_other_updates_in_bits_at_once():
    for key, verdict in (("clip_norm", "likely"), ("eps", "no sign")):
        (cause,) = diverged(ledger(changed(START, "recipe", "train", key, to=0.5), loss=(12, 0.01))).causes
        assert cause.verdict == verdict
    several = changed(changed(START, "recipe", "train", "eps", to=1e-6), "world_size", to=2)
    assert diverged(ledger(several, loss=(12, 0.01))).causes[0].name == "train.eps"
