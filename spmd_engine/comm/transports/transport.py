"""Interface of a transport, with the other collectives on top of all_gather and all_to_all."""

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
    """Moves the data of an agreed call among ``size`` ranks, of which this is ``rank``.

    Arrays are flat and contiguous, and parts of them are slices by rank. Every method is a generator (see
    ``pending``). ``last`` says that nothing more of this call follows. A transport implements all_gather, and
    all_to_all or reduce_scatter, and overrides others with faster ones; ``dispatch`` never chooses it for the rest.
    """

    rank: int
    size: int
    tuning: Tuning
    blocks: Sequence[Any] = ()  #: arrays of all ranks, if this rank can read them in place

    @abstractmethod
    def all_gather(self, x: Array, parts: Parts, *, last: bool = True) -> Steps:
        """Fill each other rank's part of ``x`` with what that rank has there."""

    def all_reduce(self, x: Array, out: Array, reduction: str) -> Steps:
        """``out`` = the reduction of ``x`` over ranks. ``out`` may be ``x``.

        It is a reduce_scatter, then an all_gather of the same parts, with bit-identical results.
        """
        parts = [span(x.size, self.size, r) for r in range(self.size)]
        yield from self.reduce_scatter(x, parts, out[parts[self.rank]], reduction, last=False)
        yield from self.all_gather(out, parts)

    def all_to_all(self, x: Array, parts: Parts, out: Array, out_parts: Parts, *, last: bool = True) -> Steps:
        """Send part r of ``x`` to each other rank r, and fill part r of ``out`` with what that rank sends.

        This rank's own part of ``x`` is not moved, and its part of ``out`` not written to.
        """
        raise NotImplementedError

    def broadcast(self, x: Array, root: int) -> Steps:
        """Fill ``x`` from ``root``: scatter parts, then gather them, so that no rank sends ``x`` n times."""
        parts = [span(x.size, self.size, r) for r in range(self.size)]
        nothing = [slice(0, 0)] * self.size
        incoming = list(nothing)
        if self.rank != root:
            incoming[root] = parts[self.rank]
        outgoing = parts if self.rank == root else nothing
        yield from self.all_to_all(x, outgoing, x, incoming, last=False)
        yield from self.all_gather(x, parts)

    def reduce_scatter(self, x: Array, parts: Parts, out: Array, reduction: str, *, last: bool = True) -> Steps:
        """``out`` = the reduction over ranks of part ``rank`` of ``x``, in an order fixed by the transport.

        ``out`` may be this rank's part of ``x``, or of the dtype in which ``x`` is accumulated. Here it is in rank
        order, and in rounds of bounded memory.
        """
        step = self._elements_a_round(x.itemsize)
        space = backend_of(out).empty((self.size * min(step, out.size),), x.dtype)
        rounds = max(1, -(-max(part.stop - part.start for part in parts) // step))
        for i in range(rounds):
            ours = out[i * step : (i + 1) * step]
            pieces = [slice(min(p.start + i * step, p.stop), min(p.start + (i + 1) * step, p.stop)) for p in parts]
            places = spans([ours.size] * self.size)
            end = last and i == rounds - 1
            yield from self.all_to_all(x, pieces, space, places, last=end)
            if ours.size:
                blocks = [space[place] for place in places]
                blocks[self.rank] = x[pieces[self.rank]]
                reduce_into(ours, blocks, reduction)

    def end(self) -> Steps:
        """Called last. Continues when the other ranks no longer need this rank's memory."""
        yield from ()

    def _elements_a_round(self, itemsize: int) -> int:
        return max(1, min(self.tuning.piece, self.tuning.largest_count // self.size) // itemsize)
