"""All that looks at past runs: compare, replay, bisect, receipts and the audit. Reads a run's folder, and never writes into it.

A step is a function of recipe, data, seed, step and weights. The ledger has the first four of every step, a checkpoint has the
weights: so any step can be computed again, on any number of processes, and has to give the same loss.
"""
