"""Layer normalisation over the last dimension, forward and backward."""

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.chunks import chunks


def layer_norm(x: Array, scale: Array, shift: Array, epsilon: float) -> tuple[Array, Array, Array]:
    """y[... d], and for the backward the normalised x[... d] and 1/sigma[...].

    Ba, Kiros and Hinton, "Layer normalization" (2016).
    """
    xp = backend_of(x).xp
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    y, normal = xp.empty_like(rows), xp.empty_like(rows)
    inverse = xp.empty(rows.shape[0], rows.dtype)
    for part in chunks(rows):
        centred = normal[part]
        xp.subtract(rows[part], rows[part].mean(axis=1, keepdims=True), out=centred)
        variance = xp.einsum("nd,nd->n", centred, centred) / width
        inverse[part] = 1.0 / xp.sqrt(variance + epsilon)
        centred *= inverse[part, None]
        xp.multiply(centred, scale, out=y[part])
        y[part] += shift
    return y.reshape(x.shape), normal.reshape(x.shape), inverse.reshape(x.shape[:-1])


def layer_norm_backward(dy: Array, normal: Array, inverse: Array, scale: Array) -> Array:
    """dx[... d] = (g - mean(g) - n mean(g n)) / sigma, with g = dy * scale and n the normalised x."""
    xp = backend_of(dy).xp
    width = dy.shape[-1]
    dy_rows, normal_rows, inverse_rows = dy.reshape(-1, width), normal.reshape(-1, width), inverse.reshape(-1)
    dx = xp.empty_like(dy_rows)
    for part in chunks(dy_rows):
        g, n = dx[part], normal_rows[part]
        xp.multiply(dy_rows[part], scale, out=g)
        mean = g.mean(axis=1, keepdims=True)
        projection = xp.einsum("nd,nd->n", g, n) / width
        g -= n * projection[:, None]
        g -= mean
        g *= inverse_rows[part, None]
    return dx.reshape(dy.shape)


def layer_norm_backward_parameters(dy: Array, normal: Array) -> tuple[Array, Array]:
    """dscale[d] = sum(dy * n) and dshift[d] = sum(dy), over every dimension but the last."""
    xp = backend_of(dy).xp
    width = dy.shape[-1]
    rows, normal_rows = dy.reshape(-1, width), normal.reshape(-1, width)
    dscale, dshift = xp.zeros(width, dy.dtype), xp.zeros(width, dy.dtype)
    for part in chunks(rows):
        dscale += (rows[part] * normal_rows[part]).sum(axis=0)
        dshift += rows[part].sum(axis=0)
    return dscale, dshift
