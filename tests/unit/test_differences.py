"""Where two runs part, and which of their differences is to blame: from ledgers made by hand, each with one thing planted."""

import copy

import numpy as np
import pytest

from hftune.replay import TOLERANCE
from hftune.replay.differences import part
from hftune.replay.sentences import kinds_sentences, parting_sentences
from hftune.replay.traces import Trace

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


def trace(start=START, rows=ROWS, starts=None, **at):
    """A run of 30 steps whose losses fall. ``at``: of each value of a line the step from which on it is another, and by how much."""
    lines = {}
    for step in range(1, NUM_STEPS + 1):
        line = {
            "step": step,
            "num_samples": BATCH,
            "digest": f"d{step}",
            "loss": 2 / step,
            "grad_norm": 1.0,
            "lr": 1e-3 * (step > 1),
            "items": 4.0,
        }
        for name, (first, by) in at.items():
            if step >= first:
                line[name] = f"{line[name]}x" if name == "digest" else line[name] * (1 + by)
        lines[step] = line
    return Trace(lines, starts or [start], rows)


def other_rows(*indices):
    rows = ROWS.copy()
    rows[list(indices), 0] ^= 1
    return rows


def first_cause(a, b):
    parting = part(a, b)
    return parting.step, parting.causes[0].verdict, parting.causes[0].kind, parting.causes[0].text


def used_in(row):
    from hftune.batch_plan import BatchPlan

    return int(np.flatnonzero(BatchPlan(**START["plan"]).epoch(0).order_N == row)[0]) // BATCH + 1


def test_equal_runs_do_not_part():
    parting = part(trace(), trace())
    assert (parting.step, parting.causes, parting.tolerance) == (None, [], 0.0)
    assert parting.same == ["recipe", "data", "code", "versions", "hardware", "processes"] and parting.unknown == []
    assert parting_sentences(parting) == "Equal to the bit in all 30 steps. The runs do not part."


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
def test_planted_difference_is_the_likely_cause(name):
    (path, value), at, (step, kind, text) = PLANTED[name]
    start = changed(START, *path, to=value)
    assert first_cause(trace(), trace(start, **at)) == (step, "likely", kind, text)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_difference_goes_before_three_that_cannot_have_done_it(name):
    (path, value), at, (step, kind, text) = PLANTED[name]
    start = changed(START, *path, to=value)
    start = changed(start, "recipe", "train", "log_every", to=1)
    start = changed(start, "code", "hftune/reporting/page.py", to="5f")
    found = part(trace(), trace(start, other_rows(int(np.argmax([used_in(row) for row in range(NUM_ROWS)]))), **at))
    assert (found.step, found.causes[0].verdict, found.causes[0].kind, found.causes[0].text) == (step, "likely", kind, text)
    assert {cause.kind for cause in found.causes if cause.is_likely} == {kind}
    assert sum(cause.verdict == "no sign" for cause in found.causes) >= 2


def test_changed_row_is_named_with_the_step_that_first_uses_it():
    row = next(row for row in range(NUM_ROWS) if used_in(row) == 8)
    b = trace(rows=other_rows(row), loss=(8, 0.02), grad_norm=(8, 0.1))
    assert first_cause(trace(), b) == (8, "likely", "data", f"train: row {row} differs; it is first used in step 8")
    assert parting_sentences(part(trace(), b)).startswith(
        "Equal to the bit up to step 7. They part in step 8: loss 0.25 | 0.255"
    )


def test_row_that_is_used_later_and_key_that_would_have_shown_earlier_have_no_sign():
    early, late = (next(row for row in range(NUM_ROWS) if used_in(row) == step) for step in (8, 9))
    start = changed(START, "recipe", "train", "eps", to=1e-6)
    found = part(trace(), trace(start, other_rows(late), loss=(8, 0.02)))
    assert [(cause.verdict, cause.reason) for cause in found.causes] == [
        ("no sign", "it would have shown in step 3"),
        ("no sign", "after the runs have parted"),
    ]
    found = part(trace(), trace(changed(START, *DROPOUT, to=0.2), other_rows(early), loss=(8, 0.02)))
    assert [(cause.kind, cause.verdict, cause.reason) for cause in found.causes] == [
        ("data", "likely", ""),
        ("recipe", "no sign", "it would have shown in step 1"),
    ]


