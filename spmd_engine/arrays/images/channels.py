"""What batch normalisation computes of one block x[... c]: sums of each channel, and each channel scaled.

Batch norm is, with its statistics reduced between these steps where samples, rows or columns lie elsewhere,

    sums = channel_sums(x);  mean = sums / n;  squares = channel_squares(x, mean);  inverse = 1 / sqrt(squares / n + e)
    y = scale_channels(x, mean, inverse * scale, shift)
    dscale, dshift = channel_gradients(dy, x, mean, inverse)
    dx = normalized_gradient(dy, x, mean, inverse, scale, dscale / n, dshift / n)

The backward takes x itself, so that nothing but y need be written forward. All arrays of a channel have shape [c].
"""

from math import prod

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.fused import chunks, fused_of_images


@fused_of_images
def channel_sums(x: Array) -> Array:
    """sums[c] of x[... c]."""
    xp, rows = backend_of(x).xp, _rows(x)
    sums = xp.zeros(x.shape[-1], x.dtype)
    for part in chunks(rows):
        sums += rows[part].sum(axis=0)
    return sums


@fused_of_images
def channel_squares(x: Array, mean: Array) -> Array:
    """squares[c], the sums of (x - mean)^2 of x[... c]."""
    xp, rows = backend_of(x).xp, _rows(x)
    squares = xp.zeros(x.shape[-1], x.dtype)
    for part in chunks(rows):
        centred = rows[part] - mean
        squares += xp.einsum("nc,nc->c", centred, centred)
    return squares


@fused_of_images
def scale_channels(x: Array, mean: Array, factor: Array, shift: Array) -> Array:
    """y[... c] = (x - mean) * factor + shift."""
    xp, rows = backend_of(x).xp, _rows(x)
    y = xp.empty_like(rows)
    for part in chunks(rows):
        out = xp.subtract(rows[part], mean, out=y[part])
        out *= factor
        out += shift
    return y.reshape(x.shape)


@fused_of_images
def channel_gradients(dy: Array, x: Array, mean: Array, inverse: Array) -> tuple[Array, Array]:
    """dscale[c] and dshift[c], the sums of dy * (x - mean) * inverse and of dy[... c]."""
    xp, rows, dy_rows = backend_of(dy).xp, _rows(x), _rows(dy)
    dscale, dshift = xp.zeros(x.shape[-1], dy.dtype), xp.zeros(x.shape[-1], dy.dtype)
    for part in chunks(rows):
        dscale += xp.einsum("nc,nc->c", dy_rows[part], rows[part] - mean)
        dshift += dy_rows[part].sum(axis=0)
    dscale *= inverse
    return dscale, dshift


@fused_of_images
def normalized_gradient(
    dy: Array, x: Array, mean: Array, inverse: Array, scale: Array, mean_dscale: Array, mean_dshift: Array
) -> Array:
    """dx[... c] = (dy - mean_dshift - (x - mean) * inverse * mean_dscale) * inverse * scale.

    The gradient of batch norm, whose mean and inverse depend on x; ``mean_dscale`` and ``mean_dshift`` are dscale and
    dshift of all elements of a channel, over their number.
    """
    xp, rows, dy_rows = backend_of(dy).xp, _rows(x), _rows(dy)
    dx, along, factor = xp.empty_like(dy_rows), inverse * mean_dscale, inverse * scale
    for part in chunks(rows):
        normal = rows[part] - mean
        normal *= along
        out = xp.subtract(dy_rows[part], mean_dshift, out=dx[part])
        out -= normal
        out *= factor
    return dx.reshape(dy.shape)


def _rows(x: Array) -> Array:
    """x[... c] as [n c]."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])
