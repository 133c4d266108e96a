"""The output of a run: terminal, metrics.jsonl, ledger, W&B, TensorBoard, MLflow and trackers of your own."""
