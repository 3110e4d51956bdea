"""Normalisation over the last dimension, forward and backward: layer norm and RMS norm."""

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.fused import chunks, fused


@fused
def layer_norm(x: Array, scale: Array, shift: Array, epsilon: float) -> tuple[Array, Array, Array]:
    """y[... d], and for the backward the normalised x[... d] and 1/sigma[...].

    Ba, Kiros and Hinton, "Layer normalization" (2016).
    """
    xp = backend_of(x).xp
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    y, normal = xp.empty_like(rows), xp.empty_like(rows)
    inverse = xp.empty(rows.shape[0], rows.dtype)
    average = _average(rows, xp)
    for part in chunks(rows):
        centred = xp.subtract(rows[part], (rows[part] @ average)[:, None], out=normal[part])
        variance = xp.einsum("nd,nd->n", centred, centred) / width
        inverse[part] = 1.0 / xp.sqrt(variance + epsilon)
        centred *= inverse[part, None]
        scaled = xp.multiply(centred, scale, out=y[part])
        scaled += shift
    return y.reshape(x.shape), normal.reshape(x.shape), inverse.reshape(x.shape[:-1])


@fused
def layer_norm_backward(dy: Array, normal: Array, inverse: Array, scale: Array) -> Array:
    """dx[... d] = (g - mean(g) - n mean(g n)) / sigma, with g = dy * scale and n the normalised x."""
    xp = backend_of(dy).xp
    width = dy.shape[-1]
    dy_rows, normal_rows, inverse_rows = dy.reshape(-1, width), normal.reshape(-1, width), inverse.reshape(-1)
    dx = xp.empty_like(dy_rows)
    average = _average(dy_rows, xp)
    for part in chunks(dy_rows):
        n = normal_rows[part]
        g = xp.multiply(dy_rows[part], scale, out=dx[part])
        projection = xp.einsum("nd,nd->n", g, n) / width
        g -= (g @ average)[:, None]
        g -= n * projection[:, None]
        g *= inverse_rows[part, None]
    return dx.reshape(dy.shape)


@fused
def layer_norm_backward_parameters(dy: Array, normal: Array) -> tuple[Array, Array]:
    """dscale[d] = sum(dy * n) and dshift[d] = sum(dy), over every dimension but the last."""
    xp = backend_of(dy).xp
    width = dy.shape[-1]
    rows, normal_rows = dy.reshape(-1, width), normal.reshape(-1, width)
    dscale, dshift = xp.zeros(width, dy.dtype), xp.zeros(width, dy.dtype)
    for part in chunks(rows):
        dscale += xp.einsum("nd,nd->d", rows[part], normal_rows[part])
        dshift += rows[part].sum(axis=0)
    return dscale, dshift


def _average(rows: Array, xp) -> Array:
    """``rows @ average`` is the mean of each row, at half the price of ``mean``: BLAS reads several rows at once."""
    width = rows.shape[1]
    return xp.full(width, 1.0 / width if width else 0.0, rows.dtype)


# --- Normalisation by the root of the mean square over the last dimension, forward and backward


@fused
def rms_norm(x: Array, scale: Array, epsilon: float) -> tuple[Array, Array, Array]:
    """y[... d] = n · scale[d] with n = x / sqrt(mean(x²) + epsilon), and for the backward n and 1/sqrt(...).

    Zhang and Sennrich, "Root mean square layer normalization" (2019).
    """
    xp = backend_of(x).xp
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if rows.shape[0] == 1:  # the step of a generation, where calls cost more than what they compute
        inverse = 1.0 / xp.sqrt(xp.einsum("nd,nd->n", rows, rows) / width + epsilon)
        normal = x * inverse[0]
        return normal * scale, normal, inverse.reshape(x.shape[:-1])
    y, normal = xp.empty(rows.shape, x.dtype), xp.empty(rows.shape, x.dtype)
    inverse = xp.empty(rows.shape[0], rows.dtype)
    for part in chunks(rows):
        here = rows[part]
        square = xp.einsum("nd,nd->n", here, here) / width
        inverse[part] = 1.0 / xp.sqrt(square + epsilon)
        xp.multiply(here, inverse[part, None], out=normal[part])
        xp.multiply(normal[part], scale, out=y[part])
    return y.reshape(x.shape), normal.reshape(x.shape), inverse.reshape(x.shape[:-1])


@fused
def rms_norm_backward(dy: Array, normal: Array, inverse: Array, scale: Array) -> Array:
    """dx[... d] = (g - n mean(g n)) · inverse, with g = dy · scale and n the normalised x."""
    xp = backend_of(dy).xp
    width = dy.shape[-1]
    dy_rows, normal_rows, inverse_rows = dy.reshape(-1, width), normal.reshape(-1, width), inverse.reshape(-1)
    dx = xp.empty(dy_rows.shape, dy.dtype)
    for part in chunks(dy_rows):
        n = normal_rows[part]
        g = xp.multiply(dy_rows[part], scale, out=dx[part])
        projection = xp.einsum("nd,nd->n", g, n) / width
        g -= n * projection[:, None]
        g *= inverse_rows[part, None]
    return dx.reshape(dy.shape)


@fused
def rms_norm_backward_scale(dy: Array, normal: Array) -> Array:
    """dscale[d] = sum(dy · n) over every dimension but the last."""
    xp = backend_of(dy).xp
    width = dy.shape[-1]
    rows, normal_rows = dy.reshape(-1, width), normal.reshape(-1, width)
    dscale = xp.zeros(width, dy.dtype)
    for part in chunks(rows):
        dscale += xp.einsum("nd,nd->d", rows[part], normal_rows[part])
    return dscale
