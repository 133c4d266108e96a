"""Callbacks for recipes of tests."""

import random
import time

import torch

from hftune import Callback


class Asks(Callback):
    """Logs a value of each step, draws random numbers; asks for an evaluation and a checkpoint, and for an end if it is told to."""

    def __init__(self, evaluation: int, checkpoint: int, end: int | None = None):
        self.evaluation, self.checkpoint, self.end = evaluation, checkpoint, end

    def on_step(self, step):
        torch.rand(3), random.random()
        step.log("own/loss", step.loss)
        if step.step == self.evaluation:
            step.ask_for_evaluation()
        if step.step == self.checkpoint:
            step.ask_for_checkpoint()
        if step.step == self.end:
            step.ask_to_stop("the test says so")


class EndsElsewhere(Callback):
    """Asks for the end on the last process alone."""

    on_all_processes = True

    def on_begin(self, begin):
        self.is_here = begin.process_index == begin.num_processes - 1

    def on_step(self, step):
        if self.is_here and step.step == 2:
            step.ask_to_stop("the last process has seen enough")


class FailsElsewhere(EndsElsewhere):
    """Fails on the last process alone."""

    def on_step(self, step):
        if self.is_here:
            raise RuntimeError(f"no luck in step {step.step}")


class MustNotFail(FailsElsewhere):
    must_not_fail = True


class MustNotFailAtTheEnd(EndsElsewhere):
    must_not_fail = True

    def on_end(self, end):
        if self.is_here:
            time.sleep(1)  # the main process is done by then
            raise RuntimeError("no luck at the end")
