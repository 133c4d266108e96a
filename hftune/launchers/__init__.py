"""Ways to start the processes of a run besides `accelerate launch` and `torchrun`. They know the command line, not the loop."""
