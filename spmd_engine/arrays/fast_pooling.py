"""Loops of pooling and depthwise convolutions over float32 images that Numba compiles: channels do not mix.

As those of ``fast_kernels``, in whose manner they are written. A window is the tuple (size, stride, dilation, before).
"""

from numba import njit, types

from spmd_engine.arrays.fast_kernels import Blocks, Four, Images, compiled, f32

Taps = types.Array(types.uint8, 4, "C")


@njit(inline="always")
def _read(output, tap, window):
    """Which input a tap of an output's window reads; it may be padding."""
    return output * window[1] + tap * window[2] - window[3]


@compiled
def max_pool(x: Images, rows: Four, columns: Four, y: Images, chosen: Taps):
    """y[b p q c] and chosen[b p q c] of x[b h w c]; ``y`` holds -inf and ``chosen`` 0."""
    samples, height, width, channels = y.shape
    for b in range(samples):
        for p in range(height):
            for q in range(width):
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                            tap = k * columns[0] + l
                            for c in range(channels):
                                value, best = x[b, h, w, c], y[b, p, q, c]
                                greater = value > best or value != value
                                y[b, p, q, c] = value if greater else best
                                chosen[b, p, q, c] = tap if greater else chosen[b, p, q, c]


@compiled
def max_pool_gradient(dy: Images, chosen: Taps, rows: Four, columns: Four, dx: Images):
    """Add to dx[b h w c] the gradients dy[b p q c] of what was chosen."""
    samples, height, width, channels = dy.shape
    for b in range(samples):
        for p in range(height):
            for q in range(width):
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < dx.shape[1] and 0 <= w < dx.shape[2]:
                            tap = k * columns[0] + l
                            for c in range(channels):
                                dx[b, h, w, c] += dy[b, p, q, c] if chosen[b, p, q, c] == tap else f32(0)


@compiled
def depthwise(x: Images, factors: Blocks, rows: Four, columns: Four, y: Images):
    """Add to y[b p q c] the sums over k, l of x[b h w c] * factors[k l c]."""
    samples, height, width, channels = y.shape
    for b in range(samples):
        for p in range(height):
            for q in range(width):
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                            for c in range(channels):
                                y[b, p, q, c] += x[b, h, w, c] * factors[k, l, c]


@compiled
def depthwise_input(dy: Images, factors: Blocks, rows: Four, columns: Four, dx: Images):
    """Add to dx[b h w c] the gradients dy[b p q c] * factors[k l c]."""
    samples, height, width, channels = dy.shape
    for b in range(samples):
        for p in range(height):
            for q in range(width):
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < dx.shape[1] and 0 <= w < dx.shape[2]:
                            for c in range(channels):
                                dx[b, h, w, c] += dy[b, p, q, c] * factors[k, l, c]


@compiled
def depthwise_weights(x: Images, dy: Images, rows: Four, columns: Four, of_row: Blocks, dw: Blocks):
    """Add to dw[k l c] the sums over b, p, q of x[b h w c] * dy[b p q c].

    Rows are summed first, in ``of_row``: a sum of a million would have lost two digits more.
    """
    samples, height, width, channels = dy.shape
    for b in range(samples):
        for p in range(height):
            for k in range(rows[0]):
                for l in range(columns[0]):
                    for c in range(channels):
                        of_row[k, l, c] = f32(0)
            for q in range(width):
                for k in range(rows[0]):
                    h = _read(p, k, rows)
                    for l in range(columns[0]):
                        w = _read(q, l, columns)
                        if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                            for c in range(channels):
                                of_row[k, l, c] += x[b, h, w, c] * dy[b, p, q, c]
            for k in range(rows[0]):
                for l in range(columns[0]):
                    for c in range(channels):
                        dw[k, l, c] += of_row[k, l, c]
