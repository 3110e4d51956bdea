"""Loops of pooling and depthwise convolutions over float32 images that Numba compiles: channels do not mix.

Imported only where Numba is installed. A window comes as the tuple (size, stride, dilation, before).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from spmd_engine.arrays.fast_kernels import compiled, f32


@njit(inline="always")
def _read(output, tap, window):
    """Which input a tap of an output's window reads; it may be padding."""
    return output * window[1] + tap * window[2] - window[3]


@compiled
def max_pool(x, rows, columns, y, chosen):
    """y[b p q c] and chosen[b p q c] of x[b h w c]; ``y`` holds -inf and ``chosen`` 0."""
    samples, height, width, channels = y.shape
    for b in range(samples):
        for p in range(height):
            for q in range(width):
                best, taps = y[b, p, q], chosen[b, p, q]
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                            read = x[b, h, w]
                            for c in range(channels):
                                greater = read[c] > best[c] or read[c] != read[c]
                                best[c] = read[c] if greater else best[c]
                                taps[c] = k * columns[0] + l if greater else taps[c]


@compiled
def max_pool_gradient(dy, chosen, rows, columns, dx):
    """Add to dx[b h w c] the gradients dy[b p q c] of what was chosen."""
    samples, height, width, channels = dy.shape
    for b in range(samples):
        for p in range(height):
            for q in range(width):
                gradient, taps = dy[b, p, q], chosen[b, p, q]
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < dx.shape[1] and 0 <= w < dx.shape[2]:
                            written, tap = dx[b, h, w], k * columns[0] + l
                            for c in range(channels):
                                written[c] += gradient[c] if taps[c] == tap else f32(0)


@compiled
def depthwise(x, factors, rows, columns, y):
    """Add to y[b p q c] the sums over k, l of x[b h w c] * factors[k l c]."""
    samples, height, width, channels = y.shape
    for b in range(samples):
        for p in range(height):
            for q in range(width):
                total = y[b, p, q]
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                            read, factor = x[b, h, w], factors[k, l]
                            for c in range(channels):
                                total[c] += read[c] * factor[c]


@compiled
def depthwise_input(dy, factors, rows, columns, dx):
    """Add to dx[b h w c] the gradients dy[b p q c] * factors[k l c]."""
    samples, height, width, channels = dy.shape
    for b in range(samples):
        for p in range(height):
            for q in range(width):
                gradient = dy[b, p, q]
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < dx.shape[1] and 0 <= w < dx.shape[2]:
                            written, factor = dx[b, h, w], factors[k, l]
                            for c in range(channels):
                                written[c] += gradient[c] * factor[c]


@compiled
def depthwise_weights(x, dy, rows, columns, dw):
    """Add to dw[k l c] the sums over b, p, q of x[b h w c] * dy[b p q c]."""
    samples, height, width, channels = dy.shape
    of_row = np.empty_like(dw)  # rows are summed first: a sum of a million would have lost two digits more
    for b in range(samples):
        for p in range(height):
            of_row[:] = f32(0)
            for q in range(width):
                gradient = dy[b, p, q]
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                            read, total = x[b, h, w], of_row[k, l]
                            for c in range(channels):
                                total[c] += read[c] * gradient[c]
            dw += of_row
