"""The collectives, a class each: what is found out of a call before it is made, what ranks show each other, the result.

Of each there is one text: for calls that wait, in one step or several, and for those that are started; with ``out`` and
without; whichever transport moves the data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.agreement.signature import Signature, Signatures, number_of
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.reducing import Reducer, reducer, reducible
from spmd_engine.comm.shared_memory.cross_memory import Block, flat
from spmd_engine.comm.spans import joined, span, spans
from spmd_engine.comm.staging import copied, is_reachable, ready
from spmd_engine.comm.transports.shared_memory import keeps_apart, readable_with_result, reduce_in_pieces
from spmd_engine.comm.transports.transport import Transport
from spmd_engine.errors import UsageError

if TYPE_CHECKING:
    from spmd_engine.comm.agreement.call_agreement import Agreed
    from spmd_engine.comm.calls import Calls
    from spmd_engine.comm.routing import Routing
    from spmd_engine.comm.shared_memory.slot_table import SlotTable

Shape = tuple[int, ...]
#: A rank's array as the others are to get it, what those of its node can read, and where its result is to come.
Offer = tuple[Array, Array | None, Array | None]


@dataclass
class PreparedCall:
    """All of a call that does not depend on the values in its array, as a group keeps it for the next one like it.

    As it is, that of a barrier, and of what has no result: a text brought to the others, a message.
    """

    signature: Signature
    where: tuple[str, str, str]  # operation, axes and label, as the ledger has them
    payload: int = 0  # bytes
    sent: int | Callable[[Array], int] = 0  # bytes; a function of the result, where that must be known
    shape: tuple[int, ...] = ()  # of the result, if all ranks call the same
    dtype: Any = None  # what the array is cast to first
    parts: list[tuple[slice, ...]] | None = None  # of the array, by rank
    places: list[slice] | None = None  # of these parts, one after the other in flat memory
    even: list[int] | None = None  # lengths of what is joined, by rank, if all ranks call the same
    sizes: Sequence[int] | None = None  # these lengths, as the caller says
    tells: bool = False  # whether an all_to_all returns, besides, how much came from each rank
    reduce: Reducer | None = None
    expected: Signatures | None = None  # everyone's on the node, last time
    spins: bool = False  # whether who waits for it spins, with an array that needs no cast
    at_once: bool = False  # whether it does, and the call is finished when all have come
    rank: int = 0  # of the group, that calls
    ranks: int = 1
    text: int = 0  # the number of what it is, see ``Activity.called``; 0: not asked for yet
    one_phase: ClassVar[bool] = True  # whether ranks that can read everyone's array ``finish`` it, of any size

    def steps(self, routing: Routing, number: int, x: Array | None, out: Any) -> Steps:
        """All of call ``number``, a generator (see ``pending``)."""
        yield from routing.agreement.reach(self, number, x)

    def finish(self, found: Signatures | None, blocks: Sequence[Block], out: Any) -> Any:
        """The result of everyone's arrays, which came with the signatures, or lie where this rank can read them; it
        comes to ``out``, if there is one. ``found``: all signatures, unless they are the same."""

    def check_out(self, x: Array, out: Any, ranks: int) -> None:
        """Raise UsageError unless ``out`` can receive the result of a call of ``x``."""

    def expect(self, found: Signatures) -> None:
        """The next such call will probably find these on the table."""
        self.expected = found
        self.at_once = self.spins and (self.one_phase or found.inline_all)

    @property
    def sliced(self) -> bool:
        """Whether arrays are cut, and not along their first axis."""
        return self.parts is not None and len(self.parts[0]) > 1

    def lies_ready(self, x: np.ndarray, out: Array | None, table: SlotTable) -> bool:
        """Whether ``x`` can be shown to the others, as it is, until they have read it."""
        apart = out is None or not np.may_share_memory(x, out)
        return apart and x.flags.c_contiguous and table.address(x, self.sliced) is not None

    def record(self, ledger: Ledger, result: Any, seconds: float | None = None) -> None:
        """Enter one such call, with this ``result``, in the ledger; ``seconds``: of the one wait for it."""
        sent = self.sent if type(self.sent) is int else self.sent(result)
        ledger.record(self.where, self.payload, sent, seconds)

    def suits(self, x: Array | None, out: Array | None, table: SlotTable) -> bool:
        """Whether it can be made at once: the others can read ``x`` where it is, and ``out`` be written to."""
        if not (self.expected.inline_all or x is None or self.lies_ready(x, out, table)):
            return False
        return out is None or (
            self.expected.same
            and type(out) is np.ndarray
            and out.shape == self.shape
            and self.signature.concat_axis == 0
            and out.dtype is self.dtype
            and out.flags.carray  # contiguous, and can be written to
        )


class Collective(PreparedCall, ABC):
    """A collective in which each rank has an array, and the result comes to ``out`` if there is one."""

    @classmethod
    def prepare(cls, calls: Calls, operation: str, x: Array, label: str, told: dict[str, Any], **fields: Any) -> Self:
        """The call of ``x``, of which ranks are ``told`` this."""
        where = operation, calls.axes, label
        fields |= {"payload": x.nbytes, "dtype": x.dtype, "rank": calls.rank, "ranks": calls.size}
        call = cls(calls.signature_of(operation, x, **told), where, **fields)
        if call.parts is not None:
            row = x.size // max(1, x.shape[call.signature.axis])
            call.places = [slice(part[-1].start * row, part[-1].stop * row) for part in call.parts]
        return call

    @abstractmethod
    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        """What this rank, with contiguous ``own``, offers to the others of its node; ``target``: ``out``, if usable."""

    @abstractmethod
    def move(self, transport: Transport, x: Array, result: Array, lengths: list[int] | None) -> Steps:
        """Bring the result of ``x`` to ``result``. ``x`` is contiguous; ``lengths``: of what comes from each rank."""

    def lengths(self, routing: Routing, number: int, agreed: Agreed) -> Steps:
        """How long what comes from each rank is, where it is joined and not all ranks call the same.

        Raises UsageError if that is not as expected.
        """
        yield from ()

    def shape_of(self, lengths: list[int] | None) -> Shape:
        """The result's."""
        return self.shape

    def steps(self, routing: Routing, number: int, x: Array, out: Array | None) -> Steps:
        """Show, agree, ask for what is not known yet, and move: the whole of a collective, whatever it is."""
        own, home = ready(routing.comm, x)
        target = out if out is not None and is_reachable(routing.comm, out) else None
        given, shown, result = self.offer(routing, own, target)
        agreed = yield from routing.agreement.reach(self, number, given, shown, result)
        lengths = yield from self.lengths(routing, number, agreed)
        shape = self.shape_of(lengths)
        fits = out is None or out.shape == shape  # if not, this rank is still to give the others what is theirs
        target = target if fits else None
        blocks, end = agreed.rows, ()
        if blocks is None:
            came = prod(shape) * own.itemsize
            size = agreed.most if self.signature.operation == "all_to_all" else max(self.payload, came)
            transport = routing.transport(self, number, agreed, size)
            blocks, end = transport.blocks if self.one_phase else None, transport.end()
        if blocks is not None:
            result = self.finish(agreed.met.signatures if routing.one_node else None, blocks, target)
            result = result[0] if self.tells else result
        else:
            if result is None or result.shape != shape:
                result = target if target is not None else backend_of(own).empty(shape, own.dtype)
            yield from self.move(transport, given, result, lengths)
        yield from end
        if not fits:
            raise UsageError(f"{self.signature.operation}: out has shape {out.shape}, the result {shape}")
        result = home(result) if out is None else copied(home(result), out)
        return (result, lengths or list(self.even)) if self.tells else result

    def packed(self, x: Array) -> Array:
        """The parts of ``x``, each in one piece of flat memory, as the transports want them: at their ``places``."""
        if x.ndim == 1 or not self.sliced:  # or packed before
            return x.reshape(-1)
        flat = backend_of(x).empty((x.size,), x.dtype)
        for part, place in zip(self.parts, self.places, strict=True):
            flat[place] = x[part].reshape(-1)
        return flat

    def check_out(self, x: Array, out: Any, ranks: int) -> None:
        shape, joins = x.shape if ranks == 1 else self.shape, self.even is not None
        fits = out.dtype == self.dtype and out.flags.c_contiguous
        fits = fits and getattr(out.flags, "writeable", True)  # CuPy's arrays always are
        # What is joined may be of another length than expected; then that is known, and looked at, later.
        if not fits or self.signature.concat_axis or (out.shape != shape and (ranks == 1 or not joins)):
            wanted, given = f"{self.dtype}{list(shape)}", f"{out.dtype}{list(out.shape)}"
            how = ", joined along axis 0" if joins else ""
            raise UsageError(f"{self.signature.operation}: out must be contiguous, writable {wanted}{how}, is {given}")
        if joins and self.parts and isinstance(x, np.ndarray) and np.may_share_memory(x, out):
            raise UsageError("all_to_all: out must not share memory with what is sent")


