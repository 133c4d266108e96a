"""Time travel: the past steps of a run computed again. Reads a run's folder, and never writes into it.

A step is a function of recipe, data, seed, step and weights. The ledger has the first four of every step, a checkpoint has the
weights: so any step can be computed again, on any number of processes, and has to give the same loss.
"""

TOLERANCE = 2e-6
"""Relative difference of a step's loss or gradient norm that other processes, threads, devices or code may make by rounding.
The largest rounding met from equal weights was 2e-7, the smallest planted cause 1.6e-5. It does not grow with the steps."""
