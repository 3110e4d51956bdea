"""The collectives, a class each: what is found out of a call before it is made, what ranks show each other, the result.

Of each there is one text: for calls that wait, in one step or several, and for those that are started; with ``out`` and
without; whichever transport moves the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.dissemination import Agreed
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.prepared_call import PreparedCall
from spmd_engine.comm.reducing import reducer, reducible
from spmd_engine.comm.signature import Signature, Signatures
from spmd_engine.comm.spans import joined, span, spans
from spmd_engine.comm.staging import copied, is_reachable, ready
from spmd_engine.comm.transports.shared_memory import keeps_apart, readable, readable_with_result
from spmd_engine.comm.transports.transport import Transport
from spmd_engine.errors import UsageError

if TYPE_CHECKING:
    from spmd_engine.comm.calls import Calls
    from spmd_engine.comm.routing import Routing

Shape = tuple[int, ...]
#: A rank's array as the others are to get it, what those of its node can read, and where its result is to come.
Offer = tuple[Array, Array | None, Array | None]


class Collective(PreparedCall):
    """A collective with an array; each rank has another, and the result comes to ``out`` if there is one."""

    __slots__ = ()

    @classmethod
    def prepare(cls, calls: Calls, operation: str, x: Array, label: str, told: dict[str, Any], **fields: Any) -> Self:
        """The call of ``x``, of which ranks are ``told`` this."""
        where = operation, calls.axes, label
        fields |= {"payload": x.nbytes, "dtype": x.dtype, "rank": calls.rank, "ranks": calls.size}
        call = cls(calls.signature_of(operation, x, **told), where, **fields)
        if call.parts is not None:
            call.places = spans([prod(shape) for shape in call.part_shapes()])
        return call

    def finish(self, found: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Any:
        """The result of everyone's arrays, where these came with the agreement; ``found``: None if all are the same."""
        raise NotImplementedError

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        """What this rank, with contiguous ``own``, offers to the others of its node; ``target``: ``out``, if usable."""
        raise NotImplementedError

    def shapes(self, routing: Routing, number: int, agreed: Agreed, own: Array) -> Steps:
        """Of what comes from each rank, where it is not reduced; raises UsageError if these are not as expected."""
        raise NotImplementedError

    def move(self, transport: Transport, number: int, x: Array, result: Array, shapes: list[Shape] | None) -> Steps:
        """Bring the result of ``x`` to ``result``. ``x`` is contiguous; ``shapes``: of what comes from each rank."""
        raise NotImplementedError

    def steps(self, routing: Routing, number: int, x: Array, out: Array | None) -> Steps:
        """Show, agree, ask for what is not known yet, and move: the whole of a collective, whatever it is."""
        own, home = ready(routing.comm, x)
        target = out if out is not None and is_reachable(routing.comm, out) else None
        given, shown, result = self.offer(routing, own, target)
        agreed = yield from routing.agreement.reach(self, number, given, shown, result)
        shapes, shape = None, self.shape
        if self.reduce is None and not (shape and agreed.alike and self.sizes is None):
            shapes = yield from self.shapes(routing, number, agreed, own)
            shape = _joined(shapes, self.signature.concat_axis)
        fits = out is None or out.shape == shape  # if not, this rank is still to give the others what is theirs
        target = target if fits else None
        if agreed.rows is not None:
            result = self.finish(agreed.met.signatures if routing.one_node else None, agreed.rows, target)
            result = result[0] if self.tells else result
        else:
            if result is None or result.shape != shape:
                result = target if target is not None else backend_of(own).empty(shape, own.dtype)
            size = agreed.most if self.signature.operation == "all_to_all" else max(self.payload, result.nbytes)
            transport = routing.transport(self, number, agreed, size)
            yield from self.move(transport, number, given, result, shapes or self.even_shapes())
            yield from transport.end()
        if not fits:
            raise UsageError(f"{self.signature.operation}: out has shape {out.shape}, the result {shape}")
        result = home(result) if out is None else copied(home(result), out)
        return self.told(result, shapes)

    def by_library(self, library: Transport, x: np.ndarray, out: np.ndarray | None) -> Any:
        """The result, where all ranks of a node call the same and wait: the MPI library makes it at once."""
        result = out if out is not None else np.empty(self.shape, self.dtype)
        for _ in self.move(library, 0, np.ascontiguousarray(x), result, self.even_shapes()):
            pass  # nothing is waited for but in the library
        return self.told(result, None)

    def told(self, result: Array, shapes: list[Shape] | None) -> Any:
        """What the caller gets; ``shapes`` of what came from each rank: None if these are the ``even_shapes``."""
        if not self.tells:
            return result
        return result, [each[self.signature.concat_axis] for each in shapes or self.even_shapes()]

    def even_shapes(self) -> list[Shape] | None:
        """``shapes`` where all ranks call the same."""

    def packed(self, x: Array) -> Array:
        """The parts of ``x``, each in one piece of flat memory, as the transports want them: at their ``places``."""
        if x.ndim == 1 or len(self.parts[0]) == 1:  # cut along the first axis, or packed before
            return x.reshape(-1)
        flat = backend_of(x).empty((x.size,), x.dtype)
        for part, place in zip(self.parts, self.places, strict=True):
            flat[place] = x[part].reshape(-1)
        return flat

    def part_shapes(self) -> list[Shape]:
        """Of the parts of this rank's array, which are cut along the last axis that their indices name."""
        shape, axis = self.signature.shape, len(self.parts[0]) - 1
        return [(*shape[:axis], part[axis].stop - part[axis].start, *shape[axis + 1 :]) for part in self.parts]

    def check_out(self, x: Array, out: Any, ranks: int) -> None:
        """Raise UsageError unless ``out`` can receive the result of a call of ``x``."""
        shape = x.shape if ranks == 1 else self.shape
        if out.shape != shape or not self._can_hold(out):
            wanted, given = f"{self.dtype}{list(shape)}", f"{out.dtype}{list(out.shape)}"
            raise UsageError(f"{self.signature.operation}: out must be contiguous, writable {wanted}, is {given}")

    def _can_hold(self, out: Array) -> bool:
        fits = out.dtype == self.dtype and out.flags.c_contiguous
        return fits and getattr(out.flags, "writeable", True)  # CuPy's arrays always are