class BroadcastCall(PreparedCall):
    """See ``Group``; so are the others. ``out``: in whose memory the result is wanted; None: in the host's."""

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

        signature, where = calls.signature_of("broadcast", mine, root=int(root)), ("broadcast", calls.axes, label)
        payload, dtype = (mine.nbytes, mine.dtype) if mine is not None else (0, None)
        return cls(signature, where, payload=payload, sent=sent, dtype=dtype)

    def finish(self, found: Signatures | None, blocks: Sequence[Block | None], out: Any) -> Array:
        return blocks[self.signature.root].copy()

    def steps(self, routing: Routing, number: int, mine: Array | None, home: Backend | None) -> Steps:
        """The description of the root's array, and the array itself if it is small, come with the agreement."""
        shown, home, comm = None, home or CPU, routing.comm
        mine = ready(comm, mine)[0] if mine is not None else None
        if routing.one_node and mine is not None:
            shown = routing.readable(self, mine)
        agreed = yield from routing.agreement.reach(self, number, mine, shown)
        if agreed.rows is not None:
            return home.asarray(self.finish(None, agreed.rows, None))
        where = home if comm.device_aware and not agreed.host else CPU
        shape, dtype = agreed.root.array_type
        transport = routing.transport(self, number, agreed, prod(shape) * dtype.itemsize)
        if transport.blocks is not None:
            data = self.finish(None, transport.blocks, None)
        else:
            data = mine.copy() if mine is not None else where.empty(shape, dtype)
            yield from transport.broadcast(data.reshape(-1), self.signature.root)
        yield from transport.end()
        return home.asarray(data)


