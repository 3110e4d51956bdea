"""The collectives, one class each: the arrays that a rank offers, how data move, and the result."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, CudaBackend, backend_of
from spmd_engine.arrays.memory import address_of
from spmd_engine.arrays.precision import accumulated_in, is_half
from spmd_engine.comm.agreement.call_agreement import Agreed
from spmd_engine.comm.agreement.signature import Signature, Signatures, number_of
from spmd_engine.comm.agreement.tree import Inline
from spmd_engine.comm.blocks import Reducer, joined, reducer, reducible, span, spans
from spmd_engine.comm.calls import Collective, Offer, PreparedCall, Shape, copied
from spmd_engine.comm.dispatch import Routing
from spmd_engine.comm.pending import Queued, Steps
from spmd_engine.comm.shared_memory.cross_memory import flat
from spmd_engine.comm.transports.nccl import NcclTransport
from spmd_engine.comm.transports.shared_memory import (
    keeps_apart,
    readable_result,
    readable_with_result,
    reduce_in_pieces,
)
from spmd_engine.comm.transports.transport import Transport
from spmd_engine.errors import UsageError


class BroadcastCall(PreparedCall):
    """``Group.broadcast``. ``out``: the backend of the result; None: the host's."""

    @classmethod
    def of(cls, group: Routing, root_array: Array | None, root: int, on_device: bool, label: str) -> BroadcastCall:
        """``root_array``: None on the other ranks; ``on_device``: whether this rank's result will be.

        Raises UsageError for a wrong root, or if the root has no array.
        """
        if not 0 <= root < group.size:
            raise UsageError(f"broadcast over {group.axes!r}: root {root} is not one of {group.size} ranks")
        if group.rank == root and root_array is None:
            raise UsageError(f"broadcast over {group.axes!r}: the root must pass an array")

        def sent(result: Array) -> int:  # the root scatters parts, then all ranks gather them
            mine = span(result.size, group.size, group.rank)
            part = (mine.stop - mine.start) * result.itemsize
            return result.nbytes - part + part * (group.size - 1) if group.rank == root else part * (group.size - 2)

        fields = {} if group.rank == root else {"host": not on_device}
        where = "broadcast", group.axes, label
        signature = group.signature("broadcast", root_array, root=root, **fields)
        payload, dtype = (root_array.nbytes, root_array.dtype) if root_array is not None else (0, None)
        return cls(signature, where, payload=payload, sent=sent, dtype=dtype)

    def finish(self, signatures: Signatures | None, blocks: Sequence[Any], out: Any) -> Array:
        return blocks[self.signature.root].copy()

    def steps(self, routing: Routing, number: int, root_array: Array | None, home: Backend | None) -> Steps:
        """The agreement carries the description of the root's array, and the array itself if it is small."""
        home, offered = home or CPU, None
        if root_array is not None:
            root_array = yield from routing.ready(root_array)
            offered = self.readable(routing, root_array)
        agreed = yield from routing.agreement.reach(self.signature, self.expected, number, root_array, offered)
        self.expect(agreed.entries)
        shape, dtype = agreed.root.array_type
        transport = self.transport(routing, number, agreed, prod(shape) * dtype.itemsize)
        if isinstance(transport, NcclTransport):
            data = root_array.copy() if root_array is not None else home.empty(shape, dtype)
            move = partial(transport.broadcast, data.reshape(-1), self.signature.root)
            return Queued(data, home, (yield from transport.nccl.queue(self.queued(routing, number), move)))
        if root_array is not None and not routing.is_for_messages(root_array):  # others want the result on the host
            root_array = yield from routing.staged(root_array)
        if transport is None and agreed.answer is not None:
            data = agreed.answer.copy().view(dtype).reshape(shape)
        elif transport is None or transport.blocks:
            data = self.finish(None, agreed.blocks if transport is None else transport.blocks, None)
        else:
            backend = home if routing.connections.device_aware and not agreed.host else CPU
            data = (backend if backend.on_device else routing.connections).empty(shape, dtype)
            if root_array is not None:
                data[...] = root_array
            yield from transport.broadcast(data.reshape(-1), self.signature.root)
        if transport is not None:
            yield from transport.end()
        if isinstance(home, CudaBackend) and isinstance(data, np.ndarray):
            data, event = home.start_from_host(data)
            return Queued(data, home, event)
        return data if home is CPU else home.asarray(data)


