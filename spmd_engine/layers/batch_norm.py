"""Batch normalisation, over the whole micro-batch wherever its samples, rows and columns are."""

from __future__ import annotations

from functools import partial
from math import prod

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.images.channels import (
    channel_gradients,
    channel_squares,
    channel_sums,
    normalized_gradient,
    scale_channels,
)
from spmd_engine.layers.declarations import Activation, Buffer, Parameter
from spmd_engine.layers.layer import Extra, Layer


class BatchNorm(Layer):
    """y[b h w c] = (x - mean[c]) / sqrt(variance[c] + epsilon) · scale[c] + shift[c]

    Mean and variance are over b, h and w of the whole micro-batch, on any mesh: with n elements a channel in all,

    Forward
        1. mean[c] = AllReduce_BHW(sum of x) / AllReduce_BHW(count)             one reduction
        2. variance[c] = AllReduce_BHW(sum of (x - mean)²) / n                  about the mean that all share
    Backward, with x̂ = (x - mean) / sqrt(variance + epsilon)
        3. dscale[c] {U_BHW} = sum of dy · x̂,   dshift[c] {U_BHW} = sum of dy
        4. dx = scale / sqrt(variance + epsilon) · (dy - AllReduce_BHW(dshift) / n - x̂ · AllReduce_BHW(dscale) / n)

    Channels may be cut over other axes: each rank normalises its own. The running mean and the running variance are
    buffers: a micro-batch makes each 1 - ``momentum`` of what it was and ``momentum`` of its own, its variance there
    with n - 1 in place of n; in evaluation they take the places of mean and variance. After Ioffe and Szegedy, "Batch
    normalization" (2015); with momentum and variances as PyTorch has them.

    ``channels`` are a letter and their number, ``letters`` those of batch, rows and columns.
    """

    def __init__(
        self,
        channels: tuple[str, int],
        *,
        letters: str = "bhw",
        momentum: float = 0.1,
        epsilon: float = 1e-5,
        scale: float = 1.0,
    ) -> None:
        c, self.over, self.epsilon = channels[0], letters, epsilon
        self.sizes = dict([channels])
        self.inputs = self.outputs = Activation(" ".join(letters + c), where="inside")
        self.may_cut = letters + c
        self.parameters = {
            "scale": Parameter(c, mean=scale, decay=False, summed=letters),
            "shift": Parameter(c, decay=False, summed=letters),
        }
        running = partial(_running, momentum)
        self.buffers = {"mean": Buffer(c, running), "variance": Buffer(c, running, initial=1.0)}

    def forward(self, sh, p, x, ctx):
        xp = backend_of(x).xp
        if not ctx.training:
            inverse = 1 / xp.sqrt(p["variance"] + self.epsilon)
            return scale_channels(x, p["mean"], inverse * p["scale"], p["shift"]), None
        channels = x.shape[3]
        sums = xp.empty(channels + 1, x.dtype)
        sums[:channels] = channel_sums(x)
        sums[channels] = prod(x.shape[:3])
        sums = sh.all_reduce(sums, over=self.over)
        count = float(sums[channels])
        mean = sums[:channels] / max(count, 1.0)
        squares = sh.all_reduce(channel_squares(x, mean), over=self.over)
        inverse = 1 / xp.sqrt(squares / max(count, 1.0) + self.epsilon)
        y = scale_channels(x, mean, inverse * p["scale"], p["shift"])
        told = Extra({"mean": mean, "variance": squares / max(count - 1, 1.0)})
        return y, (x, mean, inverse, count), told

    def backward_input(self, sh, p, saved, dy):
        x, mean, inverse, count = saved
        sums = backend_of(dy).xp.stack(channel_gradients(dy, x, mean, inverse))
        means = sh.all_reduce(sums.copy(), over=self.over) / max(count, 1.0)
        dx = normalized_gradient(dy, x, mean, inverse, p["scale"], means[0], means[1])
        return dx, sums

    def backward_weight(self, sh, rest, g):
        g.add("scale", rest[0])
        g.add("shift", rest[1])


def _running(momentum: float, old: Array, new: Array) -> Array:
    return (1 - momentum) * old + momentum * new
