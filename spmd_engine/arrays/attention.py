"""Causal attention in blocks: scores of one block at a time, recomputed in the backward, never stored.

The forward keeps only its output and the logarithm of each row's sum of exponentials; with those, the
backward rebuilds any block of probabilities. Keys that no query of a block may see are skipped. The method
is that of Dao et al., "FlashAttention" (2022), with rows as blocks since a row of scores fits a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from spmd_engine.arrays.backend import Array, backend_of

BLOCK_ELEMENTS = 1 << 17  # scores held at a time: 512 KiB of float32


def causal_attention(q: Array, k: Array, v: Array, positions: Array, key_positions: Array) -> tuple[Array, Array]:
    """y[b s h k] = softmax(q . k / sqrt(k)) . v over keys at or before each query's position.

    q[b s h k], k[b t h k], v[b t h k]; ``positions[s]`` and ``key_positions[t]`` ascend, and each query must
    see one key at least. Also returns log_sums[b h s], which the backward needs. Where r queries share a key
    head, q and y are [b s h r k] and log_sums [b h r s].
    """
    xp = backend_of(q).xp
    y = xp.empty(q.shape, q.dtype)
    log_sums = xp.empty((q.shape[0], *q.shape[2:-1], q.shape[1]), q.dtype)
    for rows, keys, mask in _blocks(q, positions, key_positions, xp):
        for b in range(q.shape[0]):
            scores = _scores(_by_head(q[b, rows]), k[b, :keys], mask, xp)
            top = scores.max(axis=1)
            scores -= top[:, None]
            xp.exp(scores, out=scores)
            sums = scores.sum(axis=1)
            block = xp.matmul(scores.transpose(0, 2, 1), v[b, :keys].transpose(1, 0, 2))
            block /= sums[:, :, None]
            y[b, rows] = _by_row(block, q[b, rows].shape)
            top += xp.log(sums, out=sums)
            log_sums[b, ..., rows] = top.reshape(log_sums[b, ..., rows].shape)
    return y, log_sums


def causal_attention_backward(dy, q, k, v, y, log_sums, positions, key_positions):
    """dq, dk[b t h k], dv[b t h k] of ``causal_attention`` for the output's gradient dy, shaped as q and y.

    With the log_sums and the output over more keys than are given, these are the parts of the gradients that
    the given keys contribute.
    """
    xp = backend_of(q).xp
    dq, dk, dv = xp.empty(q.shape, q.dtype), xp.zeros(k.shape, k.dtype), xp.zeros(v.shape, v.dtype)
    scale = q.shape[-1] ** -0.5
    projection = xp.einsum("bs...k,bs...k->b...s", dy, y)
    for rows, keys, mask in _blocks(q, positions, key_positions, xp):
        for b in range(q.shape[0]):
            dy_block, q_block = _by_head(dy[b, rows]), _by_head(q[b, rows])
            p = _scores(q_block, k[b, :keys], mask, xp)
            p -= log_sums[b, ..., rows].reshape(p.shape[0], 1, p.shape[2])
            xp.exp(p, out=p)
            dv[b, :keys] += xp.matmul(p, dy_block).transpose(1, 0, 2)
            ds = xp.matmul(v[b, :keys].transpose(1, 0, 2), dy_block.transpose(0, 2, 1))
            ds -= projection[b, ..., rows].reshape(p.shape[0], 1, p.shape[2])
            ds *= p
            ds *= scale
            dq[b, rows] = _by_row(xp.matmul(ds.transpose(0, 2, 1), k[b, :keys].transpose(1, 0, 2)), q[b, rows].shape)
            dk[b, :keys] += xp.matmul(ds, q_block).transpose(1, 0, 2)
    return dq, dk, dv


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


def _scores(queries: Array, keys: Array, mask, xp) -> Array:
    """scores[h t s] of some queries[h s k] and keys[t h k], -inf where the mask hides a key; rs rows repeat it.

    Keys come before queries, so that maxima and sums over keys run along whole rows at a time, which NumPy
    does several times faster than within rows.
    """
    scaled = queries.transpose(0, 2, 1) * queries.dtype.type(queries.shape[2] ** -0.5)
    scores = xp.matmul(keys.transpose(1, 0, 2), scaled)
    if mask is not None:
        first, hide = mask
        rows = scores.reshape(*scores.shape[:2], -1, hide.shape[1])
        rows[:, first:] += hide[:, None]
    return scores


def _blocks(q: Array, positions, key_positions, xp) -> Iterator[tuple[slice, int, tuple[int, Array] | None]]:
    """Blocks of rows; how many keys the last row sees; from which key on rows see less, and -inf where."""
    length, heads, count = q.shape[1], prod(q.shape[2:-1]), int(key_positions.shape[0])
    if q.size == 0:
        return
    step = max(1, min(128, BLOCK_ELEMENTS // (heads * count)))
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        keys = int(xp.searchsorted(key_positions, positions[rows.stop - 1], side="right"))
        seen_by_all = int(xp.searchsorted(key_positions, positions[start], side="right"))
        if seen_by_all == keys:
            yield rows, keys, None
        else:
            hidden = key_positions[seen_by_all:keys, None] > positions[rows]
            # Added to the scores: many times faster than an assignment through a boolean index.
            yield rows, keys, (seen_by_all, xp.where(hidden, q.dtype.type(-xp.inf), q.dtype.type(0)))
