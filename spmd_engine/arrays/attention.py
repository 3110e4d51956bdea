"""Causal attention in blocks: scores of one block at a time, recomputed in the backward, never stored.

The forward keeps only its output and the logarithm of each row's sum of exponentials; with those, the
backward rebuilds any block of probabilities. Keys that no query of a block may see are skipped. The method
is that of Dao et al., "FlashAttention" (2022), with rows as blocks since a row of scores fits a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmd_engine.arrays.backend import Array, backend_of

BLOCK_ELEMENTS = 1 << 17  # scores held at a time: 512 KiB of float32


def causal_attention(q: Array, k: Array, v: Array, positions: Array, key_positions: Array) -> tuple[Array, Array]:
    """y[b s h k] = softmax(q . k / sqrt(k)) . v over keys at or before each query's position.

    q[b s h k], k[b t h k], v[b t h k]; ``positions[s]`` and ``key_positions[t]`` ascend, and each query must
    see one key at least. Also returns log_sums[b h s], which the backward needs.
    """
    xp = backend_of(q).xp
    y = xp.empty(q.shape, q.dtype)
    log_sums = xp.empty((q.shape[0], q.shape[2], q.shape[1]), q.dtype)
    for rows, keys, mask in _blocks(q, positions, key_positions, xp):
        for b in range(q.shape[0]):
            scores = _scores(q[b, rows], k[b, :keys], mask, xp)
            top = scores.max(axis=1)
            scores -= top[:, None]
            xp.exp(scores, out=scores)
            sums = scores.sum(axis=1)
            block = xp.matmul(scores.transpose(0, 2, 1), v[b, :keys].transpose(1, 0, 2))
            block /= sums[:, :, None]
            y[b, rows] = block.transpose(1, 0, 2)
            log_sums[b, :, rows] = xp.log(sums) + top
    return y, log_sums


def causal_attention_backward(dy, q, k, v, y, log_sums, positions, key_positions):
    """dq[b s h k], dk[b t h k], dv[b t h k] of ``causal_attention`` for the output's gradient dy[b s h k]."""
    xp = backend_of(q).xp
    dq, dk, dv = xp.empty(q.shape, q.dtype), xp.zeros(k.shape, k.dtype), xp.zeros(v.shape, v.dtype)
    scale = q.shape[3] ** -0.5
    projection = xp.einsum("bshk,bshk->bhs", dy, y)
    for rows, keys, mask in _blocks(q, positions, key_positions, xp):
        for b in range(q.shape[0]):
            dy_block = dy[b, rows].transpose(1, 0, 2)
            q_block = q[b, rows].transpose(1, 0, 2)
            p = _scores(q[b, rows], k[b, :keys], mask, xp)
            p -= log_sums[b, :, None, rows]
            xp.exp(p, out=p)
            dv[b, :keys] += xp.matmul(p, dy_block).transpose(1, 0, 2)
            ds = xp.matmul(v[b, :keys].transpose(1, 0, 2), dy_block.transpose(0, 2, 1))
            ds -= projection[b, :, None, rows]
            ds *= p
            ds *= scale
            dq[b, rows] = xp.matmul(ds.transpose(0, 2, 1), k[b, :keys].transpose(1, 0, 2)).transpose(1, 0, 2)
            dk[b, :keys] += xp.matmul(ds, q_block).transpose(1, 0, 2)
    return dq, dk, dv


def _scores(q_rows: Array, keys: Array, mask, xp) -> Array:
    """scores[h t s] of some queries q[s h k] and keys[t h k], -inf where the mask hides a key.

    Keys come before queries, so that maxima and sums over keys run along whole rows at a time, which NumPy
    does several times faster than within rows.
    """
    scaled = q_rows.transpose(1, 2, 0) * q_rows.dtype.type(q_rows.shape[2] ** -0.5)
    scores = xp.matmul(keys.transpose(1, 0, 2), scaled)
    if mask is not None:
        first, hide = mask
        scores[:, first:] += hide
    return scores


def _blocks(q: Array, positions, key_positions, xp) -> Iterator[tuple[slice, int, tuple[int, Array] | None]]:
    """Blocks of rows; how many keys the last row sees; from which key on rows see less, and -inf where."""
    length, heads, count = q.shape[1], q.shape[2], int(key_positions.shape[0])
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
