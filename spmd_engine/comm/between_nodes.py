"""Calls of a group whose ranks do not all share memory: they agree, then move data in the way that ``ways`` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.comm import meeting, shared
from spmd_engine.comm.communicator import Communicator
from spmd_engine.comm.dissemination import Agreed, disseminate, words_of
from spmd_engine.comm.header import Call, Header
from spmd_engine.comm.meeting import Meeting
from spmd_engine.comm.pending import RanksEnded, Steps
from spmd_engine.comm.spans import joined, spans
from spmd_engine.comm.staging import copied, is_reachable, packed, ready, shapes_of
from spmd_engine.comm.transports.exchange import Exchange
from spmd_engine.comm.transports.hierarchical import Hierarchical
from spmd_engine.comm.transports.messages import AGREEMENT, Messages, tag
from spmd_engine.comm.ways import Way, between, way
from spmd_engine.errors import UsageError

if TYPE_CHECKING:
    from spmd_engine.comm.door import Plan


class BetweenNodes:
    """The steps of all collectives, of one group: each is a generator, of a plan, a call's number and its array."""

    def __init__(self, comm: Communicator, axes: str, deterministic: bool) -> None:
        self._comm, self._axes, self._lanes = comm, axes, comm.lanes
        self._library, self._lane_library = comm.collectives, comm.lane_collectives
        if deterministic:
            self._library = self._library and self._library.in_rank_order()
            self._lane_library = self._lane_library and self._lane_library.in_rank_order()
        self._rank, self._size = comm.rank, comm.size
        self._messages = Messages(comm)

    def meet_only(self, plan: Plan, number: int, text: np.ndarray | None, _: None) -> Steps:
        """Agree on a call without an array, or tell the others why this rank cannot make its call: ``text``."""
        yield from self._agree(plan, number, text)

    def all_reduce(self, plan: Plan, number: int, x: Array, out: Array | None) -> Steps:
        """See ``Group``; so are the others."""
        own, home = ready(self._comm, x)
        target = out if out is not None and is_reachable(self._comm, out) else None
        prepared = None
        if self._may_be_hierarchical(plan, own.nbytes) and isinstance(own, np.ndarray):
            prepared = shared.prepare(self._lanes.board, own, target)
        shown, result = prepared or (None, None)
        met, agreed = yield from self._agree(plan, number, own, shown, lend=True, result=result)
        if agreed.rows is not None:
            result = target if target is not None else np.empty(own.shape, own.dtype)
            shared.reduce_in_pieces(result, _arrays(agreed.rows, own.shape, own.dtype), plan.reduce)
        else:
            if result is None:
                result = target if target is not None else backend_of(own).empty(own.shape, own.dtype)
            source = shown if prepared else own
            data = self._data(plan, number, met, agreed, own.nbytes)
            yield from data.all_reduce(number, source.reshape(-1), result.reshape(-1), plan.header.reduction)
            result = copied(result, target) if target is not None else result
        return home(result) if out is None else copied(home(result), out)

    def reduce_scatter(self, plan: Plan, number: int, x: Array, out: Array | None) -> Steps:
        own, home = ready(self._comm, x)
        target = out if out is not None and is_reachable(self._comm, out) else None
        mine = plan.parts[self._rank]
        flat, parts = packed(own, plan.parts)
        shown = flat if self._may_be_hierarchical(plan, own.nbytes) and isinstance(own, np.ndarray) else None
        apart = target is None or shared.keeps_apart(target, own, mine)
        met, agreed = yield from self._agree(plan, number, own, shown, lend=True, copy=not apart)
        result = target if target is not None else backend_of(own).empty(plan.shape, own.dtype)
        if agreed.rows is not None:
            blocks = [row[mine] for row in _arrays(agreed.rows, own.shape, own.dtype)]
            shared.reduce_in_pieces(result, blocks, plan.reduce)
        else:
            data = self._data(plan, number, met, agreed, own.nbytes)
            if not apart and not isinstance(data, Hierarchical):
                flat = flat.copy()
            yield from data.reduce_scatter(number, flat, parts, result.reshape(-1), plan.header.reduction)
        return home(result) if out is None else copied(home(result), out)

    def all_gather(self, plan: Plan, number: int, x: Array, out: Array | None) -> Steps:
        own, home = ready(self._comm, x)
        axis, backend = plan.header.axis, backend_of(own)
        lengths = plan.sizes if plan.sizes is not None else [own.shape[axis]] * self._size  # as one may expect
        target = out if out is not None and out.shape == self._joined(own, axis, lengths) else None
        result = None
        if axis == 0 and self._may_be_hierarchical(plan, prod(own.shape[1:]) * own.itemsize * sum(lengths)):
            result = self._space(own, axis, lengths, target)
            copied(own, result[spans(lengths)[self._rank]])
        shown = result if isinstance(result, np.ndarray) else None
        met, agreed = yield from self._agree(plan, number, own, None, lend=True, result=shown)
        if agreed.alike:
            lengths = [own.shape[axis]] * self._size
        elif not agreed.sizes_known:
            lengths = (yield from self._numbers(number, agreed, [own.shape[axis]] * self._size)).tolist()
        shape = self._joined(own, axis, lengths)
        if plan.sizes is not None and list(plan.sizes) != list(lengths):
            raise UsageError(f"all_gather over {self._axes!r}: sizes {list(plan.sizes)} should be {list(lengths)}")
        fits = out is None or out.shape == shape  # if not, this rank is still to give the others what is theirs
        if agreed.rows is not None:
            result = joined(_arrays(agreed.rows, own.shape, own.dtype), axis, own.dtype)
        else:
            if result is None or result.shape != shape:
                result = self._space(own, axis, lengths, out if fits else None)
            data = self._data(plan, number, met, agreed, result.nbytes)
            in_order = result if axis == 0 else backend.empty((result.size,), own.dtype)
            shapes = [(*own.shape[:axis], length, *own.shape[axis + 1 :]) for length in lengths]
            parts = spans([prod(each) for each in shapes])
            flat = in_order.reshape(-1)
            copied(own.reshape(-1), flat[parts[self._rank]])
            yield from data.all_gather(number, flat, parts)
            if axis:
                blocks = [flat[part].reshape(each) for part, each in zip(parts, shapes, strict=True)]
                _put(result, axis, lengths, blocks)
        if not fits:
            raise UsageError(f"all_gather: out has shape {out.shape}, the result {shape}")
        result = home(result)
        return result if out is None or result is out else copied(result, out)

    def all_to_all(self, plan: Plan, number: int, x: Array, out: None) -> Steps:
        own, home = ready(self._comm, x)
        axis, concat, backend = plan.header.axis, plan.header.concat_axis, backend_of(own)
        met, agreed = yield from self._agree(plan, number, own)
        sent = shapes_of(own.shape, plan.parts)
        if agreed.alike:
            shapes = [sent[self._rank]] * self._size
        else:
            comes = yield from self._numbers(number, agreed, [shape[concat] for shape in sent])
            shapes = [(*own.shape[:concat], n, *own.shape[concat + 1 :]) for n in comes.tolist()]
            if axis != concat:
                here = sent[self._rank][axis]
                shapes = [(*shape[:axis], here, *shape[axis + 1 :]) for shape in shapes]
        lengths = [shape[concat] for shape in shapes]
        result = backend.empty((*shapes[0][:concat], sum(lengths), *shapes[0][concat + 1 :]), own.dtype)
        if agreed.rows is not None:
            blocks = [each[plan.parts[self._rank]] for each in _arrays(agreed.rows, own.shape, own.dtype)]
        else:
            flat, parts = packed(own, plan.parts)
            comes = result.reshape(-1) if concat == 0 else backend.empty((result.size,), own.dtype)
            places = spans([prod(shape) for shape in shapes])
            data = self._data(plan, number, met, agreed, agreed.most)
            yield from data.all_to_all(number, flat, parts, comes, places)
            copied(flat[parts[self._rank]], comes[places[self._rank]])
            blocks = [comes[place].reshape(shape) for place, shape in zip(places, shapes, strict=True)]
        if agreed.rows is not None or concat:
            _put(result, concat, lengths, blocks)
        return home(result)

    def broadcast(self, plan: Plan, number: int, mine: Array | None, home: Backend) -> Steps:
        """The description of the root's array, and the array itself if it is small, come with the agreement."""
        met, agreed = yield from self._agree(plan, number, mine)
        header = Header.unpack(agreed.rows[0])
        shape, dtype = header.array_type
        if header.inline:
            data = np.frombuffer(agreed.rows[0], dtype, prod(shape), len(header.packed)).reshape(shape).copy()
        else:
            where = home if self._comm.device_aware and not agreed.host else CPU
            data = mine.copy() if mine is not None else where.empty(shape, dtype)
            way_of_data = self._data(plan, number, met, agreed, data.nbytes)
            yield from way_of_data.broadcast(number, data.reshape(-1), plan.header.root)
        return home.asarray(data)

    # --- to agree ----------------------------------------------------------------------------------------

    def _agree(self, plan: Plan, number: int, x: Array | None, shown: np.ndarray | None = None, **how: Any) -> Steps:
        """All ranks agree on the call; returns the Meeting on this rank's node, if they go by nodes, and an Agreed.

        ``shown`` and ``how``: see ``meeting.on_board``. Raises, on all ranks, what is wrong if they do not agree.
        """
        told, copies = plan.told, plan.header.operation == "broadcast"
        row = b""
        if copies and x is not None:
            row = told.packed + (x.tobytes() if told.inline else b"")
        elif told.inline and told.shape is not None:
            row = x.tobytes()
        if self._lanes is None:
            met, words = None, words_of(told.sizes)
            agreed = yield from disseminate(self._comm, words, row, tag(number, AGREEMENT), copies=copies)
            rows = agreed.rows
        else:
            met, agreed, rows = yield from self._agree_by_nodes(plan, number, x if told.inline else shown, copies, how)
        if not agreed.same or plan.header.operation == "refuse":
            text = x if plan.header.shape is None else None
            header = plan.header if text is not None else replace(plan.header, inline=0)
            yield from meeting.explain(self._comm, Call(number, header), text, self._axes)
        if rows is not None and not copies and not (agreed.alike and agreed.host and told.inline):
            rows = None
        return met, agreed._replace(rows=rows)

    def _agree_by_nodes(
        self, plan: Plan, number: int, shown: np.ndarray | None, copies: bool, how: dict[str, Any]
    ) -> Steps:
        """As ``_agree``: first the ranks of each node, on their board, then those of each lane."""
        lanes, met, ended, row = self._lanes, None, None, b""
        words = words_of(plan.told.sizes)
        try:
            met = yield from meeting.on_board(lanes.board, Call(number, plan.told), shown, agree=False, **how)
        except RanksEnded as error:
            ended = error
        else:
            headers = met.headers
            words = np.max([words_of(each.sizes) for each in headers], axis=0)
            blocks = [b"" if block is None else block.tobytes() for block in _inline(met)]
            if copies:
                pairs = zip(headers, blocks, strict=True)
                row = next((each.packed + block for each, block in pairs if each.shape is not None), b"")
            elif len({len(block) for block in blocks}) == 1 and plan.told.shape is not None:
                row = b"".join(blocks)
        agreed = yield from disseminate(lanes.lane, words, row, tag(number, AGREEMENT), copies=copies, ended=ended)
        rows = agreed.rows
        if rows is not None and not copies:
            by_rank, width = [b""] * self._size, len(lanes.local.members)
            for node, each in zip(lanes.nodes, rows, strict=True):
                length = len(each) // width
                for i, rank in enumerate(node):
                    by_rank[rank] = each[i * length : (i + 1) * length]
            rows = by_rank
        return met, agreed, rows

    # --- to move data ------------------------------------------------------------------------------------

    def _may_be_hierarchical(self, plan: Plan, size: int) -> bool:
        return self._lanes is not None and not plan.told.inline and size >= self._comm.tuning.hierarchical

    def _data(self, plan: Plan, number: int, met: Meeting | None, agreed: Agreed, size: int) -> Any:
        """What moves the data of a call on which all have agreed: ``size`` bytes, of all ranks or of each."""
        chosen = way(
            plan.header.operation,
            size,
            ranks=self._size,
            axis=plan.header.axis,
            lengths_known=agreed.alike or agreed.sizes_known,
            host=agreed.host,
            by_nodes=self._lanes is not None,
            library=self._library is not None,
            tuning=self._comm.tuning,
        )
        if chosen is Way.HIERARCHICAL:
            return Hierarchical(self._lanes, met, self._lane(number, size, agreed.host))
        if chosen is Way.MPI:
            return self._library
        self._comm.turns.over(number)
        return self._messages

    def _lane(self, number: int, size: int, host: bool) -> Exchange:
        """What moves the data of a lane: of each node's ``size`` bytes, its part."""
        lanes, tuning = self._lanes, self._comm.tuning
        size, library = size // lanes.local.size, self._lane_library is not None
        if between(size, size, ranks=lanes.lane.size, host=host, library=library, tuning=tuning) is Way.MPI:
            return self._lane_library
        self._comm.turns.over(number)
        return Messages(lanes.lane)

    def _numbers(self, number: int, agreed: Agreed, mine: Sequence[int]) -> Steps:
        """One number from each rank, of which this one gives each ``mine``."""
        sent, comes = np.array(mine, np.int64), np.empty(self._size, np.int64)
        each = spans([1] * self._size)
        data: Exchange = self._library or self._messages
        yield from data.all_to_all(number, sent, each, comes, each, last=False)
        comes[self._rank] = sent[self._rank]
        return comes

    def _joined(self, own: Array, axis: int, lengths: Sequence[int]) -> tuple[int, ...]:
        return *own.shape[:axis], sum(lengths), *own.shape[axis + 1 :]

    def _space(self, own: Array, axis: int, lengths: Sequence[int], out: Array | None) -> Array:
        """Where the result of an all_gather comes: ``out``, if the transports can write there."""
        if out is not None and is_reachable(self._comm, out):
            return out
        return backend_of(own).empty(self._joined(own, axis, lengths), own.dtype)


def _arrays(rows: Sequence[bytes], shape: Sequence[int], dtype: np.dtype) -> list[np.ndarray]:
    return [np.frombuffer(row, dtype, prod(shape)).reshape(shape) for row in rows]


def _inline(met: Meeting) -> list[np.ndarray | None]:
    """The data that came inline, by rank of the node."""
    pairs = zip(met.headers, met.blocks, strict=True)
    return [block if header.inline and header.shape is not None else None for header, block in pairs]


def _put(result: Array, axis: int, lengths: Sequence[int], blocks: Sequence[Array]) -> None:
    """Write ``blocks`` one after the other along ``axis``."""
    for place, block in zip(spans(lengths), blocks, strict=True):
        result[(slice(None),) * axis + (place,)] = block
