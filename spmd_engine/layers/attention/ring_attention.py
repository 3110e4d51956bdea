"""Ring attention: keys and values go round, and every rank's queries meet each block as it passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spmd_engine.arrays.attention import causal_attention, causal_attention_backward
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.layers.attention.context import ContextMethod, CutSequence


class RingAttention(ContextMethod):
    """No rank ever has more than two blocks of keys and values, and blocks travel while others are computed.

    Forward, n steps; the first block is the rank's own k, v[b s/context h k]:
        1. start to send the block to the next rank, and to receive the previous rank's
        2. attend to the block; merge with what the blocks before gave, weighted by their sums of exponentials
        3. what has come is the next block
    Backward, n steps with the final output and sums:
        1. start to send and to receive blocks as above
        2. dq += the block's part; the block's dk, dv = what the previous rank sent + this rank's part
        3. start to send those to the next rank: they follow their block, and after n steps are home

    Queries that see nothing of a block are left out of it; if the sequence is cut in a ``zigzag``, that leaves
    every rank as much to do in every step. With S bytes of keys and values in all, a rank sends S(n-1)/n
    forward and 2S(n-1)/n + S/n backward, and keeps S/n.

    After Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers" (2023); the merging is the
    online softmax of Milakov and Gimelshein (2018).
    """

    def attend(self, cut, q, k, v):
        own = backend_of(k).xp.stack((k, v))
        positions = cut.positions(q)
        seen = positions, positions, cut.apart(owner=cut.group.rank), cut.window, cut.cap
        mixed, log_sums = causal_attention(q, k, v, *seen)  # of its own block every query sees something: itself
        for owner, block in _passing(cut, own):
            rows = _rows_that_see(cut, owner)
            if rows is not None and owner != cut.group.rank:
                seen = positions[rows], cut.positions(q, owner), cut.apart(rows, owner), cut.window, cut.cap
                part = causal_attention(q[:, rows], *block, *seen)
                _merge(mixed[:, rows], log_sums[..., rows], *part)
        return mixed, (q, own, mixed, log_sums)

    def attend_backward(self, cut, saved, dmixed):
        q, own, mixed, log_sums = saved
        positions = cut.positions(q)
        dq = backend_of(q).xp.zeros(q.shape, q.dtype)
        dblock, arriving = backend_of(q).xp.zeros(own.shape, own.dtype), None
        for owner, block in _passing(cut, own):
            rows, parts = _rows_that_see(cut, owner), ()
            if rows is not None:
                queries, output = (dmixed[:, rows], q[:, rows]), (mixed[:, rows], log_sums[..., rows])
                seen = positions[rows], cut.positions(q, owner), cut.apart(rows, owner), cut.window, cut.cap
                dq_part, *parts = causal_attention_backward(*queries, *block, *output, *seen)
                dq[:, rows] += dq_part
            if arriving:  # nobody has added to a rank's own block yet
                dblock = arriving()
            for total, part in zip(dblock, parts, strict=False):
                total += part
            arriving = _pass_on(cut, dblock)
        return dq, *arriving()


def _passing(cut: CutSequence, own: Array) -> Iterator[tuple[int, Array]]:
    """Each rank and its block, this rank's own first; the next is on its way meanwhile."""
    block, ranks = own, cut.group.size
    for step in range(ranks):
        next_block = _pass_on(cut, block) if step < ranks - 1 else None
        yield (cut.group.rank - step) % ranks, block
        if next_block:
            block = next_block()


def _pass_on(cut: CutSequence, x: Array) -> Callable[[], Array]:
    """Start to send ``x`` to the next rank; the function returned waits for what the previous one sends.

    All ranks start the same messages in the same order and wait only then, so none waits for another's wait.
    """
    group = cut.group
    sending = group.start_send((group.rank + 1) % group.size, x, label=cut.label)
    receiving = group.start_receive((group.rank - 1) % group.size, like=backend_of(x), label=cut.label)

    def received() -> Array:
        y = receiving.wait()
        sending.wait()
        return y

    return received


def _rows_that_see(cut: CutSequence, owner: int) -> slice | None:
    """This rank's queries that see a key of that rank at least: the last ones, or None."""
    queries, keys = cut.rank_positions[cut.group.rank], cut.rank_positions[owner]
    first = int(queries.searchsorted(keys[0])) if len(keys) else len(queries)
    return slice(first, None) if first < len(queries) else None


def _merge(y: Array, log_sums: Array, part: Array, part_log_sums: Array) -> None:
    """Make y[b s h k] and log_sums[b h s], attention to some keys, attention to those of ``part`` too."""
    xp = backend_of(y).xp
    both = xp.logaddexp(log_sums, part_log_sums)
    y *= _by_query(xp.exp(log_sums - both), xp)
    part *= _by_query(xp.exp(part_log_sums - both), xp)
    y += part
    log_sums[...] = both


def _by_query(weights: Array, xp) -> Array:
    """[b h s], or [b h r s], as a factor of [b s h k], or [b s h r k]."""
    return xp.moveaxis(weights, -1, 1)[..., None]
