"""Dropout that is the same on every mesh."""

from spmd_engine.arrays.backend import backend_of
from spmd_engine.arrays.random import bernoulli, key_of


class Dropout:
    """y = x · mask / (1 - rate): the mask is a function of seed, step, name and global index alone."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def forward(self, sh, x, ctx):
        if not (self.rate and ctx.training):
            return x, None
        backend = backend_of(x)
        # A row's number must be the same on every mesh, so it may not depend on this micro-batch's length.
        rows = ctx.samples[:, None] * (1 << 24) + ctx.residual_positions[None, :]
        key = key_of(ctx.seed, "dropout", ctx.step, sh.label)
        mask = bernoulli(key, 1.0 - self.rate, rows, x.shape[-1], backend)
        return self.backward(mask, x), mask

    def backward(self, mask, dy):
        if mask is None:
            return dy
        dx = dy * mask
        dx *= dy.dtype.type(1.0 / (1.0 - self.rate))
        return dx
