"""Causal attention on a device: by fused kernels, or by few products of all samples and heads.

``attention.py`` documents the functions. ``flash_attention.py`` has the kernels; operands for which they have no tiles
take the products of the device's library. Which keys a query sees is computed on the device, from positions there: the
host reads nothing. Of the products, scores of one part at a time are stored, as many as fit the device's memory, and
computed again in the backward; they include those of hidden keys, which the softmax makes 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from spmd_engine.arrays.activations import exponentiate, soft_cap, soft_cap_slope, softmax_backward
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.factors import unseen
from spmd_engine.arrays.flash_attention import FlashAttention
from spmd_engine.arrays.precision import accumulated_in, rounded, widened


def attention(q, k, v, positions, key_positions, apart, window, cap, dtype):
    """See ``attention.causal_attention``."""
    xp, seen = backend_of(q).xp, (positions, key_positions, apart, window, cap)
    if flash := _flash(q, k):
        return flash.forward(q, k, v, *seen, dtype, accumulated_in(q.dtype))
    q, k, v = map(widened, (q, k, v))
    y = xp.empty(q.shape, q.dtype)
    log_sums = xp.empty((q.shape[0], *q.shape[2:-1], q.shape[1]), q.dtype)
    if not q.size or not k.shape[1]:
        y[...], log_sums[...] = 0, -xp.inf
        return rounded(y, dtype), log_sums
    for samples, rows in _parts(q, k):
        queries, shape = _by_head(q[samples, rows], q.shape[-1] ** -0.5)
        scores = xp.matmul(queries, k[samples].transpose(0, 2, 3, 1))
        if cap is not None:
            soft_cap(scores, cap)
        _hide(scores, shape, samples, rows, *seen[:4])
        top = scores.max(axis=-1, keepdims=True)
        xp.maximum(top, xp.finfo(q.dtype).min, out=top)  # for queries without keys
        exponentiate(scores, top)
        sums = scores.sum(axis=-1, keepdims=True)
        mixed = xp.matmul(scores, v[samples].transpose(0, 2, 1, 3))
        mixed /= xp.maximum(sums, xp.finfo(q.dtype).tiny)
        _write(y[samples, rows], mixed, shape)
        top += xp.log(sums)
        log_sums[samples, ..., rows] = top.reshape(log_sums[samples, ..., rows].shape)
    return rounded(y, dtype), log_sums


def attention_backward(dy, q, k, v, y, log_sums, positions, key_positions, apart, window, cap, dtype):
    """See ``attention.causal_attention_backward``."""
    xp, seen = backend_of(q).xp, (positions, key_positions, apart, window, cap)
    if flash := _flash(q, k):
        return flash.backward(dy, q, k, v, y, log_sums, *seen, dtype)
    dy, q, k, v, y = map(widened, (dy, q, k, v, y))
    dq, dk, dv = (xp.zeros(x.shape, x.dtype) for x in (q, k, v))
    if not q.size or not k.shape[1]:
        return tuple(rounded(x, dtype) for x in (dq, dk, dv))
    scale, projection = q.shape[-1] ** -0.5, (dy * y).sum(axis=-1)
    for samples, rows in _parts(q, k):
        queries, shape = _by_head(q[samples, rows], scale)
        gradients, _ = _by_head(dy[samples, rows], 1)
        p = xp.matmul(queries, k[samples].transpose(0, 2, 3, 1))
        slope = None
        if cap is not None:
            soft_cap(p, cap)
            slope = soft_cap_slope(p, cap)
        _hide(p, shape, samples, rows, *seen[:4])
        shift = xp.maximum(log_sums[samples, ..., rows], xp.finfo(q.dtype).min)
        exponentiate(p, shift.reshape(*p.shape[:3], 1))
        _add(dv[samples], xp.matmul(p.transpose(0, 1, 3, 2), gradients))
        ds = xp.matmul(gradients, v[samples].transpose(0, 2, 3, 1))
        along, _ = _by_head(projection[samples, rows, ..., None], 1)
        softmax_backward(ds, p, along)
        if slope is not None:
            ds *= slope
        _add(dk[samples], xp.matmul(ds.transpose(0, 1, 3, 2), queries))
        of_queries = xp.matmul(ds, k[samples].transpose(0, 2, 1, 3))
        of_queries *= scale
        _write(dq[samples, rows], of_queries, shape)
    return tuple(rounded(x, dtype) for x in (dq, dk, dv))


def _flash(q: Array, k: Array) -> FlashAttention | None:
    """The fused kernels of the device, if it has any and they take these operands."""
    flash = getattr(backend_of(q).kernels, "flash_attention", None)
    return flash if flash and q.size and k.shape[1] and flash.takes(q, accumulated_in(q.dtype)) else None


def _parts(q: Array, k: Array) -> Iterator[tuple[slice, slice]]:
    """Samples, and rows of them, whose scores fit the device's work space."""
    batch, length = q.shape[:2]
    row = prod(q.shape[2:-1]) * k.shape[1] * q.dtype.itemsize
    room = max(1, backend_of(q).workspace // row)  # rows of scores
    rows, samples = min(length, room), max(1, room // length)
    for first in range(0, batch, samples):
        for start in range(0, length, rows):
            yield slice(first, first + samples), slice(start, start + rows)


def _by_head(x: Array, factor: float) -> tuple[Array, tuple[int, ...]]:
    """factor · x[b s h k] as [b h s k], or [b s h r k] as [b h rs k]; and the sizes b, h, r, s, k."""
    (batch, length, heads, *shared), width = x.shape[:-1], x.shape[-1]
    shape = batch, heads, prod(shared), length, width
    copy = backend_of(x).xp.empty(shape, x.dtype)
    split = x.reshape(batch, length, heads, prod(shared), width).transpose(0, 2, 3, 1, 4)
    backend_of(x).xp.multiply(split, x.dtype.type(factor), out=copy)
    return copy.reshape(batch, heads, -1, width), shape


def _write(out: Array, by_head: Array, shape: tuple[int, ...]) -> None:
    """The inverse of ``_by_head``, into out[b s h k] or [b s h r k]."""
    out[...] = by_head.reshape(shape).transpose(0, 3, 1, 2, 4).reshape(out.shape)


def _add(out: Array, by_head: Array) -> None:
    out += by_head.transpose(0, 2, 1, 3)


def _hide(scores, shape, samples, rows, positions, key_positions, apart, window) -> None:
    """Add -inf to the scores[b h rs t] of keys that a query does not see."""
    xp = backend_of(scores).xp
    hidden = unseen(key_positions, positions[rows, None], window)[None]
    if apart is not None:
        hidden = hidden | (apart[1][samples, None] != apart[0][samples, rows, None])
    by_query = scores.reshape(*shape[:4], -1)
    by_query += xp.where(hidden, scores.dtype.type(-xp.inf), scores.dtype.type(0))[:, None, None]