class BroadcastCall(Collective):
    """See ``Group``; so are the others. ``out``: in whose memory the result is wanted; None: in the host's."""

    __slots__ = ()

    @classmethod
    def of(cls, calls: Calls, mine: Array | None, root: int, label: str) -> BroadcastCall:
        """``mine``: the root's array, None elsewhere."""
        if not 0 <= root < calls.size:
            raise UsageError(f"broadcast over {calls.axes!r}: root {root} is not one of {calls.size} ranks")
        if calls.rank == root and mine is None:
            raise UsageError(f"broadcast over {calls.axes!r}: the root must give an array")

        def sent(result: Array) -> int:  # the root hands out the parts, then everyone passes its part on
            own = span(result.size, calls.size, calls.rank)
            part = (own.stop - own.start) * result.itemsize
            return result.nbytes - part + part * (calls.size - 1) if calls.rank == root else part * (calls.size - 2)

        return cls(
            calls.signature_of("broadcast", mine, root=root),
            ("broadcast", calls.axes, label),
            payload=mine.nbytes if mine is not None else 0,
            sent=sent,
            dtype=mine.dtype if mine is not None else None,
        )

    def check_out(self, x: Array, out: Any, ranks: int) -> None:
        """Any will do."""

    def finish(self, found: Signatures | None, blocks: Sequence[Array | None], out: Any) -> Array:
        return blocks[self.signature.root].copy()

    def steps(self, routing: Routing, number: int, mine: Array | None, home: Backend | None) -> Steps:
        """The description of the root's array, and the array itself if it is small, come with the agreement."""
        shown, home, comm = None, home or CPU, routing.comm
        mine = ready(comm, mine)[0] if mine is not None else None
        if routing.one_node and mine is not None and routing.shows(self, mine, mine.nbytes):
            shown = readable(routing.node_table, mine, comm.tuning)
        agreed = yield from routing.agreement.reach(self, number, mine, shown)
        if agreed.rows is not None:
            return home.asarray(self.finish(None, agreed.rows, None))
        where = home if comm.device_aware and not agreed.host else CPU
        data = mine.copy() if mine is not None else where.empty(*agreed.root.array_type)
        transport = routing.transport(self, number, agreed, data.nbytes)
        yield from transport.broadcast(number, data.reshape(-1), self.signature.root)
        yield from transport.end()
        return home.asarray(data)


class BarrierCall(Collective):
    """Nothing but to meet."""

    __slots__ = ()
    steps = PreparedCall.steps

    @classmethod
    def of(cls, calls: Calls, x: None, label: str) -> BarrierCall:
        """Nothing can be wrong with it."""
        return cls(Signature("barrier"), ("barrier", calls.axes, label))

    def finish(self, found: Signatures | None, blocks: Sequence[None], out: None) -> None:
        """There is no result."""