@dataclass(kw_only=True)
class Reducing(Collective):
    """The reduction of the arrays of all ranks, or of this rank's parts of them."""

    reduce: Reducer

    def between_nodes(self, routing: Routing) -> Inline:
        """Sums of consecutive ranks, or all arrays, if sums must have rank order."""
        wide, mean = accumulated_in(self.dtype), self.signature.reduction == "mean"
        reduce = reducer("sum" if mean else self.signature.reduction, wide, np)
        quiet = partial(np.errstate, all="ignore")  # an error, or a warning, would be that of one rank alone

        def total(arrays: Sequence[np.ndarray]) -> np.ndarray:
            if len(arrays) == 1 or len(set(map(np.size, arrays))) > 1:  # not all of them were sent inline
                return arrays[0]
            sums = np.empty_like(arrays[0])
            with quiet():
                reduce(sums, arrays)
            return sums

        def combine(rows: list[np.ndarray]) -> np.ndarray:
            return total([row.view(wide) for row in rows]).view(np.uint8)

        def answer(rows: np.ndarray) -> np.ndarray:
            arrays = rows.view(wide)
            if routing.in_rank_order:
                arrays = total(list(routing.by_rank(arrays.reshape(self.ranks, -1))))
            with quiet():
                return (arrays / wide.type(self.ranks) if mean else arrays).astype(self.dtype).view(np.uint8)

        def part(block: Any, rank: int) -> np.ndarray:
            return joined([flat(block)[each] for each in self.sent_between_nodes(routing, rank)], 0, self.dtype)

        splits = len(routing.senders) > 2 and self.parts
        places = self.places_between_nodes(routing, self.dtype.itemsize) if splits else None
        length = sum([each.stop - each.start for each in self.sent_between_nodes(routing, self.rank)])
        size = length * wide.itemsize * (self.ranks if routing.in_rank_order else 1)
        return Inline(wide, np.concatenate if routing.in_rank_order else combine, size, answer, places, part=part)

    @abstractmethod
    def sent_between_nodes(self, routing: Routing, rank: int) -> list[slice]:
        """The parts of a flat array that travel with the agreement: see ``Inline.part``."""

    def finish(self, signatures: Signatures | None, blocks: Sequence[Any], out: Array | None) -> Array:
        """``out`` may be one of the blocks; otherwise it must not overlap any."""
        result: Array = np.empty(self.shape, self.dtype) if out is None else out
        if self.signature.inline or self.sliced:
            self.reduce(result, blocks)
        else:
            reduce_in_pieces([result.reshape(-1)], [flat(block) for block in blocks], self.reduce)
        return result


class AllReduceCall(Reducing):
    """``Group.all_reduce``. Each rank reduces a part of a large array, which the others then read."""

    one_phase = False

    @classmethod
    def of(cls, group: Routing, x: Array, op: str, label: str) -> AllReduceCall:
        """Raises UsageError if there is no such reduction."""
        operand = reducible("all_reduce", x, op)
        mine = span(operand.size, group.size, group.rank)
        part_bytes = (mine.stop - mine.start) * operand.itemsize
        fields = {"sent": operand.nbytes - part_bytes + part_bytes * (group.size - 1), "shape": operand.shape}
        fields |= {"reduce": group.reducer(operand, op), "rounds": is_half(operand.dtype)}
        fields["places"] = group.connections.split(operand.size)
        return cls.prepare(group, "all_reduce", operand, label, {"reduction": op}, **fields)

    def gathers(self, routing: Routing) -> bool:
        lanes, tuning = routing.connections.lanes, routing.connections.tuning
        if lanes is None or not self.signature.inline:
            return False
        size = self.payload // self.dtype.itemsize * accumulated_in(self.dtype).itemsize
        return self.payload >= tuning.hierarchical and size > tuning.inline_between(lanes.lane.size, lanes.local.size)

    def sent_between_nodes(self, routing: Routing, rank: int) -> list[slice]:
        if not self.gathers(routing):
            return [slice(0, prod(self.shape))]
        lane = [self.places[r] for r in routing.senders]  # adjacent
        return [slice(lane[0].start, lane[-1].stop)]

    def offer(self, routing: Routing, local: Array, target: Array | None) -> Offer:
        if target is not None and target is not local and not keeps_apart(target, local, (...,)):
            local = local.copy()
        node_table = routing.connections.node_table
        if node_table is not None and self.gathers(routing):
            return Offer(local, None, readable_result(node_table, local, target))
        table = routing.table_to_offer(self.signature, local, local.nbytes)
        if table is None:
            return Offer(local)
        copies = routing.one_node and local.nbytes <= routing.connections.tuning.copied
        offered, result = readable_with_result(table, local, target, copies)
        return Offer(local, offered, result)

    def move(self, transport: Transport, x: Array, result: Array, lengths: Sequence[int] | None) -> Steps:
        return transport.all_reduce(x.reshape(-1), result.reshape(-1), self.signature.reduction)


