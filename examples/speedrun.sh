#!/bin/sh
# hftune's promises in three minutes, with your own eyes: sh examples/speedrun.sh [FOLDER]
# Two processes train a small BERT. The same training is killed in the middle, and goes on with one process. Then the run is
# checked, a step of it computed again, and the model leaves. FOLDER keeps everything; without one it is temporary.
set -eu
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
cd "$folder"
export OMP_NUM_THREADS=1 # more threads of a process would wait for each other in so small a model
steps=${STEPS:-125} # an epoch; tests take fewer
quarter=$((steps / 4))
train="hftune train recipe=yelp_demo train.max_steps=$steps checkpoint.every=$quarter checkpoint.keep=4 train.log_every=$quarter"

say() {
    printf '\n== %s\n' "$1"
}
run() {
    printf '$ %s\n' "$*"
    "$@"
}

say "1. Train on two processes."
run $train --processes 2 output_dir=whole

say "2. The same, killed with SIGKILL once it has a checkpoint."
printf '$ %s\n' "$train --processes 2 output_dir=broken"
$train --processes 2 output_dir=broken &
while ! ls broken/checkpoints/step_* > /dev/null 2>&1; do
    kill -0 $! && sleep 0.1
done
workers=$(pgrep -P $!) # the process group of both
kill -9 $!
kill -9 "-$workers"
wait || true

say "3. The same command again, with one process instead of two: it goes on where it was."
run $train --processes 1 output_dir=broken

say "4. Are both the same training? And did each epoch use each sample once?"
run hftune compare whole broken
run hftune audit broken

say "5. Compute a past step again, and see the samples behind its loss."
run hftune replay broken --step $((4 * steps / 5)) --worst 3

say "6. Ask the model; then load it without hftune."
run hftune predict broken --text "the food was superb" --text "cold, late and rude"
run python -c "from transformers import pipeline; print(pipeline('text-classification', 'broken/model')('the food was superb'))"

say "Everything is in $folder. The report: $folder/broken/report.html"
