"""report.html in a real browser, headless: it draws, fits a phone, and its controls work. Skips where there is no Chromium."""

import json
import re
import shutil
import subprocess

import pytest

from hftune.reporting.page import page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--allow-file-access-from-files", "--virtual-time-budget=5000", "--window-size=1280,1000", "--dump-dom",
)  # fmt: skip
PROBE = """
const answers = {errors: []};
addEventListener("error", (event) => answers.errors.push(event.message));
const pause = () => new Promise((resolve) => setTimeout(resolve, 200));  // uPlot draws after the script that asks for it
addEventListener("load", async () => {
  await pause();
  const $ = (selector) => document.querySelector(selector), legend = () => $(".legend").textContent, over = () => $(".u-over");
  const at = (type, share) => {
    const box = over().getBoundingClientRect();
    const place = {clientX: box.left + share * box.width, clientY: box.top + 20, movementX: 1, bubbles: true, view: window};
    over().dispatchEvent(new MouseEvent(type, place));
  };
  answers.overhang = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  answers.charts = [...document.querySelectorAll("#charts h4")].map((node) => node.textContent);
  answers.canvases = document.querySelectorAll("canvas").length;
  answers.rest = legend();
  at("mouseenter", 0.5); at("mousemove", 0.5);
  answers.hover = legend();
  at("mousedown", 0.5); at("mousemove", 0.75); at("mouseup", 0.75);
  answers.zoomed = !$("#reset").disabled;
  at("dblclick", 0.5);
  answers.reset = $("#reset").disabled;
  document.querySelector('#scale [data-value="log"]').click();
  document.querySelector('#axis [data-value="epoch"]').click();
  $("#smoothing").value = 0.9;
  $("#smoothing").dispatchEvent(new Event("input"));
  await pause();
  at("mouseenter", 0.5); at("mousemove", 0.5);
  answers.smoothed = legend();
  const before = getComputedStyle(document.body).backgroundColor;
  $("#theme").click();
  answers.themes = [before, getComputedStyle(document.body).backgroundColor];
  answers.alive = window.nasty === undefined;
  parent.postMessage(answers, "*");
});
"""
"""Tries the page out from within, and tells the page around it, whose frame has the width of a phone or a desktop."""


def answers_of(text, width, folder):
    """Open a page in a frame of this width; return what the probe found."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)  # which would not let the probe run
    (folder / "report.html").write_text(text.replace("<meta charset", f"<script>{PROBE}</script><meta charset", 1))
    (folder / "frame.html").write_text(
        f'<iframe src="report.html" style="width:{width}px;height:900px;border:0"></iframe><pre></pre><script>'
        'addEventListener("message", (event) => { document.querySelector("pre").textContent = JSON.stringify(event.data); });</script>'
    )
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / f'profile-{width}'}", (folder / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<pre>(\{.*\})</pre>", done.stdout)
    assert found, done.stderr
    return json.loads(found[1].replace("&lt;", "<").replace("&amp;", "&"))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [360, 1200])
def test_page_draws_fits_and_answers(width, tmp_path):
    nasty = "</script><script>nasty = 1</script><img src=x onerror='nasty = 2'>" + "long_word_" * 20
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": step, "epoch": step / 50, "train/loss": 4 / step, "train/lr": (step - 1) / 100} for step in range(1, 101)]
    matrix = [[5 + (row == column) * 100 for column in range(10)] for row in range(10)]
    rows += [{"step": step, "eval/loss": 3 / step, "eval/accuracy": 0.5, "eval/confusion_matrix": matrix} for step in (50, 100)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(f"recipe: wide\ntask: {{model: {'m' * 300}}}\n")
    facts = {"labels": [f"a class with a long name {index}" for index in range(10)], "notices": [nasty], "command": nasty}
    (folder / "run.json").write_text(json.dumps(facts))
    predictions = [{"index": index, "text": nasty, "label": nasty, "prediction": "x", "error": 1.0} for index in range(12)]
    (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in predictions))
    found = answers_of(page([folder]), width, tmp_path)
    assert found["errors"] == [] and found["alive"]
    assert found["overhang"] == 0, "the page scrolls sideways"
    assert found["charts"] == ["Loss", "Learning rate", "Accuracy"] and found["canvases"] == 3
    assert found["rest"] == "training 0.04evaluation 0.03"
    assert found["hover"] == "training 0.08evaluation 0.06step 50"
    assert found["zoomed"] and found["reset"]
    assert found["smoothed"].endswith("epoch 1") and not found["smoothed"].startswith("training 0.08"), (
        "a mean of larger losses"
    )
    assert found["themes"][0] != found["themes"][1]
