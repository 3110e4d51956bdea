"""The collectives, one class each, and how their calls are agreed and moved.

Each has one text: for blocking calls and started ones, with ``out`` and without, on any route.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from spmd_engine.arrays import dtypes
from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.agreement.call_agreement import MAX_DIMS, Agreed, Agreement, Signature, Signatures, number_of
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.dispatch import Facts, Route, choose, inline_limit
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.reducing import Reducer, reducer, reducible
from spmd_engine.comm.shared_memory.cross_memory import Block, flat
from spmd_engine.comm.spans import joined, span, spans
from spmd_engine.comm.transports.hierarchical import Hierarchical
from spmd_engine.comm.transports.messages import Messages, Ranks
from spmd_engine.comm.transports.shared_memory import (
    SharedMemory,
    keeps_apart,
    readable,
    readable_with_result,
    reduce_in_pieces,
)
from spmd_engine.comm.transports.transport import GatherAndReduce, Transport
from spmd_engine.errors import UsageError

if TYPE_CHECKING:
    from spmd_engine.comm.shared_memory.slot_table import Entries, SlotTable
    from spmd_engine.comm.transports.mpi import NonblockingCollectives

Shape = tuple[int, ...]


class Offer(NamedTuple):
    """What a rank brings to a call."""

    data: Array | None  #: contiguous, as the others are to receive it
    readable: Array | None = None  #: the same where the other ranks of the node can read it; None: nowhere
    result: Array | None = None  #: the buffer of the result, where they can read it


class Routing:
    """How the calls of one group are agreed on, and on which route their data move."""

    def __init__(self, comm: Communicator, axes: str, check: bool, deterministic: bool) -> None:
        self.comm, self.axes, self.rank, self.size = comm, axes, comm.rank, comm.size
        self.one_node = comm.table is not None
        self.spins = self.one_node and comm.spin_tests > 0 and comm.size > 1  #: whether blocking calls spin
        self._room = comm.table.room if self.one_node else comm.tuning.with_agreement // comm.size
        self.agreement, self._deterministic = Agreement(comm, axes, check), deterministic

    def signature(self, operation: str, x: Array | None, **fields: Any) -> Signature:
        """The signature of a call of ``x``. Raises UsageError if ``x`` has too many dimensions."""
        if x is None:
            return Signature(operation, **fields)
        if x.ndim > MAX_DIMS:
            raise UsageError(f"{operation}: the array has {x.ndim} dimensions; at most {MAX_DIMS} are supported")
        # The others can read x in place if it is not sliced, and if all spin: a rank must wait until all have read.
        whole = not (fields.get("axis") or fields.get("concat_axis"))
        in_place = whole and self.spins and self.comm.table.neighbours.cross_memory is not None
        host = isinstance(x, np.ndarray)
        inline = host and x.nbytes <= inline_limit(operation, self.size, self._room, in_place, self.comm.tuning)
        fields.setdefault("inline", x.nbytes if inline else 0)
        return Signature(operation, dtype=dtypes.describe(x.dtype), shape=x.shape, host=host, **fields)

    def reducer(self, x: Array, op: str) -> Reducer:
        """Reduces arrays like ``x``, on their device if the transport can reach it."""
        return reducer(op, x.dtype, backend_of(x).xp if is_reachable(self.comm, x) else np)

    def offers(self, call: PreparedCall, own: Array, size: int) -> bool:
        """Whether this rank offers the others of its node to read its data, of arrays of ``size`` bytes."""
        if self.comm.node_table is None or not isinstance(own, np.ndarray):
            return False
        return not call.signature.inline and (self.one_node or size >= self.comm.tuning.hierarchical)

    def readable(self, call: PreparedCall, x: Array) -> np.ndarray | None:
        """Contiguous ``x``, or a copy, where the others of the node can read it; None: not offered, or no room."""
        sliced = call.sliced and self.one_node
        return readable(self.comm.node_table, x, self.comm.tuning, sliced) if self.offers(call, x, x.nbytes) else None

    def numbers(self, number: int, mine: Sequence[int]) -> Steps:
        """One number from each rank; this rank sends ``mine[r]`` to rank r. Part of call ``number``."""
        sent, received = np.array(mine, np.int64), np.empty(len(mine), np.int64)
        places = spans([1] * len(mine))
        library = self.comm.collectives
        transport = library.of_call(number, False) if library is not None else Messages(self.comm, number)
        yield from transport.all_to_all(sent, places, received, places, last=False)
        received[self.rank] = sent[self.rank]
        return received.tolist()

    def transport(self, call: PreparedCall, number: int, agreed: Agreed, size: int) -> GatherAndReduce | None:
        """What moves the data of an agreed call, ``size`` bytes of all ranks or of each; None if they were inline."""
        if self.one_node and call.inline:  # as in the last call, which had the same signatures
            return None
        comm, entries = self.comm, agreed.entries
        facts = Facts(
            size,
            comm.size,
            one_node=self.one_node,
            even_nodes=comm.lanes is not None,
            library=comm.collectives is not None,
            lengths_known=agreed.alike or agreed.sizes_known,
            inline=agreed.blocks is not None,
            readable=entries is not None and entries.readable,
            host=agreed.host,
            tuning=comm.tuning,
        )
        memory = SharedMemory(comm.node_table, number, entries) if entries is not None else None
        route = choose(call.signature, facts)
        call.keep_route(route)
        return self._on_route(route, call, number, facts, memory, comm, comm.collectives)

    def _on_route(
        self,
        route: Route,
        call: PreparedCall,
        number: int,
        facts: Facts,
        memory: SharedMemory | None,
        ranks: Ranks,
        library: NonblockingCollectives | None,
    ) -> GatherAndReduce | None:
        match route:
            case Route.INLINE:
                return None
            case Route.SHARED_MEMORY:
                return memory
            case Route.HIERARCHICAL:
                lanes, library = self.comm.lanes, self.comm.lane_collectives
                gathers = call.signature.operation == "all_gather"
                within = facts._replace(one_node=True, readable=memory.results_readable if gathers else facts.readable)
                between = facts._replace(
                    even_nodes=False,
                    size=facts.size // lanes.local.size,
                    ranks=lanes.lane.size,
                    library=library is not None,
                )
                return Hierarchical(
                    lanes,
                    self._on_route(choose(call.signature, within), call, number, within, memory, lanes.local, None),
                    self._on_route(choose(call.signature, between), call, number, between, None, lanes.lane, library),
                )
            case Route.MPI:
                return library.of_call(number, self._deterministic)
        if not facts.one_node:
            self.comm.call_order.finish(number)
        return Messages(ranks, number)


@dataclass
class PreparedCall:
    """Everything about a call except the values of its array. A group keeps it for the next such call.

    This class itself describes a barrier, and calls without result: a text for the other ranks, a message.
    """

    signature: Signature
    where: tuple[str, str, str]  # operation, axes and label: the key in the ledger
    payload: int = 0  # bytes
    sent: int | Callable[[Array], int] = 0  # bytes; or a function of the result
    shape: tuple[int, ...] = ()  # of the result, if all ranks make the same call
    dtype: Any = None  # to which the array is cast
    parts: list[tuple[slice, ...]] | None = None  # index of each rank's part of the array
    places: list[slice] | None = None  # of these parts, packed in flat memory
    even: list[int] | None = None  # lengths of the joined blocks, by rank, if all ranks make the same call
    sizes: Sequence[int] | None = None  # these lengths as given by the caller
    returns_lengths: bool = False  # whether an all_to_all also returns the lengths that it received
    reduce: Reducer | None = None
    expected: Signatures | None = None  # of the node's ranks in the last such call
    spins: bool = False  # whether a blocking call spins, and the array needs no cast
    inline: bool = False  # whether the last such call took Route.INLINE
    fast: bool = False  # whether a blocking call takes one exchange, without a generator
    rank: int = 0  # in the group
    ranks: int = 1
    text: int = 0  # number of its description, see ``Activity.called``; 0: none yet
    one_phase: ClassVar[bool] = True  # whether ``finish`` makes the result of readable arrays of any size

    def steps(self, routing: Routing, number: int, x: Array | None, out: Any) -> Steps:
        """The whole of call ``number``, a generator (see ``pending``)."""
        agreed = yield from routing.agreement.reach(self.signature, self.expected, number, x)
        self.expect(agreed.entries)
        routing.transport(self, number, agreed, 0)  # nothing is moved; the route is kept for the next call

    def finish(self, signatures: Signatures | None, blocks: Sequence[Block], out: Any) -> Any:
        """The result of all ranks' ``blocks``, in ``out`` if given. ``signatures``: None if they are all the same."""

    def check_out(self, x: Array, out: Any, ranks: int) -> None:
        """Raise UsageError unless ``out`` can receive the result of a call of ``x``."""

    def expect(self, entries: Entries | None) -> None:
        """Expect the same signatures in the next such call. If they have changed, its route must be chosen anew."""
        if entries is not None and entries.signatures is not self.expected:
            self.expected = entries.signatures
            self.inline = self.fast = False

    def keep_route(self, route: Route) -> None:
        """Keep the route for the next call with the same signatures, which then need not ask for it."""
        self.inline = route is Route.INLINE
        self.fast = self.spins and (self.inline or (route is Route.SHARED_MEMORY and self.one_phase))

    @property
    def sliced(self) -> bool:
        """Whether arrays are split along another axis than the first."""
        return self.parts is not None and len(self.parts[0]) > 1

    def _is_readable(self, x: np.ndarray, out: Array | None, table: SlotTable) -> bool:
        """Whether the other ranks can read ``x`` in place."""
        apart = out is None or not np.may_share_memory(x, out)
        return apart and x.flags.c_contiguous and table.address(x, self.sliced) is not None

    def record(self, ledger: Ledger, result: Any, seconds: float | None = None) -> None:
        """Enter one such call in the ledger; ``seconds``: of its wait, if it had only one."""
        sent = self.sent if type(self.sent) is int else self.sent(result)
        ledger.record(self.where, self.payload, sent, seconds)

    def suits(self, x: Array | None, out: Array | None, table: SlotTable) -> bool:
        """Whether a fast call can take ``x`` as it lies, and write to ``out``."""
        if not (self.inline or x is None or self._is_readable(x, out, table)):
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
    """A collective in which each rank has an array and a result, which goes to ``out`` if given."""

    @classmethod
    def prepare(
        cls, group: Routing, operation: str, x: Array, label: str, signed: dict[str, Any], **fields: Any
    ) -> Self:
        """The call of ``x``; ``signed``: fields of its signature."""
        where = operation, group.axes, label
        fields |= {"payload": x.nbytes, "dtype": x.dtype, "rank": group.rank, "ranks": group.size}
        call = cls(group.signature(operation, x, **signed), where, **fields)
        if call.parts is not None:
            row = x.size // max(1, x.shape[call.signature.axis])
            call.places = [slice(part[-1].start * row, part[-1].stop * row) for part in call.parts]
        return call

    @abstractmethod
    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        """What this rank, with contiguous ``own``, brings to the call; ``target``: ``out``, if usable."""

    @abstractmethod
    def move(self, transport: Transport, x: Array, result: Array, lengths: list[int] | None) -> Steps:
        """Move data until ``result`` is that of contiguous ``x``; ``lengths``: of the blocks of all ranks."""

    def lengths(self, routing: Routing, number: int, agreed: Agreed) -> Steps:
        """Lengths of the blocks that are joined, unless all ranks make the same call (None).

        Raises UsageError if they are not those that the caller gave.
        """
        yield from ()

    def shape_of(self, lengths: list[int] | None) -> Shape:
        """Shape of the result."""
        return self.shape

    def steps(self, routing: Routing, number: int, x: Array, out: Array | None) -> Steps:
        """Offer, agree, exchange unknown lengths, choose a route, move."""
        own, to_device = ready(routing.comm, x)
        target = out if out is not None and is_reachable(routing.comm, out) else None
        offer = self.offer(routing, own, target)
        agreed = yield from routing.agreement.reach(self.signature, self.expected, number, *offer)
        self.expect(agreed.entries)
        lengths = yield from self.lengths(routing, number, agreed)
        shape = self.shape_of(lengths)
        fits = out is None or out.shape == shape  # if not, this rank must still give the others their parts
        target = target if fits else None
        whole = prod(shape) * own.itemsize
        size = agreed.most if self.signature.operation == "all_to_all" else max(self.payload, whole)
        transport = routing.transport(self, number, agreed, size)
        blocks = agreed.blocks if transport is None else transport.blocks if self.one_phase else None
        if blocks is not None:
            result = self.finish(agreed.entries.signatures if routing.one_node else None, blocks, target)
            result = result[0] if self.returns_lengths else result
        else:
            result = offer.result
            if result is None or result.shape != shape:
                result = target if target is not None else backend_of(own).empty(shape, own.dtype)
            yield from self.move(transport, offer.data, result, lengths)
        if transport is not None:
            yield from transport.end()
        if not fits:
            raise UsageError(f"{self.signature.operation}: out has shape {out.shape}, the result {shape}")
        result = to_device(result) if out is None else copied(to_device(result), out)
        return (result, lengths or list(self.even)) if self.returns_lengths else result

    def packed(self, x: Array) -> Array:
        """The parts of ``x``, each contiguous at its ``places`` in flat memory, as transports need them."""
        if x.ndim == 1 or not self.sliced:  # or already packed
            return x.reshape(-1)
        flat = backend_of(x).empty((x.size,), x.dtype)
        for part, place in zip(self.parts, self.places, strict=True):
            flat[place] = x[part].reshape(-1)
        return flat

    def check_out(self, x: Array, out: Any, ranks: int) -> None:
        shape, joins = x.shape if ranks == 1 else self.shape, self.even is not None
        fits = out.dtype == self.dtype and out.flags.c_contiguous
        fits = fits and getattr(out.flags, "writeable", True)  # CuPy's arrays always are
        # The joined length may differ from the expected one; then it is checked later, when it is known.
        if not fits or self.signature.concat_axis or (out.shape != shape and (ranks == 1 or not joins)):
            wanted, given = f"{self.dtype}{list(shape)}", f"{out.dtype}{list(out.shape)}"
            how = ", joined along axis 0" if joins else ""
            raise UsageError(f"{self.signature.operation}: out must be contiguous, writable {wanted}{how}, is {given}")
        if joins and self.parts and isinstance(x, np.ndarray) and np.may_share_memory(x, out):
            raise UsageError("all_to_all: out must not share memory with the array that is sent")