class AllReduceCall(Collective):
    """Everyone's array, reduced."""

    __slots__ = ()

    @classmethod
    def of(cls, calls: Calls, x: Array, op: str, label: str) -> AllReduceCall:
        """Raises UsageError if it cannot be made; so do the others."""
        own = reducible("all_reduce", x, op)
        mine = span(own.size, calls.size, calls.rank)
        part = (mine.stop - mine.start) * own.itemsize
        reduce = reducer(op, own.dtype, backend_of(own).xp if is_reachable(calls.comm, own) else np)
        sent = own.nbytes - part + part * (calls.size - 1)
        told = {"reduction": op}
        return cls.prepare(calls, "all_reduce", own, label, told, sent=sent, shape=own.shape, reduce=reduce)

    def finish(self, found: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Array:
        """``out`` may be one of the blocks, else it overlaps none."""
        out = np.empty(self.shape, self.dtype) if out is None else out
        self.reduce(out, blocks)
        return out

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        own = own if target is None or keeps_apart(target, own, (...,)) else own.copy()
        if not routing.shows(self, own, own.nbytes):
            return own, None, None
        shown, result = readable_with_result(routing.node_table, own, target)
        return own if shown is None else shown, shown, result

    def move(self, transport: Transport, number: int, x: Array, result: Array, shapes: None) -> Steps:
        return transport.all_reduce(number, x.reshape(-1), result.reshape(-1), self.signature.reduction)


class ReduceScatterCall(Collective):
    """A part for each rank of what everyone's array is reduced to."""

    __slots__ = ()

    @classmethod
    def of(cls, calls: Calls, x: Array, axis: int, op: str, sizes: Shape | None, label: str) -> ReduceScatterCall:
        """``sizes``: of the parts; None: even ones."""
        own = reducible("reduce_scatter", x, op)
        axis = _axis(calls, "reduce_scatter", own, axis)
        parts = _parts(calls, "reduce_scatter", own, axis, sizes)
        mine = own[parts[calls.rank]]
        reduce = reducer(op, own.dtype, backend_of(own).xp if is_reachable(calls.comm, own) else np)
        told, sent = {"reduction": op, "axis": axis, "sizes": sizes or ()}, own.nbytes - mine.nbytes
        how = {"sent": sent, "shape": mine.shape, "parts": parts, "reduce": reduce}
        return cls.prepare(calls, "reduce_scatter", own, label, told, **how)

    def finish(self, found: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Array:
        return AllReduceCall.finish(self, found, [block[self.parts[self.rank]] for block in blocks], out)

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        own = own if target is None or keeps_apart(target, own, self.parts[self.rank]) else own.copy()
        flat = own if self.signature.inline else self.packed(own)
        shows = routing.shows(self, own, own.nbytes)
        return flat, readable(routing.node_table, flat, routing.comm.tuning) if shows else None, None

    def move(self, transport: Transport, number: int, x: Array, result: Array, shapes: None) -> Steps:
        reduction = self.signature.reduction
        return transport.reduce_scatter(number, self.packed(x), self.places, result.reshape(-1), reduction)


class Joining(Collective):
    """What comes from each rank is joined along an axis, ``concat_axis``; how long it is, others may have to tell."""

    __slots__ = ()

    def check_out(self, x: Array, out: Any, ranks: int) -> None:
        told, operation = self.signature, self.signature.operation
        gathers = operation == "all_gather"
        if not self._can_hold(out) or told.concat_axis:
            how = "axis 0" if gathers else "what comes be joined along axis 0"
            raise UsageError(f"{operation}: out must be a contiguous, writable array of {self.dtype}, and {how}")
        if not gathers and isinstance(x, np.ndarray) and np.may_share_memory(x, out):
            raise UsageError("all_to_all: out must not share memory with what is sent")
        if ranks == 1:
            super().check_out(x, out, ranks)

    def check_sizes(self, routing: Routing, lengths: Sequence[int]) -> None:
        """Raise UsageError if the caller has said other ``sizes``."""
        if self.sizes is not None and list(self.sizes) != list(lengths):
            operation, what = self.signature.operation, "received" if self.parts else "sizes"
            raise UsageError(f"{operation} over {self.where[1]!r}: {what} {list(self.sizes)} should be {list(lengths)}")

    def put(self, result: Array, flat: Array, places: Sequence[slice], shapes: list[Shape]) -> None:
        """Write the blocks that lie at these ``places`` of ``flat`` one after the other, if they are not so yet."""
        axis = self.signature.concat_axis
        if axis:
            for cut, place, shape in zip(spans([each[axis] for each in shapes]), places, shapes, strict=True):
                result[(slice(None),) * axis + (cut,)] = flat[place].reshape(shape)


class AllGatherCall(Joining):
    """Everyone's array, joined."""

    __slots__ = ()

    @classmethod
    def of(cls, calls: Calls, x: Array, axis: int, sizes: Shape | None, label: str) -> AllGatherCall:
        """``sizes``: of all ranks along ``axis``, if this one knows."""
        axis = _axis(calls, "all_gather", x, axis)
        if sizes is not None and (len(sizes) != calls.size or sizes[calls.rank] != x.shape[axis]):
            raise UsageError(
                f"all_gather over {calls.axes!r}: sizes {list(sizes)} must be {calls.size} numbers; number "
                f"{calls.rank} is {x.shape[axis]}, the length of this rank's array along axis {axis}"
            )
        shape = (x.shape[0] * calls.size, *x.shape[1:]) if axis == 0 else ()  # elsewhere, no out will do
        told, sent = {"axis": axis, "concat_axis": axis}, x.nbytes * (calls.size - 1)
        return cls.prepare(calls, "all_gather", x, label, told, sent=sent, shape=shape, sizes=sizes)

    def finish(self, found: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Array:
        return joined(blocks, self.signature.axis, self.dtype, out)

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        """Ranks of one node show their arrays; where there are several nodes, the result, with their part in it."""
        shown = result = None
        lengths = self._lengths(self.sizes)
        if routing.one_node and routing.shows(self, own, own.nbytes):
            shown = readable(routing.node_table, own, routing.comm.tuning)
            if target is not None and shown is own and np.may_share_memory(own, target):
                shown = own if self._is_in_place(own, target, lengths) else own.copy()
        elif self.signature.axis == 0 and routing.shows(self, own, prod(own.shape[1:]) * own.itemsize * sum(lengths)):
            shape = _joined(self._shapes(lengths), 0)
            fits = target is not None and target.shape == shape
            result = target if fits else backend_of(own).empty(shape, own.dtype)
            copied(own, result[spans(lengths)[self.rank]])
        return own, shown, result

    def shapes(self, routing: Routing, number: int, agreed: Agreed, own: Array) -> Steps:
        axis, length = self.signature.axis, own.shape[self.signature.axis]
        if routing.one_node:
            lengths = [each.shape[axis] for each in agreed.met.signatures.by_rank]
        elif agreed.sizes_known and not agreed.alike:
            lengths = self.sizes
        else:
            told = [length] * self.ranks
            lengths = told if agreed.alike else (yield from routing.numbers(number, told))
        self.check_sizes(routing, lengths)
        return self._shapes(lengths)

    def even_shapes(self) -> list[Shape]:
        return self._shapes(self._lengths(None))

    def move(self, transport: Transport, number: int, x: Array, result: Array, shapes: list[Shape]) -> Steps:
        in_order = backend_of(x).empty((result.size,), x.dtype) if self.signature.axis else result
        flat, places = in_order.reshape(-1), spans([prod(each) for each in shapes])
        copied(x.reshape(-1), flat[places[self.rank]])
        yield from transport.all_gather(number, flat, places)
        self.put(result, flat, places, shapes)

    def _lengths(self, sizes: Sequence[int] | None) -> Sequence[int]:
        """``sizes``, or what one may expect where they are not known."""
        return [self.signature.shape[self.signature.axis]] * self.ranks if sizes is None else sizes

    def _shapes(self, lengths: Sequence[int]) -> list[Shape]:
        shape, axis = self.signature.shape, self.signature.axis
        return [(*shape[:axis], length, *shape[axis + 1 :]) for length in lengths]

    def _is_in_place(self, own: np.ndarray, out: np.ndarray, lengths: Sequence[int]) -> bool:
        """Whether ``own`` is this rank's part of ``out``."""
        part = out[spans(lengths)[self.rank]] if out.shape[0] == sum(lengths) else out[:0]
        return part.size > 0 and address_of(part) == address_of(own)


class AllToAllCall(Joining):
    """A part for each rank, from everyone."""

    __slots__ = ()

    @classmethod
    def of(
        cls,
        calls: Calls,
        x: Array,
        axis: int,
        concat_axis: int | None,
        splits: Shape | None,
        received: Shape | None,
        label: str,
    ) -> AllToAllCall:
        """``received``: how long what comes from each rank is, if this one knows."""
        axis = _axis(calls, "all_to_all", x, axis)
        concat = axis if concat_axis is None else _axis(calls, "all_to_all", x, concat_axis)
        parts = _parts(calls, "all_to_all", x, axis, splits)
        if received is not None and (len(received) != calls.size or min(received) < 0):
            raise UsageError(f"all_to_all over {calls.axes!r}: received {list(received)} must be {calls.size} numbers")
        shape, mine = list(x.shape), parts[calls.rank][-1]
        shape[axis] = mine.stop - mine.start
        shape[concat] *= calls.size
        told = {"axis": axis, "concat_axis": concat, "sizes": splits or ()}
        how = {"parts": parts, "sizes": received, "tells": splits is not None}
        how |= {"sent": x.nbytes - x[parts[calls.rank]].nbytes, "shape": tuple(shape) if concat == 0 else ()}
        return cls.prepare(calls, "all_to_all", x, label, told, **how)

    def finish(self, found: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Any:
        cuts, concat = [self.parts[self.rank]] * self.ranks, self.signature.concat_axis
        if found is not None and not found.same:
            cuts = [(*self.parts[0][:-1], each.part_for(self.rank, self.ranks)) for each in found.by_rank]
        came = [block[cut] for block, cut in zip(blocks, cuts, strict=True)]
        y = joined(came, concat, self.dtype, out)
        return (y, [each.shape[concat] for each in came]) if self.tells else y

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        flat = own if self.signature.inline else self.packed(own)
        shows = routing.one_node and routing.shows(self, own, own.nbytes)
        return flat, readable(routing.node_table, flat, routing.comm.tuning) if shows else None, None

    def shapes(self, routing: Routing, number: int, agreed: Agreed, own: Array) -> Steps:
        axis, concat = self.signature.axis, self.signature.concat_axis
        if routing.one_node:
            shapes = [each.shape_for(self.rank, self.ranks) for each in agreed.met.signatures.by_rank]
            self.check_sizes(routing, [shape[concat] for shape in shapes])
            return shapes
        sent = self.part_shapes()
        if agreed.alike:
            return self.even_shapes()
        comes = self.sizes
        if not agreed.sizes_known:
            comes = yield from routing.numbers(number, [shape[concat] for shape in sent])
            self.check_sizes(routing, comes)
        shapes = [(*own.shape[:concat], length, *own.shape[concat + 1 :]) for length in comes]
        if axis != concat:
            here = sent[self.rank][axis]
            shapes = [(*shape[:axis], here, *shape[axis + 1 :]) for shape in shapes]
        return shapes

    def even_shapes(self) -> list[Shape]:
        return [self.signature.shape_for(self.rank, self.ranks)] * self.ranks

    def move(self, transport: Transport, number: int, x: Array, result: Array, shapes: list[Shape]) -> Steps:
        flat, parts = self.packed(x), self.places
        comes = backend_of(x).empty((result.size,), x.dtype) if self.signature.concat_axis else result.reshape(-1)
        places = spans([prod(shape) for shape in shapes])
        copied(flat[parts[self.rank]], comes[places[self.rank]])
        yield from transport.all_to_all(number, flat, parts, comes, places)
        self.put(result, comes, places, shapes)


PREPARE = {
    "barrier": BarrierCall.of,
    "broadcast": BroadcastCall.of,
    "all_reduce": AllReduceCall.of,
    "reduce_scatter": ReduceScatterCall.of,
    "all_gather": AllGatherCall.of,
    "all_to_all": AllToAllCall.of,
}


def _joined(shapes: Sequence[Shape], axis: int) -> Shape:
    """The shape of arrays of these shapes, one after the other along ``axis``."""
    return *shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :]


def _axis(calls: Calls, operation: str, x: Array, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise UsageError(f"{operation} over {calls.axes!r}: axis {axis} of an array of shape {x.shape}")
    return axis % x.ndim


def _parts(calls: Calls, operation: str, x: Array, axis: int, sizes: Sequence[int] | None) -> list[tuple[slice, ...]]:
    """Index of each rank's part of ``x`` along ``axis``."""
    if sizes is None:
        cuts = [span(x.shape[axis], calls.size, r) for r in range(calls.size)]
    else:
        if len(sizes) != calls.size or sum(sizes) != x.shape[axis] or min(sizes) < 0:
            raise UsageError(
                f"{operation} over {calls.axes!r}: sizes {list(sizes)} must be {calls.size} numbers that "
                f"add up to {x.shape[axis]}, the array's length along axis {axis}"
            )
        cuts = spans(sizes)
    return [(slice(None),) * axis + (cut,) for cut in cuts]
