#!/bin/sh
# A small chat model learns from its own answers: two rounds of training on those that are right. Each round has new prompts, so
# that the mean score which hftune sample prints is that of a model on prompts that it was not trained on. No network, two minutes.
set -e
draw="--answers 8 --reward rewards.exact --keep best --threshold 1 --max-new-tokens 20"

python rewards.py
hftune train recipe=chats_demo task.max_train_samples=1280 output_dir=outputs/round_0
hftune sample outputs/round_0 --data prompts_0.jsonl --output best_0.jsonl --seed 0 $draw
for round in 1 2; do
    before=$((round - 1))
    hftune train recipe=sft task.model=outputs/round_$before/model task.data_files.train=best_$before.jsonl task.eval_share=0.1 \
        task.max_length=96 train.epochs=3 train.batch_size=32 train.lr=2e-3 output_dir=outputs/round_$round
    hftune sample outputs/round_$round --data prompts_$round.jsonl --output best_$round.jsonl --seed $round $draw
done
