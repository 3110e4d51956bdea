"""Collectives that hand data on: all_gather and all_to_all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm import by_library
from spmd_engine.comm.door import Plan, suits
from spmd_engine.comm.header import Header
from spmd_engine.comm.lending import fill
from spmd_engine.comm.meeting import Meeting
from spmd_engine.comm.pending import Pending, Steps
from spmd_engine.comm.reductions import Reductions, check_out, ints, takes_results
from spmd_engine.comm.spans import joined, span, spans
from spmd_engine.comm.staging import copied
from spmd_engine.comm.transports.messages import DATA, exchange, tag
from spmd_engine.errors import UsageError


class Exchanges(Reductions):
    """Everyone's data for everyone, or a part of them for each."""

    def all_gather(
        self,
        x: Array,
        axis: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Array:
        """Everyone's ``x`` joined along ``axis`` in rank order. Shards may differ along ``axis`` and be empty.

        ``sizes`` (each rank's length along ``axis``) spares ranks of several nodes the exchange of lengths. ``out``,
        contiguous, with axis 0, receives the result; ``x`` may be this rank's part of it.
        """
        plan = self._plans.get(("all_gather", type(x), x.dtype, x.shape, axis, ints(sizes), label))
        if plan is not None and plan.at_once and suits(plan, out):
            return self._at_once(plan, x, out)
        return self._start_all_gather(x, axis, sizes, out, label, waits=True).wait()

    def start_all_gather(
        self,
        x: Array,
        axis: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Pending:
        return self._start_all_gather(x, axis, sizes, out, label, waits=False)

    def _start_all_gather(
        self, x: Array, axis: int, sizes: Sequence[int] | None, out: Array | None, label: str, waits: bool
    ) -> Pending:
        key = "all_gather", type(x), x.dtype, x.shape, axis, ints(sizes), label
        try:
            plan = self._plans.get(key) or self._keep(key, self._plan_all_gather(x, axis, sizes, label), x)
            if out is not None and (plan.header.axis or out.dtype != x.dtype or not takes_results(out)):
                raise UsageError(f"all_gather: out must be a contiguous, writable array of {x.dtype}, and axis 0")
        except UsageError as error:
            return self._refuse("all_gather", label, error)
        if self.size == 1:
            check_out("all_gather", x, out)
            return Pending.completed(x.copy() if out is None else copied(x, out))
        return (self._begin_blocking if waits else self._begin)(plan, x, out)

    def _plan_all_gather(self, x: Array, axis: int, sizes: Sequence[int] | None, label: str) -> Plan:
        axis = self._axis("all_gather", x, axis)
        if sizes is not None and (len(sizes) != self.size or sizes[self.rank] != x.shape[axis]):
            raise UsageError(
                f"all_gather over {self.axes!r}: sizes {list(sizes)} must be {self.size} numbers; number "
                f"{self.rank} is {x.shape[axis]}, the length of this rank's array along axis {axis}"
            )
        return Plan(
            self._header("all_gather", x, axis=axis),
            ("all_gather", self.axes, label),
            self._between.all_gather if self._between else self._all_gather,
            _joined,
            self._gathered_by_library,
            payload=x.nbytes,
            sent=x.nbytes * (self.size - 1),
            shape=(x.shape[0] * self.size, *x.shape[1:]) if axis == 0 else (),  # elsewhere, no out will do
            dtype=x.dtype,
            sizes=sizes,
        )

    def _gathered_by_library(self, plan: Plan, x: np.ndarray, _: Sequence[None], out: np.ndarray | None) -> np.ndarray:
        shapes = [header.shape for header in plan.said.headers]
        return by_library.all_gather(self.comm.library, self._ready(x)[0], shapes, plan.header.axis, out)

    def _all_gather(self, plan: Plan, number: int, x: Array, out: Array | None) -> Steps:
        own, home = self._ready(x)
        axis, xp = plan.header.axis, backend_of(own).xp
        meeting = yield from self._meet(plan, number, own, lend=True)
        lengths = [header.shape[axis] for header in meeting.headers]
        shape = (*own.shape[:axis], sum(lengths), *own.shape[axis + 1 :])
        fits = out is None or out.shape == shape  # if not, this rank is still to give the others what is theirs
        result = out if out is not None and fits and self._reachable(out) else xp.empty(shape, own.dtype)
        if meeting.by_library:
            self._gathered_by_library(plan, own, meeting.blocks, result)
        else:
            yield from self._gather(plan, number, meeting, own, result, lengths)
        if not fits:
            raise UsageError(f"all_gather: out has shape {out.shape}, the result {shape}")
        result = home(result)
        return result if out is None or result is out else copied(result, out)

    def _gather(
        self, plan: Plan, number: int, meeting: Meeting, own: Array, result: Array, lengths: Sequence[int]
    ) -> Steps:
        """Fill ``result`` with everyone's array: what this rank gives is ``own``."""
        axis = plan.header.axis
        parts = spans(lengths)
        spaces = [result[(slice(None),) * axis + (part,)] for part in parts]
        copied(own, spaces[self.rank])
        for r, block in enumerate(meeting.blocks):
            if block is not None and r != self.rank and spaces[r].size:
                fill(spaces[r], block)
        if not meeting.readable:
            yield from self._receive_missing(own, meeting.blocks, spaces, axis, tag(number, DATA))
        if meeting.exposed:
            yield from meeting.end()

    def _receive_missing(
        self, own: Array, blocks: Sequence[Array | None], spaces: Sequence[Array], axis: int, data_tag: int
    ) -> Steps:
        """Fill the ``spaces`` along ``axis`` whose ``blocks`` could not be read; ``own`` is sent if it could not be."""
        missing: list[Array | None] = [None] * self.size
        for r, (space, block) in enumerate(zip(spaces, blocks, strict=True)):
            if block is None:  # received straight into the result, if it lies there in one piece
                missing[r] = space if axis == 0 else backend_of(own).empty(space.shape, own.dtype)
        outgoing = own if blocks[self.rank] is None else None
        yield from exchange(self.comm, [outgoing] * self.size, missing, data_tag)
        for r, each in enumerate(missing):
            if axis and each is not None and r != self.rank:
                spaces[r][...] = each

    def all_to_all(
        self,
        x: Array,
        axis: int = 0,
        concat_axis: int | None = None,
        *,
        splits: Sequence[int] | None = None,
        label: str = "",
    ) -> Array:
        """Part r of ``x`` along ``axis`` goes to rank r; what comes is joined along ``concat_axis`` (``axis``).

        ``splits`` gives the length of each part, of any sum and different on every rank; else they are even.
        """
        plan = self._plans.get(("all_to_all", type(x), x.dtype, x.shape, axis, concat_axis, ints(splits), label))
        if plan is not None and plan.at_once:
            return self._at_once(plan, x, None)
        return self._start_all_to_all(x, axis, concat_axis, splits, label, waits=True).wait()

    def start_all_to_all(
        self,
        x: Array,
        axis: int = 0,
        concat_axis: int | None = None,
        *,
        splits: Sequence[int] | None = None,
        label: str = "",
    ) -> Pending:
        return self._start_all_to_all(x, axis, concat_axis, splits, label, waits=False)

    def _start_all_to_all(
        self, x: Array, axis: int, concat_axis: int | None, splits: Sequence[int] | None, label: str, waits: bool
    ) -> Pending:
        splits = ints(splits)
        key = "all_to_all", type(x), x.dtype, x.shape, axis, concat_axis, splits, label
        try:
            plan = self._plans.get(key)
            plan = plan or self._keep(key, self._plan_all_to_all(x, axis, concat_axis, splits, label), x)
        except UsageError as error:
            return self._refuse("all_to_all", label, error)
        if self.size == 1:
            return Pending.completed(x.copy())
        return (self._begin_blocking if waits else self._begin)(plan, x)

    def _plan_all_to_all(
        self, x: Array, axis: int, concat_axis: int | None, splits: tuple[int, ...] | None, label: str
    ) -> Plan:
        axis = self._axis("all_to_all", x, axis)
        concat = axis if concat_axis is None else self._axis("all_to_all", x, concat_axis)
        parts = self._parts("all_to_all", x, axis, splits)
        return Plan(
            self._header("all_to_all", x, axis=axis, concat_axis=concat, sizes=splits or ()),
            ("all_to_all", self.axes, label),
            self._between.all_to_all if self._between else self._all_to_all,
            self._parts_joined,
            self._exchanged_by_library,
            payload=x.nbytes,
            sent=x.nbytes - x[parts[self.rank]].nbytes,
            dtype=x.dtype,
            parts=parts,
        )

    def _parts_joined(self, plan: Plan, _: np.ndarray, blocks: Sequence[np.ndarray], out: None) -> np.ndarray:
        cuts = [plan.parts[self.rank]] * self.size
        if not plan.said.same:
            along = (slice(None),) * plan.header.axis
            cuts = [(*along, self._part_for_me(header)) for header in plan.said.headers]
        parts = [block[cut] for block, cut in zip(blocks, cuts, strict=True)]
        return joined(parts, plan.header.concat_axis, plan.dtype)

    def _exchanged_by_library(self, plan: Plan, x: np.ndarray, _: Sequence[None], out: None) -> np.ndarray:
        shapes = [self._shape_for_me(header) for header in plan.said.headers]
        own, concat_axis = self._ready(x)[0], plan.header.concat_axis
        return by_library.all_to_all(self.comm.library, own, plan.parts, shapes, concat_axis, plan.said.same)

    def _all_to_all(self, plan: Plan, number: int, x: Array, out: None) -> Steps:
        own, home = self._ready(x)
        axis, concat, xp = plan.header.axis, plan.header.concat_axis, backend_of(own).xp
        meeting = yield from self._meet(plan, number, own, lend=axis == 0)
        if meeting.by_library:
            return self._exchanged_by_library(plan, own, meeting.blocks, out)
        cuts = [self._part_for_me(header) for header in meeting.headers]
        shapes = [self._shape_for_me(header) for header in meeting.headers]
        places = spans([shape[concat] for shape in shapes])
        result = xp.empty((*shapes[0][:concat], places[-1].stop, *shapes[0][concat + 1 :]), own.dtype)
        spaces = [result[(slice(None),) * concat + (place,)] for place in places]
        missing: list[Array | None] = [None] * self.size
        for r, (space, block) in enumerate(zip(spaces, meeting.blocks, strict=True)):
            if r == self.rank:
                copied(own[plan.parts[r]], space)
            elif block is None:
                missing[r] = space if concat == 0 else xp.empty(shapes[r], own.dtype)
            elif space.size:
                fill(space, block[(slice(None),) * axis + (cuts[r],)])
        if not meeting.readable:
            sends = meeting.blocks[self.rank] is None
            outgoing = [xp.ascontiguousarray(own[part]) if sends else None for part in plan.parts]
            yield from exchange(self.comm, outgoing, missing, tag(number, DATA))
            for r, each in enumerate(missing):
                if concat and each is not None:
                    spaces[r][...] = each
        if meeting.exposed:
            yield from meeting.end()
        return home(result)

    def _shape_for_me(self, header: Header) -> tuple[int, ...]:
        part, axis = self._part_for_me(header), header.axis
        return *header.shape[:axis], part.stop - part.start, *header.shape[axis + 1 :]

    def _part_for_me(self, header: Header) -> slice:
        """What of a rank's array, along the axis it is split, is for this rank."""
        if header.sizes:
            return slice(sum(header.sizes[: self.rank]), sum(header.sizes[: self.rank + 1]))
        return span(header.shape[header.axis], self.size, self.rank)


def _joined(plan: Plan, _: np.ndarray, blocks: Sequence[np.ndarray], out: np.ndarray | None) -> np.ndarray:
    return joined(blocks, plan.header.axis, plan.dtype, out)
