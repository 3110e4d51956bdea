"""Transport by the MPI library's nonblocking collectives, with data in host memory.

All ranks must start these collectives in the same order on a communicator. So a call starts to move data when all
earlier calls have started their last collective, or need none, or have failed (``CallOrder``); and only after all ranks
have agreed on the call, as MPI libraries survive neither unequal sizes nor ranks that never arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.pending import Condition, Steps
from spmd_engine.comm.transports.transport import AgreedCall, Facts, Parts, Transport

if TYPE_CHECKING:
    from mpi4py.MPI import Request

_KINDS = "iufc"  # of dtypes that the library sums


class NonblockingCollectives(Transport):
    """See ``Transport``. Max, min and prod are in rank order; sums of many ranks in library order (see ``Tuning``)."""

    name = "the MPI library's nonblocking collective"
    keeps_call_order = True

    @staticmethod
    def suits(call: Signature, facts: Facts) -> bool:
        tuning, size = facts.tuning, facts.size
        largest = size * facts.ranks if call.operation == "all_to_all" else size  # one rank may receive the data of all
        small = 0 < size < tuning.by_library * facts.ranks and largest <= tuning.largest_count
        return facts.library and not facts.one_node and facts.host and small

    def __init__(self, call: AgreedCall) -> None:
        from mpi4py import MPI  # ranks that have a library have loaded it

        super().__init__(call)
        self._mpi, self._comm = MPI, call.library
        self._call_order, self._number = call.connections.call_order, call.number
        self._most_in_rank_order = self.size if call.in_rank_order else self.tuning.in_rank_order

    def all_gather(self, x: Array, parts: Parts, *, last: bool = True) -> Steps:
        yield from self._call_order.wait(self._number)
        request = self._comm.Iallgatherv(self._mpi.IN_PLACE, self._byte_buffer(x, parts))
        yield from self._complete(request, last)

    def all_to_all(self, x: Array, parts: Parts, out: Array, out_parts: Parts, *, last: bool = True) -> Steps:
        yield from self._call_order.wait(self._number)
        request = self._comm.Ialltoallv(
            self._byte_buffer(x, parts, self.rank), self._byte_buffer(out, out_parts, self.rank)
        )
        yield from self._complete(request, last)

    def broadcast(self, x: Array, root: int) -> Steps:
        """Fill ``x`` from ``root``."""
        yield from self._call_order.wait(self._number)
        request = self._comm.Ibcast([x.view(np.uint8), self._mpi.BYTE], root)
        yield from self._complete(request, True)

    def reduce_scatter(self, x: Array, parts: Parts, out: Array, reduction: str, *, last: bool = True) -> Steps:
        """See ``Transport``. Sums of many ranks are in the library's order, those of 16-bit floats in float32."""
        wide = accumulated_in(x.dtype)
        native = x.dtype.isnative and (x.dtype.kind in _KINDS or wide != x.dtype)
        if self.size <= self._most_in_rank_order or reduction not in ("sum", "mean") or not native:
            yield from super().reduce_scatter(x, parts, out, reduction, last=last)
            return
        # Variables keep both arrays until the request is done: mpi4py does not.
        operand, total = x.astype(wide, copy=False), np.empty(out.shape, wide)
        yield from self._call_order.wait(self._number)
        counts = [part.stop - part.start for part in parts]
        request = self._comm.Ireduce_scatter(operand, total, counts, self._mpi.SUM)
        yield from self._complete(request, last)
        out[...] = total / wide.type(self.size) if reduction == "mean" else total

    def _complete(self, request: Request, last: bool) -> Steps:
        if last:
            self._call_order.finish(self._number)
        yield Condition(request.Test, lambda rank: True, messages=True)  # all ranks have agreed on the call

    def _byte_buffer(self, x: np.ndarray, parts: Parts, excluded_rank: int | None = None) -> list:
        """Parts of ``x`` as an MPI buffer specification, empty for ``excluded_rank``."""
        size = x.itemsize
        counts = [(part.stop - part.start) * size if r != excluded_rank else 0 for r, part in enumerate(parts)]
        return [x.view(np.uint8), counts, [part.start * size for part in parts], self._mpi.BYTE]
