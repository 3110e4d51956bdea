"""Attention of a few new queries to all keys of sequences that grow: the step of a generation."""

from __future__ import annotations

from math import prod

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.mask import unseen
from spmd_engine.arrays.soft_cap import soft_cap

HIDDEN = 1 << 60  #: the position of a column that holds none: after that of every query
ELEMENTS = 1 << 20  # scores at a time, of as many queries as that allows


def attend_to_keys(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    key_positions: Array,
    window: int | None = None,
    cap: float | None = None,
) -> tuple[Array, Array]:
    """y[b s h k] = softmax(q . k / sqrt(k)) . v over the keys of each sequence at or before the query's position.

    q[b s h k] at positions[b s], k and v[b t h k] at key_positions[b t], in any order; with a ``window``, over those of
    so many positions, up to the query's own. Also returns log_sums[b s h], the logarithms of the sums of exponentials:
    a query that sees no key has y = 0 and -inf. Where r queries share a key head, q and y are [b s h r k] and log_sums
    [b s h r]. With a ``cap``, it is the softmax of cap · tanh(scores / cap).
    """
    xp = backend_of(q).xp
    y = xp.empty(q.shape, q.dtype)
    log_sums = xp.empty(q.shape[:-1], q.dtype)
    if not k.shape[1] or not q.size:
        y[...], log_sums[...] = 0, -xp.inf
        return y, log_sums
    heads, width, wide = q.shape[2], q.shape[-1], prod(q.shape[3:-1])
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    step = max(1, ELEMENTS // max(1, len(q) * heads * wide * k.shape[1]))
    for first in range(0, q.shape[1], step):
        rows = slice(first, first + step)
        some = q[:, rows].reshape(len(q), -1, heads, wide, width).transpose(0, 2, 1, 3, 4)
        shape = some.shape[:4]  # b h s r
        scores = xp.matmul(some.reshape(*shape[:2], -1, width) * width**-0.5, keys)
        if cap is not None:
            soft_cap(scores, cap)
        hidden = unseen(key_positions[:, None], positions[:, rows, None], window)
        seen = scores.reshape(*shape, -1)
        seen += xp.where(hidden, q.dtype.type(-xp.inf), q.dtype.type(0))[:, None, :, None]
        top = xp.maximum(scores.max(axis=-1, keepdims=True), xp.finfo(q.dtype).min)  # of one that sees nothing
        scores -= top
        xp.exp(scores, out=scores)
        sums = scores.sum(axis=-1, keepdims=True)
        mixed = xp.matmul(scores, values)
        mixed /= xp.maximum(sums, xp.finfo(q.dtype).tiny)
        y[:, rows] = mixed.reshape(*shape, width).transpose(0, 2, 1, 3, 4).reshape(y[:, rows].shape)
        with_none = xp.where(sums > 0, top + xp.log(xp.maximum(sums, xp.finfo(q.dtype).tiny)), -xp.inf)
        log_sums[:, rows] = with_none.reshape(shape).transpose(0, 2, 1, 3).reshape(log_sums[:, rows].shape)
    return y, log_sums


def attend_to_all(q: Array, k: Array, v: Array, cap: float | None = None) -> Array:
    """The same y of one query[b 1 h k] for each sequence, that sees all its keys: with as few calls as can be."""
    xp = backend_of(q).xp
    rows = q.reshape(len(q), k.shape[2], prod(q.shape[3:-1]), q.shape[-1])  # none is there where there is no sequence
    scores = xp.matmul(rows, k.transpose(0, 2, 3, 1))
    scores *= q.shape[-1] ** -0.5
    if cap is not None:
        soft_cap(scores, cap)
    scores -= scores.max(axis=-1, keepdims=True)
    xp.exp(scores, out=scores)
    mixed = xp.matmul(scores, v.transpose(0, 2, 1, 3))
    mixed /= scores.sum(axis=-1, keepdims=True)
    return mixed.reshape(q.shape)


def merge_parts(y: Array, log_sums: Array, top: Array) -> Array:
    """y[... k+1]: y and 1, weighted by exp(log_sums - top), for the highest ``top`` of any part.

    The sum of these over parts, divided by its last column, is attention to the keys of all parts: the online softmax
    of Milakov and Gimelshein (2018).
    """
    xp = backend_of(y).xp
    weights = xp.where(log_sums > -xp.inf, xp.exp(log_sums - xp.where(top > -xp.inf, top, 0)), 0)[..., None]
    merged = xp.empty((*y.shape[:-1], y.shape[-1] + 1), y.dtype)
    merged[..., :-1] = y * weights
    merged[..., -1:] = weights
    return merged
