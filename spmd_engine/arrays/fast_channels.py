"""Loops of batch normalisation over float32 rows[n c] that Numba compiles; imported only where it is installed."""

from __future__ import annotations

import numpy as np

from spmd_engine.arrays.fast_kernels import compiled, f32

SUMMED = 1024  # rows whose sum is made one by one: a sum of a million would have lost two digits more


@compiled
def channel_sums(x, sums):
    """Add to sums[c] those of x[n c]."""
    some = np.empty_like(sums)
    for first in range(0, len(x), SUMMED):
        some[:] = f32(0)
        for n in range(first, min(first + SUMMED, len(x))):
            for c in range(sums.size):
                some[c] += x[n, c]
        sums += some


@compiled
def channel_squares(x, mean, squares):
    """Add to squares[c] those of x[n c] - mean[c]."""
    some = np.empty_like(squares)
    for first in range(0, len(x), SUMMED):
        some[:] = f32(0)
        for n in range(first, min(first + SUMMED, len(x))):
            for c in range(squares.size):
                some[c] += (x[n, c] - mean[c]) * (x[n, c] - mean[c])
        squares += some


@compiled
def scale_channels(x, mean, factor, shift, y):
    """y[n c] = (x[n c] - mean[c]) * factor[c] + shift[c]."""
    for n in range(len(x)):
        for c in range(mean.size):
            y[n, c] = (x[n, c] - mean[c]) * factor[c] + shift[c]


@compiled
def channel_gradients(dy, x, mean, along, total):
    """Add to along[c] the sums of dy[n c] * (x[n c] - mean[c]), and to total[c] those of dy."""
    some, others = np.empty_like(along), np.empty_like(total)
    for first in range(0, len(x), SUMMED):
        some[:] = f32(0)
        others[:] = f32(0)
        for n in range(first, min(first + SUMMED, len(x))):
            for c in range(total.size):
                some[c] += dy[n, c] * (x[n, c] - mean[c])
                others[c] += dy[n, c]
        along += some
        total += others


@compiled
def normalized_gradient(dy, x, mean, along, shift, factor, dx):
    """dx[n c] = (dy[n c] - shift[c] - (x[n c] - mean[c]) * along[c]) * factor[c]."""
    for n in range(len(x)):
        for c in range(mean.size):
            dx[n, c] = (dy[n, c] - shift[c] - (x[n, c] - mean[c]) * along[c]) * factor[c]
