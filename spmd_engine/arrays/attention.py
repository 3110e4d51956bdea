"""Causal attention in blocks: scores of one block at a time, recomputed in the backward, never stored.

The forward keeps only its output and the logarithm of each row's sum of exponentials; with those, the
backward rebuilds any block of probabilities. Keys that no query of a block may see are skipped. The method
is that of Dao et al., "FlashAttention" (2022), with rows as blocks since a row of scores fits a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import log, prod
from typing import Any

from spmd_engine.arrays import device_attention
from spmd_engine.arrays.activations import exponentiate, soft_cap, soft_cap_slope, softmax_backward
from spmd_engine.arrays.backend import CPU, Array, backend_of
from spmd_engine.arrays.factors import Mask, hide, unseen
from spmd_engine.arrays.fused import alike, fastest, kernels_for
from spmd_engine.arrays.precision import accumulated_in, rounded, widened
from spmd_engine.arrays.products import BFLOAT16, matmul
from spmd_engine.arrays.rotary import Rope, rotate

LOG_2 = log(2)
ROWS = 64  # queries of a block: fewer make thin matrix products, more compute scores that the mask hides
BLOCK_ELEMENTS = 1 << 17  # scores held at a time, of as many heads, and then samples, as fit: 512 KiB of float32


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
    backend, wide = backend_of(q), accumulated_in(q.dtype)
    if backend.on_device:
        return device_attention.attention(q, k, v, positions, key_positions, apart, window, cap, dtype)
    xp = backend.xp
    y, narrow = xp.empty(q.shape, dtype), q.dtype == _FLOAT16
    tops = xp.empty((q.shape[0], *q.shape[2:-1], q.shape[1]), wide)
    sums = xp.empty(tops.shape, wide)
    may_see_none = apart is not None or window is not None
    if may_see_none:
        y[...], tops[...], sums[...] = 0, -xp.inf, 0
    scale, least, softmax = q.shape[-1] ** -0.5, xp.finfo(wide).tiny, fastest(softmax_over_keys, tops)
    q, k, v, y_by_head = map(_by_head, (q, k, v, y))
    for rows, keys, mask, (scores,) in _blocks(q, positions, key_positions, apart, window, 1):
        matrices = (*scores.shape[:-2], scores.shape[-1], q.shape[-1])
        q_block, k_block, v_block, y_block = q[*rows, :].reshape(matrices), k[keys], v[keys], y_by_head[*rows, :]
        if narrow:
            q_block, k_block, v_block = map(widened, (q_block, k_block, v_block))
        matmul(k_block, q_block.swapaxes(-1, -2), out=scores)
        factor = scale if cap is None else _capped(scores, scale, cap)
        hide(scores, mask)
        p, top, total = softmax(scores, factor, v_block.dtype)
        block = matmul(p.swapaxes(-1, -2), v_block, dtype=wide)
        block /= (xp.maximum(total, least) if may_see_none else total)[..., None]
        y_block[...] = rounded(block, dtype).reshape(y_block.shape)
        shape = tops[rows].shape
        tops[rows], sums[rows] = top.reshape(shape), total.reshape(shape)
    with backend.errstate(divide="ignore"):  # the logarithm of 0 is then -inf
        tops += xp.log(sums, out=sums)
    return y, tops


_FLOAT16 = CPU.xp.dtype("float16")  # which no library multiplies, as bfloat16: operands are widened


def _capped(scores: Array, scale: float, cap: float) -> float:
    """Scale and cap scores, in place, and return the factor that they still lack."""
    scores *= scale
    soft_cap(scores, cap)
    return 1.0


# --- What a backend's ``kernels`` also have, by the same names: ``fastest`` chooses once for all blocks


def softmax_over_keys(scores: Array, scale: float, dtype: Any) -> tuple[Array, Array, Array]:
    """p[... t s] = exp(scale · scores - top) in this dtype, top[... s], and the sums[... s] of p over t before it is
    rounded.

    ``top`` is a multiple of log(2), the first from the maximum on: with another ``top``, as on a rank with other keys,
    rounded p are the same, up to a power of 2. ``scores`` are overwritten.
    """
    xp = backend_of(scores).xp
    scores *= scale
    top = _multiple_of_log_2(scores.max(axis=-2))
    xp.maximum(top, xp.finfo(top.dtype).min, out=top)  # for rows without keys
    exponentiate(scores, top[..., None, :])
    # BLAS sums over keys in a quarter of the time of ``sum``.
    return rounded(scores, dtype), top, xp.matmul(xp.ones(scores.shape[-2], scores.dtype), scores)


def _multiple_of_log_2(highest: Array) -> Array:
    """The first multiple of log(2) from each of the ``highest`` scores on."""
    xp = backend_of(highest).xp
    top = highest / LOG_2
    xp.ceil(top, out=top)
    top *= LOG_2
    # Where scores are so large that multiples of log(2) are themselves rounded:
    return xp.where((highest > top + 1) | (top > highest + 1), highest, top)


def exponentiate_keys(scores: Array, scale: float, shift: Array, dtype: Any) -> Array:
    """exp(scale · scores - shift), in place and in this dtype."""
    scores *= scale
    exponentiate(scores, shift)
    return rounded(scores, dtype)


def softmax_gradient(ds: Array, p: Array, projection: Array, scale: float, dtype: Any) -> Array:
    """(ds - projection) * p * scale in this dtype; ``ds`` is overwritten."""
    softmax_backward(ds, p, projection)
    ds *= scale
    return rounded(ds, dtype)


def _products_of_rows(x: Array, y: Array) -> Array:
    """The sums of x[... k] · y[... k] over k, wide."""
    if x.dtype == y.dtype and (kernels := kernels_for(x, name="products_of_rows")) is not None:
        return kernels.products_of_rows(x, y)
    return backend_of(x).xp.einsum("...k,...k->...", widened(x), widened(y))


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
    scale, narrow = q.shape[-1] ** -0.5, q.dtype == _FLOAT16
    if apart is not None or window is not None:
        log_sums = xp.maximum(log_sums, xp.finfo(log_sums.dtype).min)  # for queries without keys
    projection = _products_of_rows(dy, y)  # [b s h], or [b s h r]
    projection = projection.transpose(0, *range(2, projection.ndim), 1)
    exponentiated, gradient = fastest(exponentiate_keys, log_sums), fastest(softmax_gradient, log_sums)
    q, k, v, dy, dq_by_head, dk_by_head, dv_by_head = map(_by_head, (q, k, v, dy, dq, dk, dv))
    for rows, keys, mask, (p, ds) in _blocks(q, positions, key_positions, apart, window, 2):
        of_rows, matrices = (*p.shape[:-2], 1, p.shape[-1]), (*p.shape[:-2], p.shape[-1], q.shape[-1])
        q_block, dy_block = q[*rows, :].reshape(matrices), dy[*rows, :].reshape(matrices)
        k_block, v_block, dq_block = k[keys], v[keys], dq_by_head[*rows, :]
        if narrow:
            q_block, dy_block, k_block, v_block = map(widened, (q_block, dy_block, k_block, v_block))
        matmul(k_block, q_block.swapaxes(-1, -2), out=p)
        factor = scale if cap is None else _capped(p, scale, cap)
        slope = None if cap is None else soft_cap_slope(p, cap)
        hide(p, mask)
        weights = exponentiated(p, factor, log_sums[rows].reshape(of_rows), dy_block.dtype)
        dv_by_head[keys] += matmul(weights, dy_block, dtype=wide)
        matmul(v_block, dy_block.swapaxes(-1, -2), out=ds)
        if slope is not None:
            p *= slope
        ds_operand = gradient(ds, p, projection[rows].reshape(of_rows), scale, q_block.dtype)
        dk_by_head[keys] += matmul(ds_operand, q_block, dtype=wide)
        dq_block[...] = matmul(ds_operand.swapaxes(-1, -2), k_block, dtype=dtype).reshape(dq_block.shape)
    return dq, rounded(dk, dtype), rounded(dv, dtype)


def _by_head(x: Array) -> Array:
    """x[b s h k] as [b h s k], or [b s h r k] as [b h r s k]."""
    return x.transpose(0, 2, 1, 3) if x.ndim == 4 else x.transpose(0, 2, 3, 1, 4)


def _blocks(
    q: Array, positions: Array, key_positions: Array, apart: Apart | None, window: int | None, buffers: int
) -> Iterator[tuple[Any, Any, Mask | None, list[Array]]]:
    """Queries of a few heads, of one sample or of several if these have few: an index of them in log_sums[b h s], or
    [b h r s], one in k[b h t k] of the keys that any of them sees, their mask, and so many arrays for scores[h t s],
    or [b h t s].

    q is [b h s k], or [b h r s k]. The memory is the same for all blocks, so that it stays in cache. Keys come before
    queries, so that maxima and sums over keys run along whole rows at a time, which NumPy does faster than within rows.
    """
    batch, heads, *shared, length, _ = q.shape
    if q.size == 0:
        return
    xp, wide, repeats = backend_of(q).xp, accumulated_in(q.dtype), prod(shared)
    of_head = min(ROWS, length) * repeats * len(key_positions)
    heads_at_a_time = min(heads, max(1, BLOCK_ELEMENTS // of_head))
    samples_at_a_time = min(batch, max(1, BLOCK_ELEMENTS // (of_head * heads))) if apart is None else 1
    memory = [xp.empty(samples_at_a_time * heads_at_a_time * of_head, wide) for _ in range(buffers)]
    all_samples, all_heads = _parts(batch, samples_at_a_time), _parts(heads, heads_at_a_time)
    positions_now = positions.tobytes(), positions.dtype, key_positions.tobytes(), key_positions.dtype
    for rows, keys, mask in _rows_and_keys(*positions_now, window, wide):
        seen = keys
        for samples in alike(all_samples, q, last=batch % samples_at_a_time != 0):
            if apart is not None:
                b = samples.start
                query_documents, key_documents = apart[0][b, rows], apart[1][b, : keys.stop]
                seen = slice(max(keys.start, int(xp.searchsorted(key_documents, query_documents[0]))), keys.stop)
                if seen.start == seen.stop:  # another rank has all keys of these documents
                    continue
                hidden = unseen(key_positions[seen, None], positions[rows], window)
                hidden |= key_documents[seen, None] != query_documents
                mask = 0, _minus_infinity(hidden, wide)
            for part in alike(all_heads, q, last=heads % heads_at_a_time != 0):
                shape = part.stop - part.start, seen.stop - seen.start, (rows.stop - rows.start) * repeats
                several, sample = samples.stop - samples.start, samples.start if samples_at_a_time == 1 else samples
                if samples_at_a_time > 1:
                    shape = several, *shape
                scores = [buffer[: several * shape[-3] * shape[-2] * shape[-1]].reshape(shape) for buffer in memory]
                yield (sample, part, ..., rows), (sample, part, seen), mask, scores


@lru_cache(maxsize=256)
def _parts(length: int, step: int) -> Sequence[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


@lru_cache(maxsize=32)  # all layers, and both directions, have the same few positions
def _rows_and_keys(
    query_bytes: bytes, query_dtype: Any, key_bytes: bytes, key_dtype: Any, window: int | None, dtype: Any
) -> Sequence[tuple[slice, slice, Mask | None]]:
    """Consecutive queries at a time, the keys that any of them sees, and which of these are hidden from some.

    Positions are the bytes of arrays, of these dtypes; masks have ``dtype``. Equal masks are one array.
    """
    xp, masks, result = CPU.xp, {}, []
    positions, key_positions = xp.frombuffer(query_bytes, query_dtype), xp.frombuffer(key_bytes, key_dtype)
    for rows in _parts(len(positions), ROWS):
        first, last = positions[rows.start], positions[rows.stop - 1]
        end, seen_by_all = (int(key_positions.searchsorted(position, side="right")) for position in (last, first))
        begin = 0 if window is None else int(key_positions.searchsorted(first - window, side="right"))
        if begin == end and window is not None:  # another rank has all keys in these windows
            continue
        seen_by_all = max(begin, seen_by_all)
        if window is not None and last - key_positions[begin] >= window:
            seen_by_all = begin
        mask = None
        if seen_by_all < end:
            hidden = unseen(key_positions[seen_by_all:end, None], positions[rows], window)
            same = masks.setdefault((hidden.shape, hidden.tobytes()), _minus_infinity(hidden, dtype))
            mask = seen_by_all - begin, same
        result.append((rows, slice(begin, end), mask))
    return result


def _minus_infinity(hidden: Array, dtype: Any) -> Array:
    return CPU.xp.where(hidden, dtype.type(-CPU.xp.inf), dtype.type(0))


# --- Attention of a few new queries to all keys of sequences that grow: the step of a generation


HIDDEN = 1 << 60  #: the position of a column that holds none, greater than that of any query
ELEMENTS = 1 << 20  # scores at a time, of as many queries as fit
FEW_KEYS = 1 << 17  # multiplications of scores up to which a compiled loop takes less time than BLAS and its calls


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


def attend_to_all(
    q: Array, k: Array, v: Array, keys: Array, values: Array, seen: slice, cap: float | None, rope: Rope | None = None
) -> Array:
    """The y of ``attend_to_keys`` for one query[b 1 h k] per sequence that sees all its keys, with the fewest calls.

    Its keys and values are the columns ``seen`` of keys[b t h k] and values[b t h k], of which k[b 1 h k] and
    v[b 1 h k] become the last. With a ``rope``, q and k are rotated by it.
    """
    few = type(q) is CPU.xp.ndarray and cap is None and 0 < q.size * (seen.stop - seen.start) <= FEW_KEYS
    if few and CPU.kernels is not None and CPU.kernels.takes(q.dtype):
        y = CPU.kernels.attend_to_all(q, k, v, keys, values, seen, rope)
        if y is not NotImplemented:
            return y
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    last = slice(seen.stop - 1, seen.stop)
    keys[:, last], values[:, last] = k, v
    k, v = keys[:, seen], values[:, seen]
    xp, dtype, wide, width = backend_of(q).xp, q.dtype, widened(q), q.shape[-1]
    is_narrow = wide is not q
    rounds = is_narrow and _rounds_probabilities(q)
    if is_narrow:
        q, k, v = wide, widened(k), widened(v)
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
    return rounded(mixed, dtype) if is_narrow else mixed


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
