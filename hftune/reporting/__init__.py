"""What a person reads about a run: reports and model cards, made from the files of its output folder."""

TOLERANCE = 2e-6
"""Relative difference of a step's loss or gradient norm that other processes, threads, devices or code may make by rounding.
The largest rounding met from equal weights was 2e-7, the smallest planted cause 1.6e-5. It does not grow with the steps."""
