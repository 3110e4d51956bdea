"""Causal attention in blocks: scores of one block at a time, recomputed in the backward, never stored.

The forward keeps only its output and the logarithm of each row's sum of exponentials; with those, the
backward rebuilds any block of probabilities. Keys that no query of a block may see are skipped. The method
is that of Dao et al., "FlashAttention" (2022), with rows as blocks since a row of scores fits a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log, prod
from typing import Any, NamedTuple

from spmd_engine.arrays import device_attention
from spmd_engine.arrays.activations import exponentiate, soft_cap, soft_cap_slope, softmax_backward
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.factors import hide, unseen
from spmd_engine.arrays.fused import alike, kernels_for
from spmd_engine.arrays.precision import accumulated_in, is_half, rounded, widened
from spmd_engine.arrays.products import BFLOAT16, matmul

LOG_2 = log(2)
ROWS = 64  # queries of a block: fewer make thin matrix products, more compute scores that the mask hides
BLOCK_ELEMENTS = 1 << 17  # scores held at a time, of as many heads as fit: 512 KiB of float32


#: documents[b s] of queries and [b t] of keys, both ascending: a query sees only keys of its own document.
Apart = tuple[Array, Array]


def causal_attention(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    key_positions: Array,
    apart: Apart | None = None,
    window: int | None = None,
    cap: float | None = None,
    dtype: Any = None,
) -> tuple[Array, Array]:
    """y[b s h k] = softmax(q . k / sqrt(k)) . v over keys at or before each query's position.

    q[b s h k], k[b t h k], v[b t h k]; ``positions[s]`` and ``key_positions[t]`` ascend. With documents ``apart``, a
    query sees only keys of its own; with a ``window``, only that many positions, up to its own. Also returns
    log_sums[b h s], which the backward needs. Each query must see at least one key, except with ``apart`` or a
    ``window``: one without keys then has y = 0 and log_sums -inf. Where r queries share a key head, q and y are
    [b s h r k] and log_sums [b h r s]. With a ``cap``, it is the softmax of cap · tanh(scores / cap). ``dtype`` is that
    of y, by default that of q. 16-bit floats are widened, a block at a time, so that scores and log_sums are wide.
    """
    dtype = q.dtype if dtype is None else dtype
    if backend_of(q).on_device:
        return device_attention.attention(q, k, v, positions, key_positions, apart, window, cap, dtype)
    xp, wide = backend_of(q).xp, accumulated_in(q.dtype)
    y = xp.empty(q.shape, dtype)
    log_sums = xp.empty((q.shape[0], *q.shape[2:-1], q.shape[1]), wide)
    may_see_none = apart is not None or window is not None
    if may_see_none:
        y[...], log_sums[...] = 0, -xp.inf
    scale = q.shape[-1] ** -0.5
    for b, heads, rows, keys, mask, (scores,) in _blocks(q, positions, key_positions, apart, window, 1):
        k_block, v_block = (_operand(x[b, keys, heads]).transpose(1, 0, 2) for x in (k, v))
        matmul(k_block, _by_head(_operand(q[b, rows, heads])).transpose(0, 2, 1), out=scores)
        factor = _capped(scores, scale, cap)
        hide(scores, mask)
        p, top, sums = _softmax_over_keys(scores, factor, v_block.dtype)
        block = matmul(p.transpose(0, 2, 1), v_block, dtype=wide)
        block /= xp.maximum(sums, xp.finfo(wide).tiny)[:, :, None]
        y[b, rows, heads] = _by_row(rounded(block, y.dtype), y[b, rows, heads].shape)
        with backend_of(q).errstate(divide="ignore"):  # the logarithm of 0 is then -inf
            top += xp.log(sums, out=sums)
        log_sums[b, heads, ..., rows] = top.reshape(log_sums[b, heads, ..., rows].shape)
    return y, log_sums


def _operand(x: Array) -> Array:
    """``x`` as an operand of a product: bfloat16 as it is, float16, which no library multiplies, widened."""
    return x if x.dtype == BFLOAT16 else widened(x)


def _capped(scores: Array, scale: float, cap: float | None) -> float:
    """Cap scores, in place, and return the factor that they still lack."""
    if cap is None:
        return scale
    scores *= scale
    soft_cap(scores, cap)
    return 1.0


def _softmax_over_keys(scores: Array, scale: float, dtype: Any) -> tuple[Array, Array, Array]:
    """p[h t s] = exp(scale · scores - top) in this dtype, top[h s], and the sums[h s] of p over t before it is rounded.

    ``top`` is a multiple of log(2), the first from the maximum on: with another ``top``, as on a rank with other keys,
    rounded p are the same, up to a power of 2. ``scores`` are overwritten.
    """
    if (kernels := kernels_for(scores)) is not None:
        return kernels.softmax_over_keys(scores, scale, dtype)
    xp = backend_of(scores).xp
    scores *= scale
    top = _multiple_of_log_2(scores.max(axis=1))
    xp.maximum(top, xp.finfo(top.dtype).min, out=top)  # for rows without keys
    exponentiate(scores, top[:, None])
    # BLAS sums over keys in a quarter of the time of ``sum``.
    return rounded(scores, dtype), top, xp.matmul(xp.ones(scores.shape[1], scores.dtype), scores)


def _multiple_of_log_2(highest: Array) -> Array:
    """The first multiple of log(2) from each of the ``highest`` scores on."""
    xp = backend_of(highest).xp
    top = highest / LOG_2
    xp.ceil(top, out=top)
    top *= LOG_2
    # Where scores are so large that multiples of log(2) are themselves rounded:
    return xp.where((highest > top + 1) | (top > highest + 1), highest, top)


def _exponentiated(scores: Array, scale: float, shift: Array, dtype: Any) -> Array:
    """exp(scale · scores - shift), in place and in this dtype."""
    if (kernels := kernels_for(scores)) is not None:
        return kernels.exponentiate_keys(scores, scale, shift, dtype)
    scores *= scale
    exponentiate(scores, shift)
    return rounded(scores, dtype)


def _products_of_rows(x: Array, y: Array) -> Array:
    """The sums of x[... k] · y[... k] over k, wide."""
    if x.dtype == y.dtype and (kernels := kernels_for(x, name="products_of_rows")) is not None:
        return kernels.products_of_rows(x, y)
    return backend_of(x).xp.einsum("...k,...k->...", widened(x), widened(y))


def _softmax_gradient(ds: Array, p: Array, projection: Array, scale: float, dtype: Any) -> Array:
    """(ds - projection) * p * scale in this dtype; ``ds`` is overwritten."""
    if (kernels := kernels_for(ds)) is not None:
        return kernels.softmax_gradient(ds, p, projection, scale, dtype)
    softmax_backward(ds, p, projection)
    ds *= scale
    return rounded(ds, dtype)


def causal_attention_backward(
    dy, q, k, v, y, log_sums, positions, key_positions, apart=None, window=None, cap=None, dtype=None
):
    """dq, dk[b t h k], dv[b t h k] of ``causal_attention`` for the output's gradient dy, shaped as q and y.

    ``dtype`` is that of the results, by default that of q. If y and log_sums are over more keys than k has, these are
    the contributions of k to the gradients.
    """
    xp, dtype, wide = backend_of(q).xp, q.dtype if dtype is None else dtype, accumulated_in(q.dtype)
    if backend_of(q).on_device:
        seen = positions, key_positions, apart, window, cap
        return device_attention.attention_backward(dy, q, k, v, y, log_sums, *seen, dtype)
    dq = (xp.empty if apart is None and window is None else xp.zeros)(q.shape, dtype)
    dk, dv = xp.zeros(k.shape, wide), xp.zeros(v.shape, wide)
    scale = q.shape[-1] ** -0.5
    if apart is not None or window is not None:
        log_sums = xp.maximum(log_sums, xp.finfo(log_sums.dtype).min)  # for queries without keys
    projection = xp.moveaxis(_products_of_rows(dy, y), 1, -1)
    for b, heads, rows, keys, mask, (p, ds) in _blocks(q, positions, key_positions, apart, window, 2):
        k_block, v_block = (_operand(x[b, keys, heads]).transpose(1, 0, 2) for x in (k, v))
        dy_block, q_block = (_by_head(_operand(x[b, rows, heads])) for x in (dy, q))
        matmul(k_block, q_block.transpose(0, 2, 1), out=p)
        factor = _capped(p, scale, cap)
        slope = None if cap is None else soft_cap_slope(p, cap)
        hide(p, mask)
        shift = log_sums[b, heads, ..., rows].reshape(len(p), 1, -1)
        weights = _exponentiated(p, factor, shift, dy_block.dtype)
        dv[b, keys, heads] += matmul(weights, dy_block, dtype=wide).transpose(1, 0, 2)
        matmul(v_block, dy_block.transpose(0, 2, 1), out=ds)
        if slope is not None:
            p *= slope
        along = projection[b, heads, ..., rows].reshape(len(p), 1, -1)
        ds_operand = _softmax_gradient(ds, p, along, scale, q_block.dtype)
        dk[b, keys, heads] += matmul(ds_operand, q_block, dtype=wide).transpose(1, 0, 2)
        dq_block = matmul(ds_operand.transpose(0, 2, 1), k_block, dtype=dtype)
        dq[b, rows, heads] = _by_row(dq_block, dq[b, rows, heads].shape)
    return dq, rounded(dk, dtype), rounded(dv, dtype)


def _by_head(rows: Array) -> Array:
    """[s h k] as [h s k]; [s h r k] as [h rs k]: queries that share a head are more rows of its matrix."""
    if rows.ndim == 3:
        return rows.transpose(1, 0, 2)
    s, h, r, k = rows.shape
    return rows.transpose(1, 2, 0, 3).reshape(h, r * s, k)


def _by_row(block: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of ``_by_head``, to the ``shape`` of the rows."""
    if len(shape) == 3:
        return block.transpose(1, 0, 2)
    s, h, r, k = shape
    return block.reshape(h, r, s, k).transpose(2, 0, 1, 3)