def test_two_causes_with_signs_of_their_own_are_both_likely_and_a_hidden_one_is_possible():
    start = changed(
        changed(changed(START, "recipe", "seed", to=1), "recipe", "train", "lr", to=9e-4), "recipe", "train", "eps", to=1e-6
    )
    found = part(trace(), trace(start, digest=(1, 0), lr=(2, -0.1), loss=(1, 0.1)))
    assert {cause.key: cause.verdict for cause in found.causes} == {
        "seed": "likely",
        "train.lr": "likely",
        "train.eps": "possible",
    }


def test_micro_batches_do_not_outdo_a_key_that_may_do_anything():
    both = changed(changed(START, "recipe", "train", "micro_batch_size", to=4), "recipe", "task", "max_length", to=128)
    found = part(trace(), trace(both, loss=(1, 0.1)))
    assert {cause.key: cause.verdict for cause in found.causes} == {
        "train.micro_batch_size": "likely",
        "task.max_length": "likely",
    }


def test_more_rows_and_another_order_change_the_samples():
    start = changed(START, "plan", "num_samples", to=NUM_ROWS + 1)
    more = np.vstack([ROWS, ROWS[:1] ^ 7])
    cause = first_cause(trace(), trace(start, more, digest=(1, 0), loss=(1, 0.1)))
    assert cause == (1, "likely", "data", "train: 40 | 41 rows, 1 only in B (40)")
    assert (
        first_cause(trace(), trace(rows=ROWS[::-1], loss=(1, 0.1)))[3] == "train: the same rows in another order, from row 0 on"
    )


def test_path_of_the_data_does_not_matter_if_the_rows_are_known():
    start = changed(START, "recipe", "task", "data_files", to={"train": "b.jsonl"})
    (cause,) = part(trace(), trace(start)).causes
    assert (cause.verdict, cause.text) == (
        "no sign",
        "task.data_files.train: none | b.jsonl (the rows themselves are compared)",
    )
    assert part(trace(), trace(start, rows=None, loss=(1, 0.1))).causes[0].is_likely


def test_smallest_planted_cause_is_above_and_largest_rounding_below_the_tolerance():
    assert 2.0e-7 < TOLERANCE < 1.6e-5
    start = changed(START, "world_size", to=2)
    assert part(trace(), trace(start, loss=(1, 2.0e-7))).step is None
    assert part(trace(), trace(start, loss=(1, 1.6e-5))).step == 1
    assert part(trace(), trace(loss=(1, 6e-8))).step == 1  # on equal machines every bit counts


def test_micro_batches_that_only_round_do_not_part_the_runs():
    found = part(trace(), trace(changed(START, "recipe", "train", "micro_batch_size", to=4), loss=(1, 6e-8)))
    assert (found.step, found.rounding_step) == (None, 1)
    assert [(cause.key, cause.verdict) for cause in found.causes] == [("train.micro_batch_size", "likely")]


def test_rounding_that_grows_is_told_from_a_jump():
    start, grown = changed(START, "world_size", to=2), trace(changed(START, "world_size", to=2))
    for step, line in grown.steps.items():
        line["loss"] *= 1 + 1e-7 * 1.3**step
    found = part(trace(), grown)
    assert found.has_drifted and found.causes[0].kind == "processes" and found.causes[0].is_likely
    assert parting_sentences(found).endswith(
        "The difference has grown from earlier ones, as rounding does: no step stands out."
    )
    jumped = trace(changed(start, "recipe", "train", "eps", to=1e-6), loss=(3, 1e-4))
    jumped.steps[2]["loss"] *= 1 + 1e-7
    found = part(trace(), jumped)
    assert not found.has_drifted
    assert [(cause.kind, cause.verdict) for cause in found.causes] == [("recipe", "likely"), ("processes", "rounding only")]


def test_key_that_changed_on_a_resume_counts_from_its_step_on():
    resumed = {**changed(START, "recipe", "train", "lr", to=3e-4), "after_step": 10}
    found = part(trace(), trace(starts=[START, resumed], lr=(11, -0.7), loss=(12, 0.01)))
    assert (found.step, found.causes[0].key, found.causes[0].verdict) == (11, "train.lr", "likely")
    found = part(trace(), trace(starts=[START, resumed], loss=(5, 0.01)))
    assert [(cause.verdict, cause.reason) for cause in found.causes] == [("no sign", "after the runs have parted")]


