"""Context parallelism: attention to keys that other ranks hold, by gathered keys, Ulysses or a ring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from spmd_engine.arrays.attention import causal_attention, causal_attention_backward
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import accumulated_in, rounded
from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError, one_of
from spmd_engine.layers.layer import Documents, ForwardContext
from spmd_engine.requirements import effect_along
from spmd_engine.sharding.shards import Shards


class ContextMethod(ABC):
    """Causal attention of q[b s h k] to k[b s h k] and v[b s h k], with s sharded.

    Where r queries share a key head, q is [b s h r k]. With a ``window``, a query sees only that many positions, up to
    its own; with a ``cap``, scores are cap · tanh(scores / cap). If s is not sharded, all methods only call the kernel.
    They have no state: one object may serve all layers.
    """

    def forward(
        self,
        sh: Shards,
        q: Array,
        k: Array,
        v: Array,
        ctx: ForwardContext,
        window: int | None = None,
        cap: float | None = None,
    ) -> tuple[Array, Any]:
        """The mixed values, shaped as q, and what the backward needs. Collective over the axes that shard s.

        Raises UsageError if s is sharded and ``ctx.length`` does not fit this rank's shard.
        """
        if not sh.is_sharded("s"):
            visible = _visible(ctx.positions, ctx.documents, window, cap)
            mixed, log_sums = causal_attention(q, k, v, **visible)
            return mixed, (None, ((q, k, v, mixed, log_sums), visible))
        sequence = ShardedSequence.of(sh, ctx, q, window, cap)
        mixed, saved = self.attend(sequence, q, k, v)
        return mixed, (sequence, saved)

    def backward(self, sh: Shards, saved: Any, dmixed: Array) -> tuple[Array, Array, Array]:
        """dq, dk and dv at this rank's positions. Collective as the forward."""
        sequence, saved = saved
        if sequence is None:
            arrays, visible = saved
            return causal_attention_backward(dmixed, *arrays, **visible)
        return self.attend_backward(sequence, saved, dmixed)

    @abstractmethod
    def attend(self, sequence: ShardedSequence, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """``forward`` of a sharded sequence."""

    @abstractmethod
    def attend_backward(self, sequence: ShardedSequence, saved: Any, dmixed: Array) -> tuple[Array, Array, Array]:
        """``backward`` of a sharded sequence."""


def _visible(positions: Array, documents: Documents | None, window: int | None, cap: float | None) -> dict[str, Any]:
    """Keyword arguments of ``causal_attention`` for queries and keys at the same positions."""
    apart = None if documents is None else (documents.numbers, documents.numbers)
    return {"positions": positions, "key_positions": positions, "apart": apart, "window": window, "cap": cap}


@dataclass(frozen=True)
class ShardedSequence:
    """A sequence, and the group of ranks that hold its shards."""

    group: Group
    label: str  #: in the ledger
    rank_positions: list[Array]  #: the positions of each rank of the group, ascending; on the host
    consecutive: bool  #: whether those of all ranks, in rank order, ascend
    documents: Documents | None = None  #: queries see only keys of their own document
    window: int | None = None  #: how many positions a query sees, up to its own; None: all
    cap: float | None = None  #: scores are cap · tanh(scores / cap); None: no cap

    @classmethod
    def of(
        cls, sh: Shards, ctx: ForwardContext, q: Array, window: int | None = None, cap: float | None = None
    ) -> ShardedSequence:
        """Raises UsageError if ``ctx.length`` does not fit this rank's shard."""
        rank_positions = sh.layout.positions_by_rank(ctx.length, sh.mesh)
        group: Any = sh.group_of("s")  # not None, since s is sharded
        if len(rank_positions[group.rank]) != q.shape[1]:
            raise UsageError(
                f"{sh.label}: s is sharded over {group.axes}: of a sequence of {ctx.length} (ForwardContext.length) "
                f"this rank has {len(rank_positions[group.rank])} positions, but its queries are {q.shape[1]}"
            )
        consecutive = "s" not in sh.layout.zigzag
        return cls(group, sh.label, rank_positions, consecutive, ctx.documents, window, cap)

    @property
    def lengths(self) -> list[int]:
        """How many positions each rank has."""
        return [len(positions) for positions in self.rank_positions]

    def positions(self, like: Array, rank: int | None = None) -> Array:
        """The positions of a rank of the group, by default this one, on the device of ``like``."""
        return backend_of(like).constant(self.rank_positions[self.group.rank if rank is None else rank])

    def all_positions(self, like: Array) -> Array:
        """0, 1, ... up to the sequence's length, on the device of ``like``."""
        return backend_of(like).xp.arange(sum(self.lengths))

    def visible(self, like: Array, rows: slice = slice(None), owner: int | None = None) -> dict[str, Any]:
        """Keyword arguments of ``causal_attention`` for some of this rank's queries and the keys of the rank ``owner``,
        or of all ranks if it is None, on the device of ``like``."""
        positions, apart = self.positions(like)[rows], None
        keys = self.all_positions(like) if owner is None else self.positions(like, owner)
        if self.documents is not None:
            numbers = self.documents.numbers
            queries = self.documents.at(self.positions(numbers)[rows])
            apart = queries, numbers if owner is None else self.documents.at(self.positions(numbers, owner))
        return {"positions": positions, "key_positions": keys, "apart": apart, "window": self.window, "cap": self.cap}

    def all_visible(self, like: Array) -> dict[str, Any]:
        """Keyword arguments of ``causal_attention`` for the queries and keys of all ranks."""
        return _visible(self.all_positions(like), self.documents, self.window, self.cap)

    def ascending(self, x: Array, axis: int) -> Array:
        """The shards of ``x``, joined along ``axis`` in rank order, in the order of positions."""
        return x if self.consecutive else x.take(self._in_rank_order(x).argsort(), axis=axis)

    def by_rank(self, x: Array, axis: int) -> Array:
        """The inverse of ``ascending``: in rank order."""
        return x if self.consecutive else x.take(self._in_rank_order(x), axis=axis)

    def _in_rank_order(self, like: Array) -> Array:
        xp = backend_of(like).xp
        return xp.concatenate([xp.asarray(positions) for positions in self.rank_positions])


# --- Context parallelism by gathered keys: the simplest method, but every rank holds all keys


class GatherKeys(ContextMethod):
    """Every rank attends with its queries to all keys at once.

    Forward:
        1. k, v[b t h k] = all_gather of k, v[b s/context h k]
        2. mixed[b s/context h k] = causal attention to them
    Backward:
        1. dq[b s/context h k], and dk, dv[b t h k] unreduced over context: from its queries
        2. dk, dv[b s/context h k] = reduce_scatter of them

    With S bytes of keys and values and n ranks, a rank sends S(n-1)/n forward and as much backward, and keeps S.
    """

    def attend(self, sequence, q, k, v):
        packed = sequence.group.all_gather(_pack(k, v), sizes=sequence.lengths, label=sequence.label)
        k, v = _unpack(sequence.ascending(packed, axis=0))
        mixed, log_sums = causal_attention(q, k, v, **sequence.visible(q))
        return mixed, (q, k, v, mixed, log_sums)

    def attend_backward(self, sequence, saved, dmixed):
        q, k, v, mixed, log_sums = saved
        wide = accumulated_in(q.dtype)  # as are the partial sums that are sent
        dq, dk, dv = causal_attention_backward(dmixed, q, k, v, mixed, log_sums, **sequence.visible(q), dtype=wide)
        packed = sequence.by_rank(_pack(dk, dv), axis=0)
        dk, dv = _unpack(sequence.group.reduce_scatter(packed, sizes=sequence.lengths, label=sequence.label))
        return tuple(rounded(x, q.dtype) for x in (dq, dk, dv))


def _pack(k: Array, v: Array) -> Array:
    """[t 2 b h k]: keys and values in one array, positions first, so that received shards need no copy."""
    return backend_of(k).xp.stack((k.swapaxes(0, 1), v.swapaxes(0, 1)), axis=1)


def _unpack(packed: Array) -> tuple[Array, Array]:
    """Views k[b t h k] and v[b t h k]."""
    return packed[:, 0].swapaxes(0, 1), packed[:, 1].swapaxes(0, 1)


# --- Ulysses: during attention, heads are sharded instead of the sequence


SEQUENCE, HEAD = 1, 2  # dims of [b s h k] and [b s h r k]


class Ulysses(ContextMethod):
    """Every rank computes some heads over the complete sequence.

    Forward:
        1. q, k, v[b s h/context k] = all_to_all of q, k, v[b s/context h k]
        2. mixed = causal attention, as on one device
        3. mixed[b s/context h k] = all_to_all of mixed[b s h/context k]
    Backward: the same with dmixed as input, and dq, dk, dv as output.

    With S bytes of queries and as many of keys, a rank sends 4 S/n (n-1)/n forward and as much backward.
    Ranks need not divide the heads; ranks beyond the number of heads have none.
    Jacobs et al., "DeepSpeed Ulysses" (2023).
    """

    def attend(self, sequence, q, k, v):
        q, k, v = _heads_for_positions(sequence, q, k, v)
        mixed, log_sums = causal_attention(q, k, v, **sequence.all_visible(q))
        (output,) = _positions_for_heads(sequence, mixed)
        return output, (q, k, v, mixed, log_sums)

    def attend_backward(self, sequence, saved, dmixed):
        q, k, v, mixed, log_sums = saved
        (dmixed,) = _heads_for_positions(sequence, dmixed)
        gradients = causal_attention_backward(dmixed, q, k, v, mixed, log_sums, **sequence.all_visible(q))
        return _positions_for_heads(sequence, *gradients)


def _heads_for_positions(sequence: ShardedSequence, *arrays: Array) -> tuple[Array, ...]:
    """[b s/context h k] as [b s h/context k], positions ascending."""
    moves = [sequence.group.start_all_to_all(x, HEAD, SEQUENCE, label=sequence.label) for x in arrays]
    return tuple(sequence.ascending(move.wait(), SEQUENCE) for move in moves)


def _positions_for_heads(sequence: ShardedSequence, *arrays: Array) -> tuple[Array, ...]:
    """[b s h/context k] as [b s/context h k]."""
    moves = [
        sequence.group.start_all_to_all(
            sequence.by_rank(x, SEQUENCE), SEQUENCE, HEAD, splits=sequence.lengths, label=sequence.label
        )
        for x in arrays
    ]
    return tuple(move.wait()[0] for move in moves)


# --- Ring attention: blocks of keys and values pass from rank to rank, and every rank attends to each


class RingAttention(ContextMethod):
    """A rank holds at most two blocks of keys and values, and sends one while it computes another.

    Forward, n steps; the first block is the rank's own k, v[b s/context h k]:
        1. start to send the block to the next rank, and to receive the previous rank's
        2. attend to the block; merge with the results of earlier blocks, weighted by the sums of exponentials
        3. continue with the received block
    Backward, n steps with the final output and sums:
        1. start to send and to receive blocks as above
        2. dq += the block's part; the block's dk, dv = those from the previous rank + this rank's part
        3. start to send these to the next rank: they follow their block, and after n steps are at its owner

    Queries that see no key of a block skip it; with a ``zigzag`` sharding, all ranks then have equal work in every
    step. With S bytes of keys and values, a rank sends S(n-1)/n forward and 2S(n-1)/n + S/n backward, and keeps S/n.

    After Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers" (2023); the merging is the
    online softmax of Milakov and Gimelshein (2018).
    """

    def attend(self, sequence, q, k, v):
        keys_values = backend_of(k).xp.stack((k, v))
        own_visible = sequence.visible(q, owner=sequence.group.rank)
        wide = accumulated_in(q.dtype)  # merged before it is rounded
        mixed, log_sums = causal_attention(q, k, v, **own_visible, dtype=wide)  # every query sees at least itself
        for owner, block in _ring_blocks(sequence, keys_values):
            rows = _rows_that_see(sequence, owner)
            if rows is not None and owner != sequence.group.rank:
                part = causal_attention(q[:, rows], *block, **sequence.visible(q, rows, owner), dtype=wide)
                _merge(mixed[:, rows], log_sums[..., rows], *part)
        mixed = rounded(mixed, q.dtype)
        return mixed, (q, keys_values, mixed, log_sums)

    def attend_backward(self, sequence, saved, dmixed):
        q, keys_values, mixed, log_sums = saved
        wide = accumulated_in(q.dtype)  # sums of 16-bit floats travel wide: every rank would round them
        dq = backend_of(q).xp.zeros(q.shape, wide)
        dblock = backend_of(q).xp.zeros(keys_values.shape, wide)
        arriving: Any = None
        for owner, block in _ring_blocks(sequence, keys_values):
            rows, parts = _rows_that_see(sequence, owner), ()
            if rows is not None:
                queries, output = (dmixed[:, rows], q[:, rows]), (mixed[:, rows], log_sums[..., rows])
                visible = sequence.visible(q, rows, owner)
                dq_part, *parts = causal_attention_backward(
                    *queries, block[0], block[1], *output, **visible, dtype=wide
                )
                dq[:, rows] += dq_part
            if arriving:  # not for the rank's own block, which comes first
                dblock = arriving()
            for total, part in zip(dblock, parts, strict=False):
                total += part
            arriving = _pass_on(sequence, dblock)
        return tuple(rounded(x, q.dtype) for x in (dq, *arriving()))


def _ring_blocks(sequence: ShardedSequence, own_block: Array) -> Iterator[tuple[int, Array]]:
    """Each rank and its block, this rank's first; the next block is received meanwhile."""
    block, ranks = own_block, sequence.group.size
    for step in range(ranks):
        next_block = _pass_on(sequence, block) if step < ranks - 1 else None
        yield (sequence.group.rank - step) % ranks, block
        if next_block:
            block = next_block()


def _pass_on(sequence: ShardedSequence, x: Array) -> Callable[[], Array]:
    """Start to send ``x`` to the next rank; the returned function waits for the array of the previous one.

    All ranks start the same messages in the same order before they wait, so there is no deadlock.
    """
    group = sequence.group
    sending = group.start_send((group.rank + 1) % group.size, x, label=sequence.label)
    receiving = group.start_receive((group.rank - 1) % group.size, like=backend_of(x), label=sequence.label)

    def received() -> Array:
        y = receiving.wait()
        sending.wait()
        return y

    return received


def _rows_that_see(sequence: ShardedSequence, owner: int) -> slice | None:
    """This rank's queries that see at least one key of the rank ``owner``: the last ones, or None."""
    queries, keys = sequence.rank_positions[sequence.group.rank], sequence.rank_positions[owner]
    first = int(queries.searchsorted(keys[0])) if len(keys) else len(queries)
    return slice(first, None) if first < len(queries) else None


def _merge(y: Array, log_sums: Array, part: Array, part_log_sums: Array) -> None:
    """Merge ``part``, attention to other keys, into y[b s h k] and log_sums[b h s], in place."""
    xp = backend_of(y).xp
    both = xp.logaddexp(log_sums, part_log_sums)
    y *= _by_query(xp.exp(log_sums - both), xp)
    part *= _by_query(xp.exp(part_log_sums - both), xp)
    y += part
    log_sums[...] = both


def _by_query(weights: Array, xp) -> Array:
    """[b h s], or [b h r s], as a factor of [b s h k], or [b s h r k]."""
    return xp.moveaxis(weights, -1, 1)[..., None]


# --- Context methods by name, as the command line knows them


CONTEXT_METHODS = {"gather": GatherKeys, "ring": RingAttention, "ulysses": Ulysses}


REQUIREMENTS = (effect_along("context_method", "context"),)


def context_method(name: str) -> ContextMethod:
    """The method called ``name``; raises UsageError for an unknown name."""
    if name not in CONTEXT_METHODS:
        raise UsageError(f"unknown context method {name!r}; {one_of(name, CONTEXT_METHODS)}")
    return CONTEXT_METHODS[name]()