class _Block(NamedTuple):
    """Queries of a few heads of one sample, with the keys that they see."""

    b: int
    heads: slice
    rows: slice
    keys: slice  # those that any row sees
    mask: tuple[int, Array] | None  # the first masked key, and -inf from there on where rows do not see a key
    #: Memory for scores[h t s], the same for all blocks, so that it stays in cache. Keys come before queries, so
    #: that maxima and sums over keys run along whole rows at a time, which NumPy does faster than within rows.
    scores: list[Array]


def _blocks(
    q: Array, positions: Array, key_positions: Array, apart: Apart | None, window: int | None, buffers: int
) -> Iterator[_Block]:
    batch, length, heads, *shared = q.shape[:-1]
    if q.size == 0:
        return
    xp, count = backend_of(q).xp, key_positions.shape[0]
    step = min(ROWS, length)
    wide = step * prod(shared)  # rows of a head's matrix
    heads_at_a_time = min(heads, max(1, BLOCK_ELEMENTS // (wide * count)))
    memory = [xp.empty(heads_at_a_time * wide * count, accumulated_in(q.dtype)) for _ in range(buffers)]
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        end = int(xp.searchsorted(key_positions, positions[rows.stop - 1], side="right"))
        begin, seen_by_all = 0, int(xp.searchsorted(key_positions, positions[start], side="right"))
        if window is not None:
            begin = int(xp.searchsorted(key_positions, positions[start] - window, side="right"))
        if begin == end and window is not None:  # another rank has all keys in these windows
            continue
        keys, mask = slice(begin, end), None
        if window is not None and positions[rows.stop - 1] - key_positions[begin] >= window:
            mask = 0, _minus_infinity(unseen(key_positions[keys, None], positions[rows], window), q)
        elif seen_by_all < end:
            seen_by_all = max(begin, seen_by_all)
            hidden = unseen(key_positions[seen_by_all:end, None], positions[rows], window)
            mask = seen_by_all - begin, _minus_infinity(hidden, q)
        for b in alike(range(batch), q):
            if apart is not None:
                query_documents, key_documents = apart[0][b, rows], apart[1][b, :end]
                keys = slice(max(begin, int(xp.searchsorted(key_documents, query_documents[0]))), end)
                if keys.start == keys.stop:  # another rank has all keys of these documents
                    continue
                hidden = unseen(key_positions[keys, None], positions[rows], window)
                hidden |= key_documents[keys, None] != query_documents
                mask = 0, _minus_infinity(hidden, q)
            for first in alike(range(0, heads, heads_at_a_time), q, last=heads % heads_at_a_time != 0):
                part = slice(first, min(first + heads_at_a_time, heads))
                shape = part.stop - first, keys.stop - keys.start, (rows.stop - start) * prod(shared)
                yield _Block(b, part, rows, keys, mask, [buffer[: prod(shape)].reshape(shape) for buffer in memory])


def _minus_infinity(hidden: Array, like: Array) -> Array:
    number = accumulated_in(like.dtype).type
    return backend_of(like).xp.where(hidden, number(-backend_of(like).xp.inf), number(0))


# --- Attention of a few new queries to all keys of sequences that grow: the step of a generation


HIDDEN = 1 << 60  #: the position of a column that holds none, greater than that of any query
ELEMENTS = 1 << 20  # scores at a time, of as many queries as fit


def _rounds_probabilities(q: Array) -> bool:
    """Whether ``causal_attention`` rounds the probabilities of these queries: then they are rounded here, too, so that
    a text has the same scores however it is divided into calls, and whether or not ranks shard its keys."""
    return q.dtype == BFLOAT16 and not backend_of(q).on_device


def attend_to_keys(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    key_positions: Array,
    window: int | None = None,
    cap: float | None = None,
    dtype: Any = None,
) -> tuple[Array, Array]:
    """y[b s h k] = softmax(q . k / sqrt(k)) . v over the keys of each sequence at or before the query's position.

    q[b s h k] at positions[b s], k and v[b t h k] at key_positions[b t], in any order; with a ``window``, over only
    that many positions, up to the query's own. Also returns log_sums[b s h], the logarithms of sums of exponentials:
    a query that sees no key has y = 0 and -inf. Where r queries share a key head, q and y are [b s h r k] and log_sums
    [b s h r]. With a ``cap``, it is the softmax of cap · tanh(scores / cap). ``dtype`` is that of y, by default that of
    q; sums are in the dtype of sums of 16-bit floats.
    """
    xp = backend_of(q).xp
    y = xp.empty(q.shape, q.dtype if dtype is None else dtype)
    log_sums = xp.empty(q.shape[:-1], accumulated_in(q.dtype))
    if not k.shape[1] or not q.size:
        y[...], log_sums[...] = 0, -xp.inf
        return y, log_sums
    rounds = _rounds_probabilities(q)
    q, k, v = widened(q), widened(k), widened(v)
    heads, width, wide = q.shape[2], q.shape[-1], prod(q.shape[3:-1])
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    step = max(1, ELEMENTS // max(1, len(q) * heads * wide * k.shape[1]))
    for first in range(0, q.shape[1], step):
        rows = slice(first, first + step)
        queries = q[:, rows].reshape(len(q), -1, heads, wide, width).transpose(0, 2, 1, 3, 4)
        shape = queries.shape[:4]  # b h s r
        scores = xp.matmul(queries.reshape(*shape[:2], -1, width) * width**-0.5, keys)
        if cap is not None:
            soft_cap(scores, cap)
        hidden = unseen(key_positions[:, None], positions[:, rows, None], window)
        visible = scores.reshape(*shape, -1)
        visible += xp.where(hidden, q.dtype.type(-xp.inf), q.dtype.type(0))[:, None, :, None]
        highest = scores.max(axis=-1, keepdims=True)
        top = _multiple_of_log_2(highest) if rounds else highest
        top = xp.maximum(top, xp.finfo(q.dtype).min)  # for queries without keys
        scores -= top
        xp.exp(scores, out=scores)
        sums = scores.sum(axis=-1, keepdims=True)
        mixed = xp.matmul(widened(rounded(scores, BFLOAT16)) if rounds else scores, values)
        mixed /= xp.maximum(sums, xp.finfo(q.dtype).tiny)
        y[:, rows] = mixed.reshape(*shape, width).transpose(0, 2, 1, 3, 4).reshape(y[:, rows].shape)
        part_log_sums = xp.where(sums > 0, top + xp.log(xp.maximum(sums, xp.finfo(q.dtype).tiny)), -xp.inf)
        log_sums[:, rows] = part_log_sums.reshape(shape).transpose(0, 2, 1, 3).reshape(log_sums[:, rows].shape)
    return y, log_sums


def attend_to_all(q: Array, k: Array, v: Array, cap: float | None = None) -> Array:
    """The y of ``attend_to_keys`` for one query[b 1 h k] per sequence that sees all its keys, with the fewest calls."""
    xp, half = backend_of(q).xp, q.dtype if is_half(q.dtype) else None
    rounds = half is not None and _rounds_probabilities(q)
    if half is not None:
        q, k, v = widened(q), widened(k), widened(v)
    width = q.shape[-1]
    rows = q.reshape(q.shape[0], k.shape[2], prod(q.shape[3:-1]), width)  # -1 is undefined without sequences
    scores = xp.matmul(rows, k.transpose(0, 2, 3, 1))
    scores *= width**-0.5
    if cap is not None:
        soft_cap(scores, cap)
    highest = scores.max(axis=-1, keepdims=True)
    scores -= _multiple_of_log_2(highest) if rounds else highest
    xp.exp(scores, out=scores)
    p = widened(rounded(scores, BFLOAT16)) if rounds else scores
    mixed = xp.matmul(p, v.transpose(0, 2, 1, 3))
    mixed /= scores.sum(axis=-1, keepdims=True)
    mixed = mixed.reshape(q.shape)
    return mixed if half is None else rounded(mixed, half)


def merge_parts(y: Array, log_sums: Array, top: Array) -> Array:
    """y[... k+1]: y and 1, weighted by exp(log_sums - top), where ``top`` is the maximum of log_sums over all parts.

    The sum of these over parts, divided by its last column, is attention to the keys of all parts: the online softmax
    of Milakov and Gimelshein (2018).
    """
    xp = backend_of(y).xp
    weights = xp.where(log_sums > -xp.inf, xp.exp(log_sums - xp.where(top > -xp.inf, top, 0)), 0)[..., None]
    merged = xp.empty((*y.shape[:-1], y.shape[-1] + 1), y.dtype)
    merged[..., :-1] = y * weights
    merged[..., -1:] = weights
    return merged
