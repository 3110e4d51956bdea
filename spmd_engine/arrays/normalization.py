"""Normalization, forward and backward: layer norm and RMS norm of rows, and the statistics of batch norm."""

from __future__ import annotations

from math import prod

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.factors import by_row
from spmd_engine.arrays.fused import chunks, fused, fused_of_images, fused_sums

Normalized = tuple[Array, Array, Array]  #: y[... d] and, for the backward, the normalized x[... d] and 1/deviation[...]


@fused
def layer_norm(x: Array, scale: Array, shift: Array, epsilon: float) -> Normalized:
    """y[... d] = n · scale[d] + shift[d] with n = (x - mean(x)) / sqrt(var(x) + epsilon).

    Ba, Kiros and Hinton, "Layer normalization" (2016).
    """
    return _norm(x, scale, shift, epsilon)


@fused
def rms_norm(x: Array, scale: Array, epsilon: float) -> Normalized:
    """y[... d] = n · scale[d] with n = x / sqrt(mean(x²) + epsilon).

    Zhang and Sennrich, "Root mean square layer normalization" (2019).
    """
    if prod(x.shape[:-1]) == 1:  # a decode step: calls cost more than their computation
        xp, rows = backend_of(x).xp, by_row(x)
        inverse = 1.0 / xp.sqrt(xp.einsum("nd,nd->n", rows, rows) / x.shape[-1] + epsilon)
        normal = x * inverse[0]
        return normal * scale, normal, inverse.reshape(x.shape[:-1])
    return _norm(x, scale, None, epsilon)


def _norm(x: Array, scale: Array, shift: Array | None, epsilon: float) -> Normalized:
    """A layer norm or, without a shift, an RMS norm."""
    xp, rows, width = backend_of(x).xp, by_row(x), x.shape[-1]
    y, normal = xp.empty_like(rows), xp.empty_like(rows)
    inverse = xp.empty(rows.shape[0], rows.dtype)
    average = None if shift is None else _average(rows, xp)
    for part in chunks(rows):
        values = rows[part]
        if average is not None:
            values = xp.subtract(values, (values @ average)[:, None], out=normal[part])
        inverse[part] = 1.0 / xp.sqrt(xp.einsum("nd,nd->n", values, values) / width + epsilon)
        xp.multiply(values, inverse[part, None], out=normal[part])
        scaled = xp.multiply(normal[part], scale, out=y[part])
        if shift is not None:
            scaled += shift
    return y.reshape(x.shape), normal.reshape(x.shape), inverse.reshape(x.shape[:-1])


@fused
def layer_norm_backward(dy: Array, normal: Array, inverse: Array, scale: Array) -> Array:
    """dx[... d] = (g - mean(g) - n mean(g n)) · inverse, with g = dy · scale and n the normalized x."""
    return _norm_backward(dy, normal, inverse, scale, centred=True)


@fused
def rms_norm_backward(dy: Array, normal: Array, inverse: Array, scale: Array) -> Array:
    """dx[... d] = (g - n mean(g n)) · inverse, with g = dy · scale and n the normalized x."""
    return _norm_backward(dy, normal, inverse, scale, centred=False)


def _norm_backward(dy: Array, normal: Array, inverse: Array, scale: Array, *, centred: bool) -> Array:
    xp, width = backend_of(dy).xp, dy.shape[-1]
    dy_rows, normal_rows, inverse_rows = by_row(dy), by_row(normal), inverse.reshape(-1)
    dx = xp.empty_like(dy_rows)
    average = _average(dy_rows, xp) if centred else None
    for part in chunks(dy_rows):
        n = normal_rows[part]
        g = xp.multiply(dy_rows[part], scale, out=dx[part])
        projection = xp.einsum("nd,nd->n", g, n) / width
        if average is not None:
            g -= (g @ average)[:, None]
        g -= n * projection[:, None]
        g *= inverse_rows[part, None]
    return dx.reshape(dy.shape)