class ReduceScatterCall(Reducing):
    """``Group.reduce_scatter``."""

    @classmethod
    def of(cls, group: Routing, x: Array, axis: int, op: str, sizes: Shape | None, label: str) -> ReduceScatterCall:
        """``sizes``: lengths of the parts; None: even. Raises UsageError for a wrong ``op``, ``axis`` or ``sizes``."""
        operand = reducible("reduce_scatter", x, op)
        axis = _axis(group, "reduce_scatter", operand, axis)
        parts = _parts(group, "reduce_scatter", operand, axis, sizes)
        mine = operand[parts[group.rank]]
        signed = {"reduction": op, "axis": axis, "sizes": sizes or ()}
        fields = {"sent": operand.nbytes - mine.nbytes, "shape": mine.shape, "parts": parts}
        fields |= {"reduce": group.reducer(operand, op), "rounds": is_half(operand.dtype)}
        return cls.prepare(group, "reduce_scatter", operand, label, signed, **fields)

    def finish(self, signatures: Signatures | None, blocks: Sequence[Any], out: Array | None) -> Array:
        return super().finish(signatures, [block[self.parts[self.rank]] for block in blocks], out)

    def offer(self, routing: Routing, local: Array, target: Array | None) -> Offer:
        local = local if target is None or keeps_apart(target, local, self.parts[self.rank]) else local.copy()
        if routing.one_node:
            return Offer(local, self.readable(routing, local))
        offered = self.packed(local)
        return Offer(offered, self.readable(routing, offered))

    def sent_between_nodes(self, routing: Routing, rank: int) -> list[slice]:
        return [self.places[r] for r in (routing.senders if len(routing.senders) > 2 else [rank])]

    def move(self, transport: Transport, x: Array, result: Array, lengths: Sequence[int] | None) -> Steps:
        reduction = self.signature.reduction
        return transport.reduce_scatter(self.packed(x), self.places, result.reshape(-1), reduction)


class Joining(Collective):
    """A collective that joins blocks of all ranks along ``concat_axis``; it may first exchange their lengths."""

    def lengths(self, routing: Routing, number: int, agreed: Agreed) -> Steps:
        if agreed.alike:
            lengths = None
        elif agreed.signatures is not None:
            lengths = [signature.length_for(self.rank, self.ranks) for signature in agreed.signatures.by_rank]
        elif agreed.sizes_known and self.sizes is not None:
            return list(self.sizes)
        else:
            mine = [self.signature.length_for(r, self.ranks) for r in range(self.ranks)]
            lengths = yield from routing.numbers(number, mine)
        actual = lengths or self.even
        if self.sizes is not None and list(self.sizes) != actual:
            operation, argument = self.signature.operation, "received" if self.parts else "sizes"
            raise UsageError(f"{operation} over {self.where[1]!r}: {argument} {list(self.sizes)} should be {actual}")
        return lengths

    def shape_of(self, lengths: Sequence[int] | None) -> Shape:
        if lengths is None:
            return self.shape
        axis = self.signature.concat_axis
        return *self.shape[:axis], sum(lengths), *self.shape[axis + 1 :]

    def move(self, transport: Transport, x: Array, result: Array, lengths: Sequence[int] | None) -> Steps:
        axis, lengths = self.signature.concat_axis, lengths or self.even
        row = result.size // max(1, sum(lengths))
        places = spans([length * row for length in lengths])
        packed = backend_of(x).empty((result.size,), x.dtype) if axis else result.reshape(-1)
        yield from self.fill(transport, x, packed, places)
        for rows, place in zip(spans(lengths), places, strict=True) if axis else ():
            part = result[(slice(None),) * axis + (rows,)]
            part[...] = packed[place].reshape(part.shape)

    @abstractmethod
    def fill(self, transport: Transport, x: Array, packed: Array, places: list[slice]) -> Steps:
        """Move each rank's block to its place in ``packed``."""


