"""Transport by the MPI library's nonblocking collectives, with data in host memory.

All ranks must start these collectives in the same order on a communicator. So a call starts to move data when all
earlier calls have started their last collective, or need none, or have failed (``CallOrder``); and only after all ranks
have agreed on the call, as MPI libraries survive neither unequal sizes nor ranks that never arrive.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from mpi4py import MPI

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.comm.communicators.communicator import CallOrder
from spmd_engine.comm.dispatch import Tuning
from spmd_engine.comm.pending import Condition, Steps
from spmd_engine.comm.transports.transport import Parts, Transport

_KINDS = "iufc"  # of dtypes that the library sums


class NonblockingCollectives(Transport):
    """See ``Transport``. Max, min and prod are in rank order; sums of many ranks in library order (see ``Tuning``)."""

    def __init__(self, comm: MPI.Comm, call_order: CallOrder, tuning: Tuning, number: int = 0) -> None:
        self.rank, self.size, self.tuning = comm.rank, comm.size, tuning
        self._comm, self._call_order, self._number = comm, call_order, number

    def of_call(self, number: int, in_rank_order: bool) -> NonblockingCollectives:
        """The transport of a call; ``in_rank_order``: whether all sums are in rank order."""
        tuning = replace(self.tuning, in_rank_order=self.size) if in_rank_order else self.tuning
        return NonblockingCollectives(self._comm, self._call_order, tuning, number)

    def all_gather(self, x: Array, parts: Parts, *, last: bool = True) -> Steps:
        yield from self._call_order.wait(self._number)
        request = self._comm.Iallgatherv(MPI.IN_PLACE, _byte_buffer(x, parts))
        yield from self._complete(request, last)

    def all_to_all(self, x: Array, parts: Parts, out: Array, out_parts: Parts, *, last: bool = True) -> Steps:
        yield from self._call_order.wait(self._number)
        request = self._comm.Ialltoallv(_byte_buffer(x, parts, self.rank), _byte_buffer(out, out_parts, self.rank))
        yield from self._complete(request, last)

    def broadcast(self, x: Array, root: int) -> Steps:
        """Fill ``x`` from ``root``."""
        yield from self._call_order.wait(self._number)
        request = self._comm.Ibcast([x.view(np.uint8), MPI.BYTE], root)
        yield from self._complete(request, True)

    def reduce_scatter(self, x: Array, parts: Parts, out: Array, reduction: str, *, last: bool = True) -> Steps:
        """See ``Transport``. Sums of many ranks are in the library's order, those of 16-bit floats in float32."""
        wide = accumulated_in(x.dtype)
        native = x.dtype.isnative and (x.dtype.kind in _KINDS or wide != x.dtype)
        if self.size <= self.tuning.in_rank_order or reduction not in ("sum", "mean") or not native:
            yield from super().reduce_scatter(x, parts, out, reduction, last=last)
            return
        # Variables keep both arrays until the request is done: mpi4py does not.
        operand, total = x.astype(wide, copy=False), np.empty(out.shape, wide)
        yield from self._call_order.wait(self._number)
        counts = [part.stop - part.start for part in parts]
        request = self._comm.Ireduce_scatter(operand, total, counts, MPI.SUM)
        yield from self._complete(request, last)
        out[...] = total / wide.type(self.size) if reduction == "mean" else total

    def _complete(self, request: MPI.Request, last: bool) -> Steps:
        if last:
            self._call_order.finish(self._number)
        yield Condition(request.Test, lambda rank: True, messages=True)  # all ranks have agreed on the call


def _byte_buffer(x: np.ndarray, parts: Parts, excluded_rank: int | None = None) -> list:
    """Parts of ``x`` as an MPI buffer specification, empty for ``excluded_rank``."""
    size = x.itemsize
    counts = [(part.stop - part.start) * size if r != excluded_rank else 0 for r, part in enumerate(parts)]
    return [x.view(np.uint8), counts, [part.start * size for part in parts], MPI.BYTE]
