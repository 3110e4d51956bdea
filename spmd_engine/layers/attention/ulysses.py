"""Ulysses: for the attention alone, heads are cut instead of the sequence."""

from spmd_engine.arrays.attention import causal_attention, causal_attention_backward
from spmd_engine.arrays.backend import Array
from spmd_engine.layers.attention.context import ContextMethod, CutSequence

SEQUENCE, HEAD = 1, 2  # of [b s h k] and [b s h r k]


class Ulysses(ContextMethod):
    """Every rank attends with some heads, over the whole sequence.

    Forward:
        1. q, k, v[b s h/context k] = all_to_all of q, k, v[b s/context h k]
        2. mixed = causal attention, as on one device
        3. mixed[b s/context h k] = all_to_all of mixed[b s h/context k]
    Backward: the same with dmixed before, and dq, dk, dv after.

    With S bytes of queries in all and as many of keys: 4 S/n (n-1)/n sent by a rank forward, as much backward.
    Heads need not divide; ranks beyond their number have nothing to attend with.
    Jacobs et al., "DeepSpeed Ulysses" (2023).
    """

    def attend(self, cut, q, k, v):
        q, k, v = _heads_for_positions(cut, q, k, v)
        positions = cut.all_positions(q)
        mixed, log_sums = causal_attention(q, k, v, positions, positions, _apart(cut), cut.window, cut.cap)
        (own,) = _positions_for_heads(cut, mixed)
        return own, (q, k, v, mixed, log_sums)

    def attend_backward(self, cut, saved, dmixed):
        q, k, v, mixed, log_sums = saved
        (dmixed,) = _heads_for_positions(cut, dmixed)
        positions = cut.all_positions(q)
        seen = positions, positions, _apart(cut), cut.window, cut.cap
        gradients = causal_attention_backward(dmixed, q, k, v, mixed, log_sums, *seen)
        return _positions_for_heads(cut, *gradients)


def _apart(cut: CutSequence) -> tuple[Array, Array] | None:
    return None if cut.documents is None else (cut.documents.numbers, cut.documents.numbers)


def _heads_for_positions(cut: CutSequence, *arrays: Array) -> tuple[Array, ...]:
    """[b s/context h k] as [b s h/context k], positions ascending."""
    moves = [cut.group.start_all_to_all(x, HEAD, SEQUENCE, label=cut.label) for x in arrays]
    return tuple(cut.ascending(move.wait(), SEQUENCE) for move in moves)


def _positions_for_heads(cut: CutSequence, *arrays: Array) -> tuple[Array, ...]:
    """[b s h/context k] as [b s/context h k]."""
    moves = [
        cut.group.start_all_to_all(cut.by_rank(x, SEQUENCE), SEQUENCE, HEAD, splits=cut.lengths, label=cut.label)
        for x in arrays
    ]
    return tuple(move.wait()[0] for move in moves)
