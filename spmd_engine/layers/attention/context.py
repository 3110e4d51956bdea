"""Context parallelism: what the ways in which queries meet the keys of other ranks have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from spmd_engine.arrays.attention import causal_attention, causal_attention_backward
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import Documents, ForwardContext
from spmd_engine.sharding.shards import Shards


class ContextMethod(ABC):
    """Causal attention of q[b s h k] to k[b s h k] and v[b s h k], each rank having its positions of s.

    Where r queries share a key head, q is [b s h r k]. With a ``window``, a query sees so many positions alone, up to
    its own; with a ``cap``, scores are cap · tanh(scores / cap). Where s is whole on every rank, all methods are the
    kernel itself. They keep nothing: one object may serve all layers.
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
        """The mixed values, shaped as q, and what the backward needs. Collective over the axes that cut s.

        Raises UsageError if s is cut and ``ctx.length`` does not fit this rank's part of it.
        """
        if not sh.is_cut("s"):
            apart = None if ctx.documents is None else (ctx.documents.numbers, ctx.documents.numbers)
            seen = ctx.positions, ctx.positions, apart, window, cap
            mixed, log_sums = causal_attention(q, k, v, *seen)
            return mixed, (None, (q, k, v, mixed, log_sums, *seen))
        cut = CutSequence.of(sh, ctx, q, window, cap)
        mixed, saved = self.attend(cut, q, k, v)
        return mixed, (cut, saved)

    def backward(self, sh: Shards, saved: Any, dmixed: Array) -> tuple[Array, Array, Array]:
        """dq, dk and dv at this rank's positions. Collective as the forward."""
        cut, saved = saved
        if cut is None:
            return causal_attention_backward(dmixed, *saved)
        return self.attend_backward(cut, saved, dmixed)

    @abstractmethod
    def attend(self, cut: CutSequence, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """``forward`` of a sequence that is cut."""

    @abstractmethod
    def attend_backward(self, cut: CutSequence, saved: Any, dmixed: Array) -> tuple[Array, Array, Array]:
        """``backward`` of a sequence that is cut."""


@dataclass(frozen=True)
class CutSequence:
    """A sequence, and the ranks among which it is cut."""

    group: Group
    label: str  #: in the ledger
    rank_positions: list[Array]  #: the positions of each rank of the group, ascending; on the host
    consecutive: bool  #: whether those of all ranks, in rank order, ascend
    documents: Documents | None = None  #: of which queries see only keys of their own
    window: int | None = None  #: how many positions a query sees, up to its own; None: all
    cap: float | None = None  #: of scores; None: there is none

    @classmethod
    def of(
        cls, sh: Shards, ctx: ForwardContext, q: Array, window: int | None = None, cap: float | None = None
    ) -> CutSequence:
        rank_positions = sh.layout.positions_by_rank(ctx.length, sh.mesh)
        group = sh.group_of("s")
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
        """Those of a rank of the group, this one by default, where ``like`` lives."""
        return backend_of(like).asarray(self.rank_positions[self.group.rank if rank is None else rank])

    def all_positions(self, like: Array) -> Array:
        """0, 1, ... up to the sequence's length, where ``like`` lives."""
        return backend_of(like).xp.arange(sum(self.lengths))

    def apart(self, rows: slice = slice(None), owner: int | None = None) -> tuple[Array, Array] | None:
        """The documents of some of this rank's queries, and of the keys of a rank; of all ranks, if none is named."""
        if self.documents is None:
            return None
        queries = self.documents.at(self.positions(self.documents.numbers)[rows])
        if owner is None:
            return queries, self.documents.numbers
        return queries, self.documents.at(self.positions(self.documents.numbers, owner))

    def ascending(self, x: Array, axis: int) -> Array:
        """All ranks' parts of ``x``, joined along ``axis`` in rank order, put in the order of positions."""
        return x if self.consecutive else x.take(self._in_rank_order(x).argsort(), axis=axis)

    def by_rank(self, x: Array, axis: int) -> Array:
        """The inverse of ``ascending``: what each rank has lies together."""
        return x if self.consecutive else x.take(self._in_rank_order(x), axis=axis)

    def _in_rank_order(self, like: Array) -> Array:
        xp = backend_of(like).xp
        return xp.concatenate([xp.asarray(positions) for positions in self.rank_positions])


# --- Context parallelism by gathered keys: the shortest way, at the price of all keys on every rank


class GatherKeys(ContextMethod):
    """Every rank's queries meet all keys at once.

    Forward:
        1. k, v[b t h k] = all_gather of k, v[b s/context h k]
        2. mixed[b s/context h k] = causal attention to them
    Backward:
        1. dq[b s/context h k], and dk, dv[b t h k] unreduced over context: what its queries ask of all keys
        2. dk, dv[b s/context h k] = reduce_scatter of them

    With S bytes of keys and values in all, n ranks: S(n-1)/n sent by a rank forward, as much backward; S kept.
    """

    def attend(self, cut, q, k, v):
        packed = cut.group.all_gather(_pack(k, v), sizes=cut.lengths, label=cut.label)
        k, v = _unpack(cut.ascending(packed, axis=0))
        seen = cut.positions(q), cut.all_positions(q), cut.apart(), cut.window, cut.cap
        mixed, log_sums = causal_attention(q, k, v, *seen)
        return mixed, (q, k, v, mixed, log_sums)

    def attend_backward(self, cut, saved, dmixed):
        q, k, v, mixed, log_sums = saved
        seen = cut.positions(q), cut.all_positions(q), cut.apart(), cut.window, cut.cap
        dq, dk, dv = causal_attention_backward(dmixed, q, k, v, mixed, log_sums, *seen)
        packed = cut.by_rank(_pack(dk, dv), axis=0)
        return dq, *_unpack(cut.group.reduce_scatter(packed, sizes=cut.lengths, label=cut.label))


def _pack(k: Array, v: Array) -> Array:
    """[t 2 b h k]: keys and values travel together, positions first, so that parts are joined where they arrive."""
    return backend_of(k).xp.stack((k.swapaxes(0, 1), v.swapaxes(0, 1)), axis=1)


def _unpack(packed: Array) -> tuple[Array, Array]:
    """Views k[b t h k] and v[b t h k]."""
    return packed[:, 0].swapaxes(0, 1), packed[:, 1].swapaxes(0, 1)