class AllReduceCall(Collective):
    """Everyone's array, reduced: of a large one each rank reduces a part, and then shows that to the others."""

    one_phase = False

    @classmethod
    def of(cls, calls: Calls, x: Array, op: str, label: str) -> AllReduceCall:
        """Raises UsageError if it cannot be made; so do the others."""
        own = reducible("all_reduce", x, op)
        mine = span(own.size, calls.size, calls.rank)
        part = (mine.stop - mine.start) * own.itemsize
        how = {"sent": own.nbytes - part + part * (calls.size - 1), "shape": own.shape}
        return cls.prepare(calls, "all_reduce", own, label, {"reduction": op}, reduce=_reducer(calls, own, op), **how)

    def finish(self, found: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Array:
        """``out`` may be one of the blocks, else it overlaps none."""
        out = np.empty(self.shape, self.dtype) if out is None else out
        if self.signature.inline or self.sliced:
            self.reduce(out, blocks)
        else:
            reduce_in_pieces([out.reshape(-1)], [flat(block) for block in blocks], self.reduce)
        return out

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        own = own if target is None or keeps_apart(target, own, (...,)) else own.copy()
        if not routing.shows(self, own, own.nbytes):
            return own, None, None
        shown, result = readable_with_result(routing.node_table, own, target)
        return own if shown is None else shown, shown, result

    def move(self, transport: Transport, x: Array, result: Array, lengths: None) -> Steps:
        return transport.all_reduce(x.reshape(-1), result.reshape(-1), self.signature.reduction)


class ReduceScatterCall(Collective):
    """A part for each rank of what everyone's array is reduced to."""

    @classmethod
    def of(cls, calls: Calls, x: Array, axis: int, op: str, sizes: Shape | None, label: str) -> ReduceScatterCall:
        """``sizes``: of the parts; None: even ones."""
        own = reducible("reduce_scatter", x, op)
        axis = _axis(calls, "reduce_scatter", own, axis)
        parts = _parts(calls, "reduce_scatter", own, axis, sizes)
        mine = own[parts[calls.rank]]
        told = {"reduction": op, "axis": axis, "sizes": sizes or ()}
        how = {"sent": own.nbytes - mine.nbytes, "shape": mine.shape, "parts": parts}
        return cls.prepare(calls, "reduce_scatter", own, label, told, reduce=_reducer(calls, own, op), **how)

    def finish(self, found: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Array:
        return AllReduceCall.finish(self, found, [block[self.parts[self.rank]] for block in blocks], out)

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        own = own if target is None or keeps_apart(target, own, self.parts[self.rank]) else own.copy()
        given = own if self.signature.inline or routing.one_node else self.packed(own)
        return given, routing.readable(self, given), None

    def move(self, transport: Transport, x: Array, result: Array, lengths: None) -> Steps:
        reduction = self.signature.reduction
        return transport.reduce_scatter(self.packed(x), self.places, result.reshape(-1), reduction)


class Joining(Collective):
    """What comes from each rank is joined along an axis, ``concat_axis``; how long it is, others may have to tell."""

    def lengths(self, routing: Routing, number: int, agreed: Agreed) -> Steps:
        if agreed.alike:
            lengths = None
        elif routing.one_node:
            lengths = [each.length_for(self.rank, self.ranks) for each in agreed.met.signatures.by_rank]
        elif agreed.sizes_known:
            return list(self.sizes)
        else:
            told = [self.signature.length_for(r, self.ranks) for r in range(self.ranks)]
            lengths = yield from routing.numbers(number, told)
        wanted = lengths or self.even
        if self.sizes is not None and list(self.sizes) != wanted:
            operation, what = self.signature.operation, "received" if self.parts else "sizes"
            raise UsageError(f"{operation} over {self.where[1]!r}: {what} {list(self.sizes)} should be {wanted}")
        return lengths

    def shape_of(self, lengths: list[int] | None) -> Shape:
        if lengths is None:
            return self.shape
        axis = self.signature.concat_axis
        return *self.shape[:axis], sum(lengths), *self.shape[axis + 1 :]

    def move(self, transport: Transport, x: Array, result: Array, lengths: list[int] | None) -> Steps:
        axis, lengths = self.signature.concat_axis, lengths or self.even
        row = result.size // max(1, sum(lengths))
        places = spans([length * row for length in lengths])
        flat = backend_of(x).empty((result.size,), x.dtype) if axis else result.reshape(-1)
        yield from self.fill(transport, x, flat, places)
        for cut, place in zip(spans(lengths), places, strict=True) if axis else ():
            part = result[(slice(None),) * axis + (cut,)]
            part[...] = flat[place].reshape(part.shape)

    @abstractmethod
    def fill(self, transport: Transport, x: Array, flat: Array, places: list[slice]) -> Steps:
        """Bring what comes from each rank to its place in ``flat``."""


class AllGatherCall(Joining):
    """Everyone's array, joined."""

    @classmethod
    def of(cls, calls: Calls, x: Array, axis: int, sizes: Shape | None, label: str) -> AllGatherCall:
        """``sizes``: of all ranks along ``axis``, if this one knows."""
        axis = _axis(calls, "all_gather", x, axis)
        if sizes is not None and (len(sizes) != calls.size or sizes[calls.rank] != x.shape[axis]):
            raise UsageError(
                f"all_gather over {calls.axes!r}: sizes {list(sizes)} must be {calls.size} numbers; number "
                f"{calls.rank} is {x.shape[axis]}, the length of this rank's array along axis {axis}"
            )
        even = [x.shape[axis]] * calls.size
        shape = (*x.shape[:axis], sum(even), *x.shape[axis + 1 :])
        told = {"axis": axis, "concat_axis": axis, "known": number_of(sizes) if sizes is not None else -1}
        how = {"sent": x.nbytes * (calls.size - 1), "shape": shape, "even": even, "sizes": sizes}
        return cls.prepare(calls, "all_gather", x, label, told, **how)

    def finish(self, found: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Array:
        out = np.empty(self.shape, self.dtype) if out is None and found is None else out
        return joined(blocks, self.signature.axis, self.dtype, out)

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        """Ranks of one node show their arrays; where there are several nodes, the result, with their part in it."""
        lengths = list(self.sizes or self.even)
        shape = self.shape_of(lengths)
        if routing.one_node:
            shown = routing.readable(self, own)
            if target is not None and shown is own and np.may_share_memory(own, target):
                part = target[spans(lengths)[self.rank]] if target.shape == shape else target[:0]
                shown = own if part.size > 0 and address_of(part) == address_of(own) else own.copy()
            return own, shown, None
        if self.signature.axis or not routing.shows(self, own, prod(shape) * own.itemsize):
            return own, None, None
        fits = target is not None and target.shape == shape
        result = target if fits else backend_of(own).empty(shape, own.dtype)
        copied(own, result[spans(lengths)[self.rank]])
        return own, None, result

    def fill(self, transport: Transport, x: Array, flat: Array, places: list[slice]) -> Steps:
        copied(x.reshape(-1), flat[places[self.rank]])
        return transport.all_gather(flat, places)


class AllToAllCall(Joining):
    """A part for each rank, from everyone."""

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
        mine = x[parts[calls.rank]]
        even = [mine.shape[concat]] * calls.size
        told = {"axis": axis, "concat_axis": concat, "sizes": splits or (), "known": 1 if received is not None else -1}
        how = {"sent": x.nbytes - mine.nbytes, "parts": parts, "sizes": received, "tells": splits is not None}
        how |= {"shape": (*mine.shape[:concat], sum(even), *mine.shape[concat + 1 :]), "even": even}
        return cls.prepare(calls, "all_to_all", x, label, told, **how)

    def finish(self, found: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Any:
        cuts, concat = [self.parts[self.rank]] * self.ranks, self.signature.concat_axis
        if found is not None and not found.same:
            cuts = [each.part_for(self.rank, self.ranks) for each in found.by_rank]
        came = [block[cut] for block, cut in zip(blocks, cuts, strict=True)]
        out = np.empty(self.shape, self.dtype) if out is None and found is None else out
        y = joined(came, concat, self.dtype, out)
        return (y, [each.shape[concat] for each in came]) if self.tells else y

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        return own, routing.readable(self, own) if routing.one_node else None, None

    def fill(self, transport: Transport, x: Array, flat: Array, places: list[slice]) -> Steps:
        sent = self.packed(x)
        copied(sent[self.places[self.rank]], flat[places[self.rank]])
        return transport.all_to_all(sent, self.places, flat, places)


def _barrier(calls: Calls, x: None, label: str) -> PreparedCall:
    """Nothing can be wrong with it."""
    return PreparedCall(Signature("barrier"), ("barrier", calls.axes, label))


PREPARE = {
    "barrier": _barrier,
    "broadcast": BroadcastCall.of,
    "all_reduce": AllReduceCall.of,
    "reduce_scatter": ReduceScatterCall.of,
    "all_gather": AllGatherCall.of,
    "all_to_all": AllToAllCall.of,
}


def _reducer(calls: Calls, x: Array, op: str) -> Reducer:
    return reducer(op, x.dtype, backend_of(x).xp if is_reachable(calls.comm, x) else np)


def _axis(calls: Calls, operation: str, x: Array, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise UsageError(f"{operation} over {calls.axes!r}: axis {axis} of an array of shape {x.shape}")
    return int(axis % x.ndim)


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