class AllGatherCall(Joining):
    """``Group.all_gather``."""

    @classmethod
    def of(cls, group: Routing, x: Array, axis: int, sizes: Shape | None, label: str) -> AllGatherCall:
        """``sizes``: lengths of all ranks along ``axis``, if known. Raises UsageError for wrong arguments."""
        axis = _axis(group, "all_gather", x, axis)
        if sizes is not None and (len(sizes) != group.size or sizes[group.rank] != x.shape[axis]):
            raise UsageError(
                f"all_gather over {group.axes!r}: sizes {list(sizes)} must be {group.size} numbers; number "
                f"{group.rank} is {x.shape[axis]}, the length of this rank's array along axis {axis}"
            )
        even = [x.shape[axis]] * group.size
        shape = (*x.shape[:axis], sum(even), *x.shape[axis + 1 :])
        signed = {"axis": axis, "concat_axis": axis, "known": number_of(sizes) if sizes is not None else -1}
        fields = {"sent": x.nbytes * (group.size - 1), "shape": shape, "even": even, "sizes": sizes}
        return cls.prepare(group, "all_gather", x, label, signed, **fields)

    def finish(self, signatures: Signatures | None, blocks: Sequence[Any], out: Array | None) -> Array:
        out = np.empty(self.shape, self.dtype) if out is None and signatures is None else out
        return joined(blocks, self.signature.axis, self.dtype, out)

    def offer(self, routing: Routing, local: Array, target: Array | None) -> Offer:
        """On one node, offer the array; on several nodes, offer the result buffer with this rank's part in it."""
        lengths = list(self.sizes or self.even)
        shape = self.shape_of(lengths)
        if routing.one_node:
            offered = self.readable(routing, local)
            if target is not None and offered is local and np.may_share_memory(local, target):
                part = target[spans(lengths)[self.rank]] if target.shape == shape else target[:0]
                offered = local if part.size > 0 and address_of(part) == address_of(local) else local.copy()
            return Offer(local, offered)
        if self.signature.axis or routing.table_to_offer(self.signature, local, prod(shape) * local.itemsize) is None:
            return Offer(local)
        result = target if target is not None and target.shape == shape else backend_of(local).empty(shape, local.dtype)
        copied(local, result[spans(lengths)[self.rank]])
        return Offer(local, None, result)

    def between_nodes(self, routing: Routing) -> Inline:
        return Inline(self.dtype, keeps=True)

    def answered(self, routing: Routing, answer: np.ndarray, out: Array | None) -> Array:
        shape = self.signature.array_type[0]
        return self.finish(None, list(routing.by_rank(answer.reshape(self.ranks, *shape))), out)

    def fill(self, transport: Transport, x: Array, packed: Array, places: list[slice]) -> Steps:
        copied(x.reshape(-1), packed[places[self.rank]])
        return transport.all_gather(packed, places)


