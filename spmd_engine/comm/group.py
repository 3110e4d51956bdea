"""Collectives of a group of ranks, whatever the transport.

Every call takes and returns local arrays, blocks as the method and ``start_...`` as the same thing begun now
and finished by ``.wait()``. Input may be of any dtype NumPy knows, not contiguous, uneven, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.comm import algorithms, lanes
from spmd_engine.comm.algorithms import span
from spmd_engine.comm.door import Plan, suits
from spmd_engine.comm.header import Call, Header
from spmd_engine.comm.lending import fill
from spmd_engine.comm.meeting import INLINE
from spmd_engine.comm.pending import Pending, Steps
from spmd_engine.comm.reductions import Reductions, check_out, copied, ints
from spmd_engine.errors import UsageError


class Group(Reductions):
    """All collectives, besides the messages between two ranks."""

    def barrier(self) -> None:
        """Return once every rank of the group has come here."""
        plan = self._plans.get(("barrier", ""))
        if plan is not None and plan.at_once:
            self._at_once(plan, None, None)
        else:
            self.start_barrier().wait()

    def start_barrier(self, label: str = "") -> Pending:
        if self.size == 1:
            return Pending.completed(None)
        key = "barrier", label
        plan = self._plans.get(key)
        if plan is None:
            where = "barrier", self.axes, label
            plan = self._keep(key, Plan(Header("barrier"), where, self._meet_only, lambda plan, blocks, out: None))
        return self._begin(plan, None)

    def leave(self, reason: str = "") -> None:
        """Say that this rank's program ends. If another rank is in a collective, both get a MismatchError.

        With a ``reason``, an error that this rank reports, the others get RankAborted instead.
        """
        if self.size > 1:
            text = np.frombuffer(reason.encode(errors="replace")[:INLINE], np.uint8)
            if not reason:
                self.comm.announce_end()  # for those who wait in other groups
            plan = Plan(Header("leave", inline=text.size), ("leave", self.axes, ""), self._meet_only)
            meeting = self._begin(plan, text)
            meeting.until_the_end = True
            meeting.wait()
            self.comm.ended()  # take in what the others announced

    def broadcast(self, x: Array | None, root: int = 0, *, label: str = "") -> Array:
        """The root's ``x`` on every rank; what the others give is not looked at, and may be None."""
        return self.start_broadcast(x, root, label=label).wait()

    def start_broadcast(self, x: Array | None, root: int = 0, *, label: str = "") -> Pending:
        if not 0 <= root < self.size:
            raise UsageError(f"broadcast over {self.axes!r}: root {root} is not one of {self.size} ranks")
        if self.rank == root and x is None:
            raise UsageError(f"broadcast over {self.axes!r}: the root must give an array")
        if self.size == 1:
            return Pending.completed(np.array(x, copy=True) if isinstance(x, np.ndarray) else x.copy())
        mine = self._ready(x)[0] if self.rank == root else None
        home = backend_of(x) if x is not None else CPU
        key = "broadcast", type(mine), *((mine.dtype, mine.shape) if mine is not None else ()), root, label
        plan = self._plans.get(key) or self._keep(key, self._plan_broadcast(mine, root, label))
        return self._begin(plan, mine, home)

    def _plan_broadcast(self, mine: Array | None, root: int, label: str) -> Plan:
        def sent(result: Array) -> int:  # the root hands out the parts, then everyone passes its part on
            own = span(result.size, self.size, self.rank)
            part = (own.stop - own.start) * result.itemsize
            return result.nbytes - part + part * (self.size - 1) if self.rank == root else part * (self.size - 2)

        header = self._header("broadcast", mine, root=root, always=True)
        payload = mine.nbytes if mine is not None else 0
        return Plan(header, ("broadcast", self.axes, label), self._broadcast, payload=payload, sent=sent)

    def _broadcast(self, plan: Plan, number: int, mine: Array | None, home: Backend) -> Steps:
        root = plan.header.root
        meeting = yield from self._meet(plan, number, mine, always=True, lend=True)
        block = meeting.blocks[root]
        where = home if self.comm.device_aware and block is None else CPU
        data = mine.copy() if mine is not None else where.empty(*meeting.headers[root].array_type)
        if block is None:
            yield from algorithms.broadcast(self.comm, data.reshape(-1), root, self._tag(number) + 1)
        elif mine is None:
            fill(data, block)
        if meeting.exposed:
            yield from meeting.end()
        return home.asarray(data)

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

        ``sizes`` (each rank's length along ``axis``) spares the exchange of shapes where checks are switched
        off. ``out``, contiguous, with axis 0, receives the result; ``x`` may be this rank's part of it.
        """
        plan = self._plans.get(("all_gather", type(x), x.dtype, x.shape, axis, ints(sizes), label))
        if plan is not None and plan.at_once and suits(plan, out):
            return self._at_once(plan, x, out)
        return self.start_all_gather(x, axis, sizes=sizes, out=out, label=label).wait()

    def start_all_gather(
        self,
        x: Array,
        axis: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Pending:
        key = "all_gather", type(x), x.dtype, x.shape, axis, ints(sizes), label
        plan = self._plans.get(key) or self._keep(key, self._plan_all_gather(x, axis, sizes, label), x)
        if out is not None and (plan.header.axis or out.dtype != x.dtype or not out.flags.c_contiguous):
            raise UsageError(f"all_gather: out must be a contiguous array of {x.dtype}, and axis 0")
        if self.size == 1:
            check_out("all_gather", x, out)
            return Pending.completed(x.copy() if out is None else copied(x, out))
        return self._begin(plan, x, out)

    def _plan_all_gather(self, x: Array, axis: int, sizes: Sequence[int] | None, label: str) -> Plan:
        axis = self._axis("all_gather", x, axis)
        if sizes is not None and (len(sizes) != self.size or sizes[self.rank] != x.shape[axis]):
            raise UsageError(
                f"all_gather over {self.axes!r}: sizes {list(sizes)} must be {self.size} numbers; number "
                f"{self.rank} is {x.shape[axis]}, the length of this rank's array along axis {axis}"
            )
        return Plan(
            self._header("all_gather", x, axis=axis, always=sizes is None),
            ("all_gather", self.axes, label),
            self._all_gather,
            _joined,
            payload=x.nbytes,
            sent=x.nbytes * (self.size - 1),
            shape=(*x.shape[:axis], x.shape[axis] * self.size, *x.shape[axis + 1 :]),
            dtype=x.dtype,
            sizes=sizes,
        )

    def _all_gather(self, plan: Plan, number: int, x: Array, out: Array | None) -> Steps:
        own, home = self._ready(x)
        axis, xp = plan.header.axis, backend_of(own).xp
        meeting = yield from self._meet(plan, number, own, always=plan.sizes is None, lend=True)
        lengths = [header.shape[axis] for header in meeting.headers] if meeting.headers else plan.sizes
        shape = (*own.shape[:axis], sum(lengths), *own.shape[axis + 1 :])
        result = out if out is not None and self._reachable(out) else xp.empty(shape, own.dtype)
        if result.shape != shape:
            raise UsageError(f"all_gather: out has shape {result.shape}, the result {shape}")
        if axis == 0 and self._in_lanes(result.nbytes):
            ends = np.cumsum([0, *lengths]).tolist()
            parts = [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]
            copied(own, result[parts[self.rank]])
            yield from lanes.all_gather(self._lanes, Call(number, plan.header), result, parts, self._tag(number) + 1)
        else:
            blocks = meeting.blocks or [None] * self.size
            yield from self._gather(own, blocks, lengths, result, axis, self._tag(number) + 1)
        if meeting.exposed:
            yield from meeting.end()
        result = home(result)
        return result if out is None or result is out else copied(result, out)

    def _gather(
        self, own: Array, blocks: Sequence[Array | None], lengths: Sequence[int], out: Array, axis: int, tag: int
    ) -> Steps:
        """Fill ``out`` with ``own``, the others' ``blocks`` that can be read, and in place of None what they send."""
        ends = np.cumsum([0, *lengths]).tolist()
        spaces = [out[(slice(None),) * axis + (slice(*pair),)] for pair in zip(ends, ends[1:], strict=False)]
        copied(own, spaces[self.rank])
        missing: list[Array | None] = [None] * self.size
        for r, (space, block) in enumerate(zip(spaces, blocks, strict=True)):
            if block is None:  # received straight into the result, if it lies there in one piece
                missing[r] = space if axis == 0 else backend_of(own).empty(space.shape, own.dtype)
            elif r != self.rank and space.size:
                fill(space, block)
        outgoing = own if blocks[self.rank] is None else None
        yield from algorithms.exchange(self.comm, [outgoing] * self.size, missing, tag)
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
        return self.start_all_to_all(x, axis, concat_axis, splits=splits, label=label).wait()

    def start_all_to_all(
        self,
        x: Array,
        axis: int = 0,
        concat_axis: int | None = None,
        *,
        splits: Sequence[int] | None = None,
        label: str = "",
    ) -> Pending:
        splits = ints(splits)
        key = "all_to_all", type(x), x.dtype, x.shape, axis, concat_axis, splits, label
        plan = self._plans.get(key) or self._keep(key, self._plan_all_to_all(x, axis, concat_axis, splits, label), x)
        if self.size == 1:
            return Pending.completed(x.copy())
        return self._begin(plan, x)

    def _plan_all_to_all(
        self, x: Array, axis: int, concat_axis: int | None, splits: tuple[int, ...] | None, label: str
    ) -> Plan:
        axis = self._axis("all_to_all", x, axis)
        concat = axis if concat_axis is None else self._axis("all_to_all", x, concat_axis)
        parts = self._parts("all_to_all", x, axis, splits)
        return Plan(
            self._header("all_to_all", x, axis=axis, concat_axis=concat, sizes=splits or (), always=True),
            ("all_to_all", self.axes, label),
            self._all_to_all,
            self._parts_joined,
            payload=x.nbytes,
            sent=x.nbytes - x[parts[self.rank]].nbytes,
            dtype=x.dtype,
            parts=parts,
        )

    def _parts_joined(self, plan: Plan, blocks: Sequence[np.ndarray], out: None) -> np.ndarray:
        mine = plan.parts[self.rank]
        return np.concatenate([block[mine] for block in blocks], axis=plan.header.concat_axis, dtype=plan.dtype)

    def _all_to_all(self, plan: Plan, number: int, x: Array, out: None) -> Steps:
        own, home = self._ready(x)
        axis, concat, xp = plan.header.axis, plan.header.concat_axis, backend_of(own).xp
        meeting = yield from self._meet(plan, number, own, always=True, lend=axis == 0)
        cuts = [self._part_for_me(header) for header in meeting.headers]
        shapes = [(*h.shape[:axis], c.stop - c.start, *h.shape[axis + 1 :]) for h, c in zip(meeting.headers, cuts)]
        ends = np.cumsum([0, *(shape[concat] for shape in shapes)]).tolist()
        result = xp.empty((*shapes[0][:concat], ends[-1], *shapes[0][concat + 1 :]), own.dtype)
        missing: list[Array | None] = [None] * self.size
        for r, block in enumerate(meeting.blocks):
            space = result[(slice(None),) * concat + (slice(ends[r], ends[r + 1]),)]
            if r == self.rank:
                copied(own[plan.parts[r]], space)
            elif block is None:
                missing[r] = space if concat == 0 else xp.empty(shapes[r], own.dtype)
            elif space.size:
                fill(space, block[(slice(None),) * axis + (cuts[r],)])
        if not meeting.readable:
            sends = meeting.blocks[self.rank] is None
            outgoing = [xp.ascontiguousarray(own[part]) if sends else None for part in plan.parts]
            yield from algorithms.exchange(self.comm, outgoing, missing, self._tag(number) + 1)
            for r, each in enumerate(missing):
                if concat and each is not None:
                    result[(slice(None),) * concat + (slice(ends[r], ends[r + 1]),)] = each
        if meeting.exposed:
            yield from meeting.end()
        return home(result)

    def _part_for_me(self, header: Header) -> slice:
        """What of a rank's array, along the axis it is split, is for this rank."""
        if header.sizes:
            return slice(sum(header.sizes[: self.rank]), sum(header.sizes[: self.rank + 1]))
        return span(header.shape[header.axis], self.size, self.rank)


def _joined(plan: Plan, blocks: Sequence[np.ndarray], out: np.ndarray | None) -> np.ndarray:
    if out is None:
        out = np.empty(plan.shape, plan.dtype)
    return np.concatenate(blocks, axis=plan.header.axis, out=out)
