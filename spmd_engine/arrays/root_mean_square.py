"""Normalisation by the root of the mean square over the last dimension, forward and backward."""

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.chunks import chunks
from spmd_engine.arrays.fused import fused


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