@fused_sums
def layer_norm_backward_parameters(dy: Array, normal: Array) -> tuple[Array, Array]:
    """dscale[d] = sum(dy · n) and dshift[d] = sum(dy), over every dimension but the last."""
    xp, rows, normal_rows = backend_of(dy).xp, by_row(dy), by_row(normal)
    dscale, dshift = xp.zeros(dy.shape[-1], dy.dtype), xp.zeros(dy.shape[-1], dy.dtype)
    for part in chunks(rows):
        dscale += xp.einsum("nd,nd->d", rows[part], normal_rows[part])
        dshift += rows[part].sum(axis=0)
    return dscale, dshift


@fused_sums
def rms_norm_backward_scale(dy: Array, normal: Array) -> Array:
    """dscale[d] = sum(dy · n) over every dimension but the last."""
    xp, rows, normal_rows = backend_of(dy).xp, by_row(dy), by_row(normal)
    dscale = xp.zeros(dy.shape[-1], dy.dtype)
    for part in chunks(rows):
        dscale += xp.einsum("nd,nd->d", rows[part], normal_rows[part])
    return dscale


def _average(rows: Array, xp) -> Array:
    """``rows @ average`` is the mean of each row, in half the time of ``mean``: BLAS reads several rows at once."""
    width = rows.shape[1]
    return xp.full(width, 1.0 / width if width else 0.0, rows.dtype)


# --- Batch normalization of one block x[... c]: sums of each channel, and each channel scaled
#
# If samples, rows or columns are sharded, the sums are reduced between these steps:
#
#     sums = channel_sums(x);  mean = sums / n;  squares = channel_squares(x, mean)
#     inverse = 1 / sqrt(squares / n + epsilon)
#     y = scale_channels(x, mean, inverse * scale, shift)
#     dscale, dshift = channel_gradients(dy, x, mean, inverse)
#     dx = normalized_gradient(dy, x, mean, inverse, scale, dscale / n, dshift / n)
#
# The backward takes x itself, so that the forward only writes y. All arrays of a channel have shape [c].


@fused_of_images
def channel_sums(x: Array) -> Array:
    """sums[c] of x[... c]."""
    xp, rows = backend_of(x).xp, by_row(x)
    sums = xp.zeros(x.shape[-1], x.dtype)
    for part in chunks(rows):
        sums += rows[part].sum(axis=0)
    return sums


@fused_of_images
def channel_squares(x: Array, mean: Array) -> Array:
    """squares[c], the sums of (x - mean)^2 of x[... c]."""
    xp, rows = backend_of(x).xp, by_row(x)
    squares = xp.zeros(x.shape[-1], x.dtype)
    for part in chunks(rows):
        centred = rows[part] - mean
        squares += xp.einsum("nc,nc->c", centred, centred)
    return squares


@fused_of_images
def scale_channels(x: Array, mean: Array, factor: Array, shift: Array) -> Array:
    """y[... c] = (x - mean) * factor + shift."""
    xp, rows = backend_of(x).xp, by_row(x)
    y = xp.empty_like(rows)
    for part in chunks(rows):
        out = xp.subtract(rows[part], mean, out=y[part])
        out *= factor
        out += shift
    return y.reshape(x.shape)


@fused_of_images
def channel_gradients(dy: Array, x: Array, mean: Array, inverse: Array) -> tuple[Array, Array]:
    """dscale[c] and dshift[c], the sums of dy * (x - mean) * inverse and of dy[... c]."""
    xp, rows, dy_rows = backend_of(dy).xp, by_row(x), by_row(dy)
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
    xp, rows, dy_rows = backend_of(dy).xp, by_row(x), by_row(dy)
    dx, along, factor = xp.empty_like(dy_rows), inverse * mean_dscale, inverse * scale
    for part in chunks(rows):
        normal = rows[part] - mean
        normal *= along
        out = xp.subtract(dy_rows[part], mean_dshift, out=dx[part])
        out -= normal
        out *= factor
    return dx.reshape(dy.shape)
