"""Machines and processes that come and go while a job trains, seen from their launchers. Independent of the training."""