def test_skipped_step_and_losses_that_are_not_finite():
    b = trace(changed(START, "recipe", "train", "skip", to=[7]), loss=(8, 0.01))
    b.steps[7] = {"step": 7, "skipped": True}
    assert first_cause(trace(), b) == (7, "likely", "recipe", "train.skip: none | [7]")
    assert parting_sentences(part(trace(), b)).endswith("They part in step 7: left out by B alone.")
    both = [trace(), trace(loss=(8, 0.01))]
    for run in both:
        run.steps[7] = {"step": 7, "skipped": True}
    assert "They part in step 8: loss" in parting_sentences(part(*both))
    b = trace()
    b.steps[5]["loss"] = None
    assert parting_sentences(part(trace(), b)).endswith("They part in step 5: loss 0.4 | not finite.")
    both = [trace(), trace()]
    for run in both:
        run.steps[5]["loss"] = None
    assert part(*both).step is None


def test_steps_that_are_known_only_now_and_then_bound_the_parting():
    logged = [
        Trace({step: {"step": step, "loss": 1 + by * (step > 12)} for step in (1, 10, 20, 30)}, [{"after_step": 0}])
        for by in (0, 0.1)
    ]
    found = part(*logged)
    assert (found.step, found.last_equal, found.tolerance) == (20, 10, TOLERANCE)
    assert "They part between steps 10 and 20, the next that both have recorded: loss 1 | 1.1" in parting_sentences(found)


def test_update_between_two_logged_steps_explains_the_second():
    logged = [
        Trace({step: {"step": step, "loss": 1 + by * (step > 1), "lr": 1e-3 * (step > 1)} for step in (1, 10, 20)}, [start])
        for start, by in ((START, 0), (changed(START, "recipe", "train", "eps", to=1e-6), 0.1))
    ]
    assert first_cause(*logged) == (10, "likely", "recipe", "train.eps: 1e-08 | 1e-06")


def test_steps_whose_losses_are_not_known_are_not_called_equal():
    runs = [Trace({step: {"digest": f"d{step}"} for step in range(1, 11)}, [{"after_step": 0}]) for _ in range(2)]
    assert parting_sentences(part(*runs)) == "The same samples in all 10 steps. Their losses are not recorded."
    for run, by in zip(runs, (0, 0.1), strict=True):
        for step in (2, 9):
            run.steps[step]["loss"] = 1 + by * (step > 2)
    assert "Equal to the bit up to step 2. They part between steps 2 and 9, the next" in parting_sentences(part(*runs))
    runs[1].steps[5]["digest"] = "another"
    assert parting_sentences(part(*runs)) == "Equal to the bit up to step 2. They part in step 5: other samples."
    for run in runs:
        run.steps = {9: run.steps[9]}
    assert parting_sentences(part(*runs)).startswith("They part in step 9 or before, the first that both have recorded: loss")


def test_sparse_record_of_other_files_is_compared_in_what_both_have():
    other = {"after_step": 0, "packages": {"torch": "2.13.0", "hftune": "0.2.0"}, "code": {"commit": "1"}, "world_size": 1}
    other |= {"hardware": {"device": "cuda"}, "data": {"train": {"rows": NUM_ROWS}}}
    found = part(trace(), Trace(trace().steps, [other]))
    assert [(cause.kind, cause.text) for cause in found.causes] == [("hardware", "device cpu | cuda")]
    assert found.same == ["versions", "processes"] and found.unknown == ["recipe", "data", "code"]


def test_runs_without_a_common_step_are_said_to_have_none():
    found = part(trace(), Trace())
    assert parting_sentences(found) == "The runs have no step in common." and not [*kinds_sentences(found)]


def test_resume_in_between_changes_no_verdict():
    resumed = [START, {**START, "after_step": 2}]
    start = changed(START, "recipe", "train", "eps", to=1e-6)
    found = part(trace(starts=resumed), trace(start, loss=(3, 1e-4)))
    assert (found.step, found.causes[0].key, found.causes[0].verdict) == (3, "train.eps", "likely")


def test_other_code_that_only_looks_at_runs_leaves_bits_comparable():
    start = changed(START, "code", "hftune/reporting/page.py", to="9f")
    found = part(trace(), trace(start, loss=(5, 1e-7)))
    assert (found.step, found.tolerance) == (5, 0.0)
    assert [(cause.text, cause.verdict) for cause in found.causes] == [
        ("hftune/reporting/page.py (which does not train)", "no sign")
    ]


def test_clipping_may_show_late_and_other_updates_in_bits_at_once():
    for key, verdict in (("clip_norm", "likely"), ("eps", "no sign")):
        found = part(trace(), trace(changed(START, "recipe", "train", key, to=0.5), loss=(12, 0.01)))
        assert [cause.verdict for cause in found.causes] == [verdict]
    several = changed(changed(START, "recipe", "train", "eps", to=1e-6), "world_size", to=2)
    assert part(trace(), trace(several, loss=(12, 0.01))).causes[0].key == "train.eps"
