"""The reference figures of tests/support/figures.py: what is written of a demo, and how a difference is said."""

from tests.support.figures import differences, figures_of


def test_figures_of_a_demo_hold_losses_digests_and_weights_and_a_difference_names_its_place(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    found = figures_of("mnist_demo", tmp_path)
    assert len(found["samples"]) == 4 and len(found["first_weights"]) == 64
    assert [*found["model"]] == [*found["model_last"]] == ["model.safetensors"]
    assert [line["step"] for line in found["logged"] if "train/loss" in line] == [1, 2, 3, 4]
    assert differences(found, found, "mnist_demo") == []
    changed = {**found, "samples": [*found["samples"][:3], "0"]}
    (line,) = differences(found, changed, "mnist_demo")
    assert line.startswith("mnist_demo/samples/3: ")
