"""The tasks' metrics as plain functions, what is known of each by its name, and those that recipes name."""
