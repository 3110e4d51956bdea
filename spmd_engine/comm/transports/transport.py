"""Interface of a transport, which implements the other collectives by all_gather and all_to_all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.blocks import reduce_into, span, spans
from spmd_engine.comm.pending import Steps

if TYPE_CHECKING:
    from spmd_engine.comm.dispatch import Tuning

Parts = Sequence[slice]  #: of a flat array, by rank


class Transport(ABC):
    """Moves the data of an agreed call among ``size`` ranks; this rank is ``rank``.

    Arrays are flat and contiguous, and their parts are slices by rank. Every method is a generator (see ``pending``).
    ``last``: whether this is the last transfer of the call. A transport implements all_gather, and all_to_all or
    reduce_scatter, and may override the other methods; ``dispatch`` never chooses it for a method that it lacks.
    """

    rank: int
    size: int
    tuning: Tuning
    blocks: Sequence[Any] = ()  #: arrays of all ranks, if this rank can read them in place

    @abstractmethod
    def all_gather(self, x: Array, parts: Parts, *, last: bool = True) -> Steps:
        """Fill each other rank's part of ``x`` from that rank's ``x``."""

    def all_reduce(self, x: Array, out: Array, reduction: str) -> Steps:
        """``out`` = the reduction of ``x`` over ranks. ``out`` may be ``x``.

        A reduce_scatter, then an all_gather of the same parts; results are bit-identical on all ranks.
        """
        parts = [span(x.size, self.size, r) for r in range(self.size)]
        yield from self.reduce_scatter(x, parts, out[parts[self.rank]], reduction, last=False)
        yield from self.all_gather(out, parts)

    def all_to_all(self, x: Array, parts: Parts, out: Array, out_parts: Parts, *, last: bool = True) -> Steps:
        """Send part r of ``x`` to each other rank r, and fill part r of ``out`` with the part that rank r sends.

        It does not read this rank's part of ``x``, nor write this rank's part of ``out``.
        """
        raise NotImplementedError

    def broadcast(self, x: Array, root: int) -> Steps:
        """Fill ``x`` from ``root``: scatter parts, then gather them, so that no rank sends n copies of ``x``."""
        parts = [span(x.size, self.size, r) for r in range(self.size)]
        empty = [slice(0, 0)] * self.size
        incoming = list(empty)
        if self.rank != root:
            incoming[root] = parts[self.rank]
        outgoing = parts if self.rank == root else empty
        yield from self.all_to_all(x, outgoing, x, incoming, last=False)
        yield from self.all_gather(x, parts)

    def reduce_scatter(self, x: Array, parts: Parts, out: Array, reduction: str, *, last: bool = True) -> Steps:
        """``out`` = the reduction over ranks of part ``rank`` of ``x``, in an order fixed by the transport.

        ``out`` may be this rank's part of ``x``, or have the dtype in which ``x`` is accumulated. This implementation
        is in rank order, in rounds of bounded memory.
        """
        step = self._elements_a_round(x.itemsize)
        space = backend_of(out).empty((self.size * min(step, out.size),), x.dtype)
        rounds = max(1, -(-max(part.stop - part.start for part in parts) // step))
        for i in range(rounds):
            target = out[i * step : (i + 1) * step]
            pieces = [slice(min(p.start + i * step, p.stop), min(p.start + (i + 1) * step, p.stop)) for p in parts]
            places = spans([target.size] * self.size)
            end = last and i == rounds - 1
            yield from self.all_to_all(x, pieces, space, places, last=end)
            if target.size:
                blocks = [space[place] for place in places]
                blocks[self.rank] = x[pieces[self.rank]]
                reduce_into(target, blocks, reduction)

    def end(self) -> Steps:
        """The last method of a call: continues when no other rank needs this rank's memory."""
        yield from ()

    def _elements_a_round(self, itemsize: int) -> int:
        return max(1, min(self.tuning.piece, self.tuning.largest_count // self.size) // itemsize)
