#!/usr/bin/env bash
# A grid of learning rates and seeds, one run after the other, each in an output folder of its own.
#   RECIPE=yelp_demo examples/sweep/grid.sh train.epochs=1
# Interrupt it and start it again: finished runs are skipped, and the interrupted one resumes. Words are passed on to each run.
set -euo pipefail
recipe=${RECIPE:-yelp_demo}
grid=outputs/grid_$(basename "$recipe" .yaml)
for lr in ${RATES:-3e-4 1e-3 3e-3}; do
    for seed in ${SEEDS:-1 2}; do
        folder=$grid/lr_${lr}_seed_$seed
        echo "== $folder"
        hftune train recipe="$recipe" train.lr="$lr" seed="$seed" output_dir="$folder" "$@"
    done
done
python - "$grid" <<'PYTHON'
import json, pathlib, sys

for path in sorted(pathlib.Path(sys.argv[1]).glob("*/result.json")):
    best = json.loads(path.read_text(encoding="utf-8"))["best"]
    print(f"{path.parent.name:<24} {best['metric']} {best['value']:.4f} at step {best['step']}")
PYTHON
