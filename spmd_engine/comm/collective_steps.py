"""The steps of every collective: ranks agree on it, and a transport moves the data, in the way that ``ways`` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.call_agreement import Agreement
from spmd_engine.comm.communicator import Communicator
from spmd_engine.comm.dissemination import Agreed
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.prepared_call import PreparedCall
from spmd_engine.comm.rendezvous import Rendezvous
from spmd_engine.comm.spans import spans
from spmd_engine.comm.staging import copied, is_reachable, packed, ready, shapes_of
from spmd_engine.comm.transports.hierarchical import Hierarchical
from spmd_engine.comm.transports.messages import Messages
from spmd_engine.comm.transports.shared_memory import SharedMemory, keeps_apart, readable, readable_with_result
from spmd_engine.comm.transports.transport import Transport
from spmd_engine.comm.ways import Facts, Way, between_nodes, way, within_node
from spmd_engine.errors import UsageError


class CollectiveSteps:
    """Of one group: each is a generator (see ``pending``), of a prepared call, its number, its array and ``out``."""

    def __init__(self, comm: Communicator, axes: str, check: bool, deterministic: bool) -> None:
        self._comm, self._axes, self._lanes = comm, axes, comm.lanes
        self._agreement = Agreement(comm, axes, check)
        self._node_table, self._one_node = comm.node_table, comm.table is not None
        self._library, self._lane_library = comm.collectives, comm.lane_collectives
        if deterministic:
            self._library = self._library and self._library.in_rank_order()
            self._lane_library = self._lane_library and self._lane_library.in_rank_order()
        self._rank, self._size = comm.rank, comm.size
        self._messages = Messages(comm)

    def meet_only(self, call: PreparedCall, number: int, text: np.ndarray | None, _: None) -> Steps:
        """Agree on a call without an array, or tell the others why this rank cannot make its call: ``text``."""
        yield from self._agreement.reach(call, number, text)

    def all_reduce(self, call: PreparedCall, number: int, x: Array, out: Array | None) -> Steps:
        """See ``Group``; so are the others."""
        own, target, home = self._ready(x, out)
        if target is not None and not keeps_apart(target, own, (...,)):
            own = own.copy()
        shown = result = None
        if self._shows(call, own, own.nbytes):
            shown, result = readable_with_result(self._node_table, own, target)
        agreed = yield from self._agreement.reach(call, number, own, shown, result)
        if agreed.rows is not None:
            result = call.finish(call, None, agreed.rows, target)
        else:
            if result is None:
                result = target if target is not None else backend_of(own).empty(own.shape, own.dtype)
            source = own if shown is None else shown
            transport = self._transport(call, number, agreed, own.nbytes)
            yield from transport.all_reduce(number, source.reshape(-1), result.reshape(-1), call.signature.reduction)
            yield from transport.end()
            result = copied(result, target) if target is not None else result
        return _brought(home(result), out)

    def reduce_scatter(self, call: PreparedCall, number: int, x: Array, out: Array | None) -> Steps:
        own, target, home = self._ready(x, out)
        if target is not None and not keeps_apart(target, own, call.parts[self._rank]):
            own = own.copy()
        flat, parts = (own, None) if call.signature.inline else packed(own, call.parts)
        shown = readable(self._node_table, flat, self._comm.tuning) if self._shows(call, own, own.nbytes) else None
        agreed = yield from self._agreement.reach(call, number, own, shown)
        if agreed.rows is not None:
            result = call.finish(call, None, agreed.rows, target)
        else:
            if parts is None:
                flat, parts = packed(own, call.parts)
            result = target if target is not None else backend_of(own).empty(call.shape, own.dtype)
            transport = self._transport(call, number, agreed, own.nbytes)
            yield from transport.reduce_scatter(number, flat, parts, result.reshape(-1), call.signature.reduction)
            yield from transport.end()
        return _brought(home(result), out)

    def all_gather(self, call: PreparedCall, number: int, x: Array, out: Array | None) -> Steps:
        own, target, home = self._ready(x, out)
        axis, backend = call.signature.axis, backend_of(own)
        lengths = call.sizes if call.sizes is not None else [own.shape[axis]] * self._size  # as one may expect
        shown = result = None
        if self._one_node and self._shows(call, own, own.nbytes):
            shown = readable(self._node_table, own, self._comm.tuning)
            if target is not None and shown is own and np.may_share_memory(own, target):
                shown = own.copy() if not self._is_in_place(own, target, lengths) else own
        elif axis == 0 and self._shows(call, own, prod(own.shape[1:]) * own.itemsize * sum(lengths)):
            result = self._space(own, axis, lengths, target)
            copied(own, result[spans(lengths)[self._rank]])
        agreed = yield from self._agreement.reach(call, number, own, shown, result)
        lengths = yield from self._lengths(call, number, agreed, own.shape[axis])
        shape = _joined(own, axis, lengths)
        fits = out is None or out.shape == shape  # if not, this rank is still to give the others what is theirs
        if agreed.rows is not None:
            result = call.finish(call, None, agreed.rows, target if fits else None)
        else:
            if result is None or result.shape != shape:
                result = self._space(own, axis, lengths, target if fits else None)
            transport = self._transport(call, number, agreed, result.nbytes)
            in_order = result if axis == 0 else backend.empty((result.size,), own.dtype)
            shapes = [(*own.shape[:axis], length, *own.shape[axis + 1 :]) for length in lengths]
            parts = spans([prod(each) for each in shapes])
            flat = in_order.reshape(-1)
            copied(own.reshape(-1), flat[parts[self._rank]])
            yield from transport.all_gather(number, flat, parts)
            if axis:
                _put(result, axis, flat, parts, shapes)
            yield from transport.end()
        if not fits:
            raise UsageError(f"all_gather: out has shape {out.shape}, the result {shape}")
        return _brought(home(result), out)

    def all_to_all(self, call: PreparedCall, number: int, x: Array, out: Array | None) -> Steps:
        own, home = ready(self._comm, x)
        concat, backend, shown = call.signature.concat_axis, backend_of(own), None
        flat, parts = (own, None) if call.signature.inline else packed(own, call.parts)
        if self._one_node and self._shows(call, own, own.nbytes):
            shown = readable(self._node_table, flat, self._comm.tuning)
        agreed = yield from self._agreement.reach(call, number, own, shown)
        shapes = yield from self._shapes_that_come(call, number, agreed, own)
        lengths = [shape[concat] for shape in shapes]
        shape = *shapes[0][:concat], sum(lengths), *shapes[0][concat + 1 :]
        fits = out is None or out.shape == shape  # if not, this rank is still to give the others what is theirs
        target = out if fits and out is not None and is_reachable(self._comm, out) else None
        if agreed.rows is not None:
            result = call.finish(call, agreed.met and agreed.met.signatures, agreed.rows, target)
            result = result[0] if call.tells else result
        else:
            if parts is None:
                flat, parts = packed(own, call.parts)
            transport = self._transport(call, number, agreed, agreed.most)
            result = target if target is not None else backend.empty(shape, own.dtype)
            comes = result.reshape(-1) if concat == 0 else backend.empty((result.size,), own.dtype)
            places = spans([prod(shape) for shape in shapes])
            yield from transport.all_to_all(number, flat, parts, comes, places)
            copied(flat[parts[self._rank]], comes[places[self._rank]])
            if concat:
                _put(result, concat, comes, places, shapes)
            yield from transport.end()
        if not fits:
            raise UsageError(f"all_to_all: out has shape {out.shape}, the result {shape}")
        result = _brought(home(result), out)
        return (result, lengths) if call.tells else result

    def broadcast(self, call: PreparedCall, number: int, mine: Array | None, home: Backend | None) -> Steps:
        """The description of the root's array, and the array itself if it is small, come with the agreement.

        ``home``: in whose memory the result is wanted; None: in the host's.
        """
        shown, home = None, home or CPU
        mine = ready(self._comm, mine)[0] if mine is not None else None
        if self._one_node and mine is not None and self._shows(call, mine, mine.nbytes):
            shown = readable(self._node_table, mine, self._comm.tuning)
        agreed = yield from self._agreement.reach(call, number, mine, shown)
        root = call.signature.root
        if agreed.rows is not None:
            return home.asarray(agreed.rows[root].copy())
        where = home if self._comm.device_aware and not agreed.host else CPU
        data = mine.copy() if mine is not None else where.empty(*agreed.root.array_type)
        transport = self._transport(call, number, agreed, data.nbytes)
        yield from transport.broadcast(number, data.reshape(-1), root)
        yield from transport.end()
        return home.asarray(data)

    # --- what comes from whom

    def _lengths(self, call: PreparedCall, number: int, agreed: Agreed, own: int) -> Steps:
        """How long each rank's array is along the axis that is gathered."""
        axis = call.signature.axis
        if self._one_node:
            lengths = [each.shape[axis] for each in agreed.met.signatures.by_rank]
        elif agreed.alike:
            lengths = [own] * self._size
        elif agreed.sizes_known:
            return call.sizes
        else:
            lengths = (yield from self._numbers(number, [own] * self._size)).tolist()
        self._check_sizes(call, lengths)
        return lengths

    def _shapes_that_come(self, call: PreparedCall, number: int, agreed: Agreed, own: Array) -> Steps:
        """The shapes of what each rank has for this one."""
        if self._one_node:
            shapes = [each.shape_for(self._rank, self._size) for each in agreed.met.signatures.by_rank]
            self._check_sizes(call, [shape[call.signature.concat_axis] for shape in shapes])
            return shapes
        axis, concat = call.signature.axis, call.signature.concat_axis
        sent = shapes_of(own.shape, call.parts)
        if agreed.alike:
            return [sent[self._rank]] * self._size
        comes = call.sizes
        if not agreed.sizes_known:
            comes = (yield from self._numbers(number, [shape[concat] for shape in sent])).tolist()
            self._check_sizes(call, comes)
        shapes = [(*own.shape[:concat], length, *own.shape[concat + 1 :]) for length in comes]
        if axis != concat:
            here = sent[self._rank][axis]
            shapes = [(*shape[:axis], here, *shape[axis + 1 :]) for shape in shapes]
        return shapes

    def _numbers(self, number: int, mine: Sequence[int]) -> Steps:
        """One number from each rank, of which this one gives each ``mine``."""
        sent, comes = np.array(mine, np.int64), np.empty(self._size, np.int64)
        each = spans([1] * self._size)
        data: Transport = self._library or self._messages
        yield from data.all_to_all(number, sent, each, comes, each, last=False)
        comes[self._rank] = sent[self._rank]
        return comes

    def _check_sizes(self, call: PreparedCall, lengths: Sequence[int]) -> None:
        if call.sizes is not None and list(call.sizes) != list(lengths):
            operation, what = call.signature.operation, "received" if call.parts else "sizes"
            raise UsageError(f"{operation} over {self._axes!r}: {what} {list(call.sizes)} should be {list(lengths)}")

    # --- to move data

    def _ready(self, x: Array, out: Array | None) -> tuple[Array, Array | None, Callable[[Array], Array]]:
        """``x`` and ``out`` as transports use them (None: they cannot), and what brings a result to ``x``'s device."""
        own, home = ready(self._comm, x)
        return own, out if out is not None and is_reachable(self._comm, out) else None, home

    def _shows(self, call: PreparedCall, own: Array, size: int) -> bool:
        """Whether this rank offers the others of its node to read its data: arrays of ``size`` bytes."""
        if self._node_table is None or not isinstance(own, np.ndarray) or call.signature.waits:
            return False
        inline = call.signature.inline if self._one_node else call.terms.inline
        return not inline and (self._one_node or size >= self._comm.tuning.hierarchical)

    def _transport(self, call: PreparedCall, number: int, agreed: Agreed, size: int) -> Transport | Hierarchical:
        """What moves the data of a call on which all have agreed: ``size`` bytes, of all ranks or of each."""
        comm, tuning, met = self._comm, self._comm.tuning, agreed.met
        facts = Facts(
            call.signature.operation,
            size,
            self._size,
            call.signature.axis,
            one_node=self._one_node,
            by_nodes=self._lanes is not None,
            library=self._library is not None,
            lengths_known=agreed.alike or agreed.sizes_known,
            waits=met is not None and met.signatures.wait,
            shown=met is not None and met.shown,
            host=agreed.host,
        )
        match way(facts, tuning):
            case Way.SHARED_MEMORY:
                return SharedMemory(met, tuning)
            case Way.BLOCKING:
                return comm.library
            case Way.HIERARCHICAL:
                return Hierarchical(self._lanes, self._local(call, met), self._lane(number, facts))
            case Way.MPI:
                return self._library
        comm.turns.over(number)
        return self._messages

    def _local(self, call: PreparedCall, met: Rendezvous) -> Transport:
        """What moves a hierarchical call's data within this node."""
        shown = met.results_shown if call.signature.operation == "all_gather" else met.shown
        if within_node(shown) is Way.SHARED_MEMORY:
            return SharedMemory(met, self._comm.tuning)
        return Messages(self._lanes.local)

    def _lane(self, number: int, facts: Facts) -> Transport:
        """What moves the data of a lane: of each node's bytes, its part."""
        lanes, size = self._lanes, facts.size // self._lanes.local.size
        facts = facts._replace(size=size, ranks=lanes.lane.size, library=self._lane_library is not None)
        if between_nodes(facts, size, self._comm.tuning) is Way.MPI:
            return self._lane_library
        self._comm.turns.over(number)
        return Messages(lanes.lane)

    def _space(self, own: Array, axis: int, lengths: Sequence[int], out: Array | None) -> Array:
        """Where the result of an all_gather comes: ``out``, if it is as long as this."""
        shape = _joined(own, axis, lengths)
        return out if out is not None and out.shape == shape else backend_of(own).empty(shape, own.dtype)

    def _is_in_place(self, own: np.ndarray, out: np.ndarray, lengths: Sequence[int]) -> bool:
        """Whether ``own`` is this rank's part of ``out``."""
        part = out[spans(lengths)[self._rank]] if out.shape[0] == sum(lengths) else out[:0]
        return part.size > 0 and address_of(part) == address_of(own)


def _brought(result: Array, out: Array | None) -> Array:
    """The result, in ``out`` if there is one."""
    return result if out is None else copied(result, out)


def _joined(own: Array, axis: int, lengths: Sequence[int]) -> tuple[int, ...]:
    return *own.shape[:axis], sum(lengths), *own.shape[axis + 1 :]


def _put(
    result: Array, axis: int, flat: Array, parts: Sequence[slice], shapes: Sequence[Sequence[int]]
) -> None:
    """Write the blocks that lie in these ``parts`` of ``flat``, of these shapes, one after the other along ``axis``."""
    places = spans([shape[axis] for shape in shapes])
    for place, part, shape in zip(places, parts, shapes, strict=True):
        result[(slice(None),) * axis + (place,)] = flat[part].reshape(shape)
