"""A tracker of your own: only ``log`` must be written."""

from pathlib import Path

from hftune import TrackerBackend


class CsvTracker(TrackerBackend):
    """Writes metrics.csv beside metrics.jsonl: step, name, value."""

    def start(self, config, earlier):
        self.path = Path(self.recipe.output_dir) / "metrics.csv"
        lines = [f"{line['step']},{name},{value}\n" for line in earlier.lines for name, value in line.items() if name != "step"]
        self.path.write_text("step,name,value\n" + "".join(lines))

    def log(self, step, values):
        with self.path.open("a") as file:
            file.writelines(f"{step},{name},{value}\n" for name, value in values.items())
