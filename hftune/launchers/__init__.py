"""Ways to start the processes of a run beside `accelerate launch` and `torchrun`. They know the command line, not the loop."""
