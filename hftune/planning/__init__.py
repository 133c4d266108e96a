"""What a run would do and need, worked out without running it."""
