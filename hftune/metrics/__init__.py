"""The tasks' metrics, as ``evaluate.Metric`` subclasses that need no network, and those that recipes name."""
