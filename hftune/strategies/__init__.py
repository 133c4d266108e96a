"""Ways to spread one training step over processes."""