class BroadcastCall(PreparedCall):
    """``Group.broadcast``. ``out``: the backend of the result; None: the host's."""

    @classmethod
    def of(cls, group: Routing, mine: Array | None, root: int, label: str) -> BroadcastCall:
        """``mine``: the root's array, None elsewhere."""
        if not 0 <= root < group.size:
            raise UsageError(f"broadcast over {group.axes!r}: root {root} is not one of {group.size} ranks")
        if group.rank == root and mine is None:
            raise UsageError(f"broadcast over {group.axes!r}: the root must pass an array")

        def sent(result: Array) -> int:  # the root scatters parts, then all ranks gather them
            own = span(result.size, group.size, group.rank)
            part = (own.stop - own.start) * result.itemsize
            return result.nbytes - part + part * (group.size - 1) if group.rank == root else part * (group.size - 2)

        signature, where = group.signature("broadcast", mine, root=int(root)), ("broadcast", group.axes, label)
        payload, dtype = (mine.nbytes, mine.dtype) if mine is not None else (0, None)
        return cls(signature, where, payload=payload, sent=sent, dtype=dtype)

    def finish(self, signatures: Signatures | None, blocks: Sequence[Block | None], out: Any) -> Array:
        return blocks[self.signature.root].copy()

    def steps(self, routing: Routing, number: int, mine: Array | None, home: Backend | None) -> Steps:
        """The description of the root's array, and the array itself if it is small, come with the agreement."""
        home, comm = home or CPU, routing.comm
        mine = ready(comm, mine)[0] if mine is not None else None
        offered = routing.readable(self, mine) if routing.one_node and mine is not None else None
        agreed = yield from routing.agreement.reach(self.signature, self.expected, number, mine, offered)
        self.expect(agreed.entries)
        shape, dtype = agreed.root.array_type
        transport = routing.transport(self, number, agreed, prod(shape) * dtype.itemsize)
        blocks = agreed.blocks if transport is None else transport.blocks
        if blocks is not None:
            data = self.finish(None, blocks, None)
        else:
            where = home if comm.device_aware and not agreed.host else CPU
            data = mine.copy() if mine is not None else where.empty(shape, dtype)
            yield from transport.broadcast(data.reshape(-1), self.signature.root)
        if transport is not None:
            yield from transport.end()
        return home.asarray(data)


