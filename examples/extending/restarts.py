"""A schedule of your own: a function that returns the factor of train.lr in optimizer step ``step``, counted from 0."""

import math


def cosine_restarts(step, num_steps, steps_per_epoch):
    """Fall along half a cosine in every ten epochs. Source: Loshchilov and Hutter, 2017, arXiv:1608.03983."""
    cycle = 10 * steps_per_epoch
    return 0.5 * (1 + math.cos(math.pi * (step % cycle) / cycle))
