"""Loops of batch normalisation over float32 rows[n c] that Numba compiles.

As those of ``fast_kernels``, in whose manner they are written. Sums are made of ``SUMMED`` rows at a time, in memory
that the caller has for them, ``some``: a sum of a million made one by one would have lost two digits more.
"""

from spmd_engine.arrays.fast_kernels import Rows, Vector, compiled, f32

SUMMED = 1024


@compiled
def channel_sums(x: Rows, some: Vector, sums: Vector):
    """Add to sums[c] those of x[n c]."""
    for first in range(0, len(x), SUMMED):
        for c in range(sums.size):
            some[c] = f32(0)
        for n in range(first, min(first + SUMMED, len(x))):
            for c in range(sums.size):
                some[c] += x[n, c]
        for c in range(sums.size):
            sums[c] += some[c]


@compiled
def channel_squares(x: Rows, mean: Vector, some: Vector, squares: Vector):
    """Add to squares[c] those of x[n c] - mean[c]."""
    for first in range(0, len(x), SUMMED):
        for c in range(squares.size):
            some[c] = f32(0)
        for n in range(first, min(first + SUMMED, len(x))):
            for c in range(squares.size):
                some[c] += (x[n, c] - mean[c]) * (x[n, c] - mean[c])
        for c in range(squares.size):
            squares[c] += some[c]


@compiled
def scale_channels(x: Rows, mean: Vector, factor: Vector, shift: Vector, y: Rows):
    """y[n c] = (x[n c] - mean[c]) * factor[c] + shift[c]."""
    for n in range(len(x)):
        for c in range(mean.size):
            y[n, c] = (x[n, c] - mean[c]) * factor[c] + shift[c]


@compiled
def channel_gradients(dy: Rows, x: Rows, mean: Vector, some: Rows, sums: Rows):
    """Add to sums[0, c] those of dy[n c] * (x[n c] - mean[c]), and to sums[1, c] those of dy."""
    for first in range(0, len(x), SUMMED):
        for c in range(mean.size):
            some[0, c] = f32(0)
            some[1, c] = f32(0)
        for n in range(first, min(first + SUMMED, len(x))):
            for c in range(mean.size):
                some[0, c] += dy[n, c] * (x[n, c] - mean[c])
                some[1, c] += dy[n, c]
        for c in range(mean.size):
            sums[0, c] += some[0, c]
            sums[1, c] += some[1, c]


@compiled
def normalized_gradient(dy: Rows, x: Rows, mean: Vector, along: Vector, shift: Vector, factor: Vector, dx: Rows):
    """dx[n c] = (dy[n c] - shift[c] - (x[n c] - mean[c]) * along[c]) * factor[c]."""
    for n in range(len(x)):
        for c in range(mean.size):
            dx[n, c] = (dy[n, c] - shift[c] - (x[n, c] - mean[c]) * along[c]) * factor[c]
