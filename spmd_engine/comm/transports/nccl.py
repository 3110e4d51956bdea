"""Transport by NCCL, of arrays on devices: see ``nccl_ranks``.

NCCL sums in an order of its own, which depends on its version and on the links between devices, in the dtype of the
arrays. Sums of 16-bit floats, sums in rank order, and reductions that NCCL lacks are therefore exchanges of parts, and
sums of these on the device, as in ``Transport``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.transports.transport import AgreedCall, Facts, Parts, Transport

#: Names of the dtypes that NCCL reduces; a complex number is two floats, which it can only add.
_NAMES = {"i1": "INT8", "u1": "UINT8", "i4": "INT32", "u4": "UINT32", "i8": "INT64", "u8": "UINT64"}
_NAMES |= {"b1": "UINT8", "f4": "FLOAT32", "f8": "FLOAT64", "c8": "FLOAT32", "c16": "FLOAT64"}
_REDUCTIONS = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN", "prod": "PROD"}
_FLOATS = {"c": 2}  # in an element, by the kind of its dtype


class NcclTransport(Transport):
    """See ``Transport``. ``nccl.queue`` runs its methods; they never wait."""

    name = "NCCL"
    keeps_call_order = True

    @staticmethod
    def suits(call: Signature, facts: Facts) -> bool:
        return facts.nccl

    def __init__(self, call: AgreedCall) -> None:
        super().__init__(call)
        assert call.connections.nccl is not None
        self.nccl, self._in_rank_order = call.connections.nccl, call.facts.in_rank_order

    def all_gather(self, x: Array, parts: Parts) -> Steps:
        mine = x[parts[self.rank]]
        with self._group() as (comm, dtype, stream):
            if _are_even(parts):
                comm.allGather(mine.data.ptr, x.data.ptr, mine.nbytes, dtype("UINT8"), stream)
            for root, part in enumerate([] if _are_even(parts) else parts):
                if (block := x[part]).size:
                    comm.broadcast(block.data.ptr, block.data.ptr, block.nbytes, dtype("UINT8"), root, stream)
        yield from ()

    def all_to_all(self, x: Array, parts: Parts, out: Array, out_parts: Parts) -> Steps:
        with self._group() as (comm, dtype, stream):
            for step in range(1, self.size):
                to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
                if (block := x[parts[to]]).size:
                    comm.send(block.data.ptr, block.nbytes, dtype("UINT8"), to, stream)
                if (block := out[out_parts[source]]).size:
                    comm.recv(block.data.ptr, block.nbytes, dtype("UINT8"), source, stream)
        yield from ()

    def broadcast(self, x: Array, root: int) -> Steps:
        with self._group() as (comm, dtype, stream):
            if x.size:
                comm.broadcast(x.data.ptr, x.data.ptr, x.nbytes, dtype("UINT8"), root, stream)
        yield from ()

    def all_reduce(self, x: Array, out: Array, reduction: str) -> Steps:
        kind = self._kind(x, reduction)
        if kind is None:
            yield from super().all_reduce(x, out, reduction)
        elif x.size:
            with self._group() as (comm, constant, stream):
                how = constant(kind), constant(_REDUCTIONS[reduction]), stream
                comm.allReduce(x.data.ptr, out.data.ptr, x.size * _FLOATS.get(x.dtype.kind, 1), *how)
            self._divide(out, reduction)

    def reduce_scatter(self, x: Array, parts: Parts, out: Array, reduction: str) -> Steps:
        kind = self._kind(x, reduction)
        if kind is None:
            yield from super().reduce_scatter(x, parts, out, reduction)
            return
        floats = _FLOATS.get(x.dtype.kind, 1)
        with self._group() as (comm, constant, stream):
            how = constant(kind), constant(_REDUCTIONS[reduction])
            if _are_even(parts):
                comm.reduceScatter(x.data.ptr, out.data.ptr, out.size * floats, *how, stream)
            for root, part in enumerate([] if _are_even(parts) else parts):
                if (block := x[part]).size:
                    target = out if root == self.rank else block
                    comm.reduce(block.data.ptr, target.data.ptr, block.size * floats, *how, root, stream)
        self._divide(out, reduction)

    def _kind(self, x: Array, reduction: str) -> str | None:
        """NCCL's name of the dtype; None if the parts are exchanged instead, and reduced in rank order."""
        kind = x.dtype.kind
        lacks = kind == "c" and reduction not in ("sum", "mean")
        return None if self._in_rank_order or lacks else _NAMES.get(f"{kind}{x.itemsize}")

    def _divide(self, out: Array, reduction: str) -> None:
        if reduction == "mean" and out.size:
            out /= out.dtype.type(self.size)

    @contextmanager
    def _group(self) -> Iterator[tuple[Any, Callable[[str], int], int]]:
        """NCCL's communicator, its constants, and the stream; the calls inside start together."""
        ranks = self.nccl
        ranks.library.groupStart()
        try:
            yield ranks.communicator, lambda name: int(getattr(ranks.library, f"NCCL_{name}")), ranks.stream.ptr
        finally:
            ranks.library.groupEnd()


def _are_even(parts: Parts) -> bool:
    """Whether all parts have the same length, not 0."""
    lengths = {part.stop - part.start for part in parts}
    return len(lengths) == 1 and 0 not in lengths