class AllReduceCall(Collective):
    """``Group.all_reduce``. Of a large array each rank reduces a part, which the others then read."""

    one_phase = False

    @classmethod
    def of(cls, group: Routing, x: Array, op: str, label: str) -> AllReduceCall:
        """Raises UsageError if there is no such reduction."""
        own = reducible("all_reduce", x, op)
        mine = span(own.size, group.size, group.rank)
        part = (mine.stop - mine.start) * own.itemsize
        fields = {"sent": own.nbytes - part + part * (group.size - 1), "shape": own.shape}
        fields["reduce"] = group.reducer(own, op)
        return cls.prepare(group, "all_reduce", own, label, {"reduction": op}, **fields)

    def finish(self, signatures: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Array:
        """``out`` may be one of the blocks; otherwise it must not overlap any."""
        out = np.empty(self.shape, self.dtype) if out is None else out
        if self.signature.inline or self.sliced:
            self.reduce(out, blocks)
        else:
            reduce_in_pieces([out.reshape(-1)], [flat(block) for block in blocks], self.reduce)
        return out

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        own = own if target is None or keeps_apart(target, own, (...,)) else own.copy()
        if not routing.offers(self, own, own.nbytes):
            return Offer(own)
        offered, result = readable_with_result(routing.comm.node_table, own, target)
        return Offer(own if offered is None else offered, offered, result)

    def move(self, transport: Transport, x: Array, result: Array, lengths: None) -> Steps:
        return transport.all_reduce(x.reshape(-1), result.reshape(-1), self.signature.reduction)


class ReduceScatterCall(Collective):
    """``Group.reduce_scatter``."""

    @classmethod
    def of(cls, group: Routing, x: Array, axis: int, op: str, sizes: Shape | None, label: str) -> ReduceScatterCall:
        """``sizes``: lengths of the parts; None: even."""
        own = reducible("reduce_scatter", x, op)
        axis = _axis(group, "reduce_scatter", own, axis)
        parts = _parts(group, "reduce_scatter", own, axis, sizes)
        mine = own[parts[group.rank]]
        signed = {"reduction": op, "axis": axis, "sizes": sizes or ()}
        fields = {"sent": own.nbytes - mine.nbytes, "shape": mine.shape, "parts": parts}
        fields["reduce"] = group.reducer(own, op)
        return cls.prepare(group, "reduce_scatter", own, label, signed, **fields)

    def finish(self, signatures: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Array:
        return AllReduceCall.finish(self, signatures, [block[self.parts[self.rank]] for block in blocks], out)

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        own = own if target is None or keeps_apart(target, own, self.parts[self.rank]) else own.copy()
        given = own if self.signature.inline or routing.one_node else self.packed(own)
        return Offer(given, routing.readable(self, given))

    def move(self, transport: Transport, x: Array, result: Array, lengths: None) -> Steps:
        reduction = self.signature.reduction
        return transport.reduce_scatter(self.packed(x), self.places, result.reshape(-1), reduction)


class Joining(Collective):
    """Blocks of all ranks are joined along ``concat_axis``; the others may have to send their lengths."""

    def lengths(self, routing: Routing, number: int, agreed: Agreed) -> Steps:
        if agreed.alike:
            lengths = None
        elif routing.one_node:
            signatures = agreed.entries.signatures.by_rank
            lengths = [signature.length_for(self.rank, self.ranks) for signature in signatures]
        elif agreed.sizes_known:
            return list(self.sizes)
        else:
            mine = [self.signature.length_for(r, self.ranks) for r in range(self.ranks)]
            lengths = yield from routing.numbers(number, mine)
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
        for rows, place in zip(spans(lengths), places, strict=True) if axis else ():
            part = result[(slice(None),) * axis + (rows,)]
            part[...] = flat[place].reshape(part.shape)

    @abstractmethod
    def fill(self, transport: Transport, x: Array, flat: Array, places: list[slice]) -> Steps:
        """Move each rank's block to its place in ``flat``."""


class AllGatherCall(Joining):
    """``Group.all_gather``."""

    @classmethod
    def of(cls, group: Routing, x: Array, axis: int, sizes: Shape | None, label: str) -> AllGatherCall:
        """``sizes``: lengths of all ranks along ``axis``, if the caller knows them."""
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

    def finish(self, signatures: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Array:
        out = np.empty(self.shape, self.dtype) if out is None and signatures is None else out
        return joined(blocks, self.signature.axis, self.dtype, out)

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        """On one node the array is readable; on several nodes the result is, with this rank's part in it."""
        lengths = list(self.sizes or self.even)
        shape = self.shape_of(lengths)
        if routing.one_node:
            offered = routing.readable(self, own)
            if target is not None and offered is own and np.may_share_memory(own, target):
                part = target[spans(lengths)[self.rank]] if target.shape == shape else target[:0]
                offered = own if part.size > 0 and address_of(part) == address_of(own) else own.copy()
            return Offer(own, offered)
        if self.signature.axis or not routing.offers(self, own, prod(shape) * own.itemsize):
            return Offer(own)
        fits = target is not None and target.shape == shape
        result = target if fits else backend_of(own).empty(shape, own.dtype)
        copied(own, result[spans(lengths)[self.rank]])
        return Offer(own, None, result)

    def fill(self, transport: Transport, x: Array, flat: Array, places: list[slice]) -> Steps:
        copied(x.reshape(-1), flat[places[self.rank]])
        return transport.all_gather(flat, places)


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
        """``received``: lengths of the blocks that arrive, if the caller knows them."""
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

    def finish(self, signatures: Signatures | None, blocks: Sequence[Array], out: Array | None) -> Any:
        parts, concat = [self.parts[self.rank]] * self.ranks, self.signature.concat_axis
        if signatures is not None and not signatures.same:
            parts = [signature.part_for(self.rank, self.ranks) for signature in signatures.by_rank]
        received = [block[part] for block, part in zip(blocks, parts, strict=True)]
        out = np.empty(self.shape, self.dtype) if out is None and signatures is None else out
        y = joined(received, concat, self.dtype, out)
        return (y, [block.shape[concat] for block in received]) if self.returns_lengths else y

    def offer(self, routing: Routing, own: Array, target: Array | None) -> Offer:
        return Offer(own, routing.readable(self, own) if routing.one_node else None)

    def fill(self, transport: Transport, x: Array, flat: Array, places: list[slice]) -> Steps:
        sent = self.packed(x)
        copied(sent[self.places[self.rank]], flat[places[self.rank]])
        return transport.all_to_all(sent, self.places, flat, places)


def _barrier(group: Routing, x: None, label: str) -> PreparedCall:
    return PreparedCall(Signature("barrier"), ("barrier", group.axes, label))


#: Prepares a call: (group, array, *arguments of the operation, label) -> PreparedCall
PREPARE = {
    "barrier": _barrier,
    "broadcast": BroadcastCall.of,
    "all_reduce": AllReduceCall.of,
    "reduce_scatter": ReduceScatterCall.of,
    "all_gather": AllGatherCall.of,
    "all_to_all": AllToAllCall.of,
}


def _axis(group: Routing, operation: str, x: Array, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise UsageError(f"{operation} over {group.axes!r}: axis {axis} of an array of shape {x.shape}")
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


# --- arrays where a transport can read them, and results where they are wanted


def ready(comm: Communicator, x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """``x`` contiguous where the transport can read it, and a function that moves a result to its device."""
    if isinstance(x, np.ndarray):
        return x if x.flags.c_contiguous else np.ascontiguousarray(x).reshape(x.shape), _stays
    backend = backend_of(x)
    if comm.device_aware:
        return backend.xp.ascontiguousarray(x).reshape(x.shape), _stays  # ascontiguousarray makes scalars 1-D
    staged = backend.pinned_empty(x.shape, x.dtype)
    backend.synchronize()
    backend.copy_to_host(x, staged)
    return staged, backend.asarray


def is_reachable(comm: Communicator, x: Array) -> bool:
    """Whether the transport can access the memory of ``x``."""
    return isinstance(x, np.ndarray) or comm.device_aware


def copied(x: Array, out: Array) -> Array:
    """``out``, with the values of ``x``, which may be ``out`` itself."""
    if x is not out:
        out[...] = x
    return out


def _stays(result: Array) -> Array:
    return result
