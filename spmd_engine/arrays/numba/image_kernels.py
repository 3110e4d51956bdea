"""Loops of batch normalisation, pooling and depthwise convolutions over float32 images."""

from numba import njit, types

from spmd_engine.arrays.numba.kernels import Blocks, Four, Images, Rows, Vector, compiled, f32

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


# --- Loops of pooling and depthwise convolutions over float32 images that Numba compiles: channels do not mix
#
# As those of ``kernels``, in whose manner they are written. A window is the tuple (size, stride, dilation, before).


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
