"""What a person sees of a run: terminal, metrics.jsonl, ledger, W&B, TensorBoard and MLflow."""
