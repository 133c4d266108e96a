"""Metrics as ``evaluate.Metric`` subclasses that need no network."""