class AllToAllCall(Joining):
    """``Group.all_to_all``."""

    @classmethod
    def of(
        cls,
        group: Routing,
        x: Array,
        axis: int,
        concat_axis: int | None,
        splits: Shape | None,
        received: Shape | None,
        label: str,
    ) -> AllToAllCall:
        """``received``: lengths of the blocks that arrive, if known. Raises UsageError for wrong axes or lengths."""
        axis = _axis(group, "all_to_all", x, axis)
        concat = axis if concat_axis is None else _axis(group, "all_to_all", x, concat_axis)
        parts = _parts(group, "all_to_all", x, axis, splits)
        if received is not None and (len(received) != group.size or min(received) < 0):
            raise UsageError(f"all_to_all over {group.axes!r}: received {list(received)} must be {group.size} numbers")
        mine = x[parts[group.rank]]
        even = [mine.shape[concat]] * group.size
        known = 1 if received is not None else -1
        signed = {"axis": axis, "concat_axis": concat, "sizes": splits or (), "known": known}
        fields = {"sent": x.nbytes - mine.nbytes, "parts": parts, "sizes": received, "even": even}
        fields["shape"] = (*mine.shape[:concat], sum(even), *mine.shape[concat + 1 :])
        return cls.prepare(group, "all_to_all", x, label, signed, returns_lengths=splits is not None, **fields)

    def finish(self, signatures: Signatures | None, blocks: Sequence[Any], out: Array | None) -> Any:
        parts, concat = [self.parts[self.rank]] * self.ranks, self.signature.concat_axis
        if signatures is not None and not signatures.same:
            parts = [signature.part_for(self.rank, self.ranks) for signature in signatures.by_rank]
        received = [block[part] for block, part in zip(blocks, parts, strict=True)]
        out = np.empty(self.shape, self.dtype) if out is None and signatures is None else out
        y = joined(received, concat, self.dtype, out)
        return (y, [block.shape[concat] for block in received]) if self.returns_lengths else y

    def offer(self, routing: Routing, local: Array, target: Array | None) -> Offer:
        return Offer(local, self.readable(routing, local) if routing.one_node else None)

    def between_nodes(self, routing: Routing) -> Inline:
        ranks, (shape, dtype) = routing.senders, self.signature.array_type
        if len(ranks) == 2:
            return Inline(dtype, part=lambda block, rank: block[self.parts[rank]])

        def answer(rows: np.ndarray) -> np.ndarray:
            blocks = rows.view(dtype).reshape(self.ranks, *shape)
            return joined([blocks[:, *self.parts[r]].reshape(-1) for r in ranks], 0, dtype).view(np.uint8)

        places = self.places_between_nodes(routing, self.ranks * dtype.itemsize)
        return Inline(dtype, size=self.ranks * self.payload, answer=answer, places=places)

    def answered(self, routing: Routing, answer: np.ndarray, out: Array | None) -> Array:
        axis = self.signature.concat_axis
        blocks = answer.reshape(self.ranks, *self.shape[:axis], self.even[self.rank], *self.shape[axis + 1 :])
        out = np.empty(self.shape, self.dtype) if out is None else out
        return joined(list(routing.by_rank(blocks)), axis, self.dtype, out)

    def fill(self, transport: Transport, x: Array, packed: Array, places: list[slice]) -> Steps:
        sent = self.packed(x)
        copied(sent[self.places[self.rank]], packed[places[self.rank]])
        return transport.all_to_all(sent, self.places, packed, places)


#: Prepares a call: (group, array, *arguments of the operation, label) -> PreparedCall
PREPARE = {
    "barrier": lambda group, x, label: PreparedCall(Signature("barrier"), ("barrier", group.axes, label)),
    "broadcast": BroadcastCall.of,
    "all_reduce": AllReduceCall.of,
    "reduce_scatter": ReduceScatterCall.of,
    "all_gather": AllGatherCall.of,
    "all_to_all": AllToAllCall.of,
}


def _axis(group: Routing, operation: str, x: Array, axis: int) -> int:
    if not hasattr(axis, "__index__") or not -x.ndim <= axis < x.ndim:
        raise UsageError(f"{operation} over {group.axes!r}: axis {axis!r} of an array of shape {x.shape}")
    return int(axis % x.ndim)


def _parts(group: Routing, operation: str, x: Array, axis: int, sizes: Sequence[int] | None) -> list[tuple[slice, ...]]:
    """Index of each rank's part of ``x`` along ``axis``."""
    if sizes is None:
        parts = [span(x.shape[axis], group.size, r) for r in range(group.size)]
    else:
        if len(sizes) != group.size or sum(sizes) != x.shape[axis] or min(sizes) < 0:
            raise UsageError(
                f"{operation} over {group.axes!r}: sizes {list(sizes)} must be {group.size} numbers that "
                f"add up to {x.shape[axis]}, the array's length along axis {axis}"
            )
        parts = spans(sizes)
    return [(slice(None),) * axis + (part,) for part in parts]
