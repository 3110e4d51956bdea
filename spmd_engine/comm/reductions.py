"""Collectives that reduce: all_reduce and reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm import by_library, shared
from spmd_engine.comm.door import Plan, suits
from spmd_engine.comm.messages import Messages
from spmd_engine.comm.pending import Pending, Steps
from spmd_engine.comm.reducing import reducer, reducible
from spmd_engine.comm.spans import span, spans
from spmd_engine.comm.staging import copied, packed
from spmd_engine.errors import UsageError


class Reductions(Messages):
    """Sums and their kin over a group of ranks, always made in the same order and once, so equal on all ranks.

    That is the order of ranks; but large arrays of a group that has several ranks on each of several nodes are first
    combined within nodes, in rank order, and then node by node, in the order of the nodes' first ranks (see
    ``transports.hierarchical``); and those of many nodes in an order of the MPI library's (see ``Tuning``).
    """

    def all_reduce(self, x: Array, op: str = "sum", *, out: Array | None = None, label: str = "") -> Array:
        """The sum, mean, max, min or prod over ranks, element by element, in a fixed order: equal on all ranks.

        ``out`` (contiguous, may be ``x`` itself) receives the result. bool is counted as int64; the mean of
        integers is float64; float16 and bfloat16 are accumulated in float32.
        """
        plan = self._plans.get(("all_reduce", type(x), x.dtype, x.shape, op, label))
        if plan is not None and plan.at_once and suits(plan, out):
            return self._at_once(plan, x, out)
        return self._start_all_reduce(x, op, out, label, waits=True).wait()

    def start_all_reduce(
        self, x: Array, op: str = "sum", *, out: Array | None = None, label: str = ""
    ) -> Pending:
        return self._start_all_reduce(x, op, out, label, waits=False)

    def _start_all_reduce(self, x: Array, op: str, out: Array | None, label: str, waits: bool) -> Pending:
        key = "all_reduce", type(x), x.dtype, x.shape, op, label
        try:
            plan = self._plans.get(key) or self._keep(key, self._plan_all_reduce(x, op, label), x)
            x = x if x.dtype == plan.dtype else x.astype(plan.dtype)
            check_out("all_reduce", x, out)
        except UsageError as error:
            return self._refuse("all_reduce", label, error)
        if self.size == 1:
            return Pending.completed(x.copy() if out is None else copied(x, out))
        return (self._begin_blocking if waits else self._begin)(plan, x, out)

    @property
    def _whole(self) -> int:
        """Bytes of an array of which every rank reduces all, rather than a part that it then tells the others."""
        return min(self._inline, shared.WHOLE // self.size)

    def _plan_all_reduce(self, x: Array, op: str, label: str) -> Plan:
        own = reducible("all_reduce", x, op)
        mine = span(own.size, self.size, self.rank)
        part = (mine.stop - mine.start) * own.itemsize
        return Plan(
            self._header("all_reduce", own, reduction=op, limit=self._whole),
            ("all_reduce", self.axes, label),
            self._between.all_reduce if self._between else self._all_reduce,
            _reduced,
            self._reduced_by_library,
            payload=own.nbytes,
            sent=own.nbytes - part + part * (self.size - 1),
            shape=own.shape,
            dtype=own.dtype,
            reduce=reducer(op, own.dtype, backend_of(own).xp if self._reachable(own) else np),
        )

    def _reduced_by_library(self, plan: Plan, x: np.ndarray, _: Sequence[None], out: np.ndarray | None) -> np.ndarray:
        own = self._ready(x)[0]
        return by_library.all_reduce(self.comm.library, own, self.size, self.rank, plan.reduce, out)

    def _all_reduce(self, plan: Plan, number: int, x: Array, out: Array | None) -> Steps:
        own, home = self._ready(x)
        target = out if out is not None and self._reachable(out) else None
        small = own.nbytes <= self._whole
        prepared = None
        shows = isinstance(own, np.ndarray) and not plan.header.by_library
        if shows and not small:
            prepared = shared.prepare(self._board, own, target)
            shown, result = prepared or (None, None)
            meeting = yield from self._meet(plan, number, shown, lend=True, result=result)
        else:
            meeting = yield from self._meet(plan, number, own)
        if meeting.by_library:
            return self._reduced_by_library(plan, own, meeting.blocks, out)
        if meeting.readable and prepared:
            yield from shared.all_reduce(meeting, result, plan.reduce)
            result = result if target is None else copied(result, target)
        elif meeting.readable:
            result = _reduced(plan, own, meeting.blocks, target)
        else:
            result = target if target is not None else backend_of(own).empty(own.shape, own.dtype)
            yield from self._messages.all_reduce(number, own.reshape(-1), result.reshape(-1), plan.header.reduction)
        return home(result) if out is None else copied(home(result), out)

    def reduce_scatter(
        self,
        x: Array,
        axis: int = 0,
        op: str = "sum",
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Array:
        """This rank's part, along ``axis``, of the reduction over ranks.

        The parts are even, the first ranks getting one more where they cannot be, or as ``sizes`` says. ``out``
        (contiguous; may be this rank's part of ``x``) receives the result.
        """
        plan = self._plans.get(("reduce_scatter", type(x), x.dtype, x.shape, axis, op, ints(sizes), label))
        if plan is not None and plan.at_once and suits(plan, out):
            return self._at_once(plan, x, out)
        return self._start_reduce_scatter(x, axis, op, sizes, out, label, waits=True).wait()

    def start_reduce_scatter(
        self,
        x: Array,
        axis: int = 0,
        op: str = "sum",
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Pending:
        return self._start_reduce_scatter(x, axis, op, sizes, out, label, waits=False)

    def _start_reduce_scatter(
        self, x: Array, axis: int, op: str, sizes: Sequence[int] | None, out: Array | None, label: str, waits: bool
    ) -> Pending:
        sizes = ints(sizes)
        key = "reduce_scatter", type(x), x.dtype, x.shape, axis, op, sizes, label
        try:
            plan = self._plans.get(key) or self._keep(key, self._plan_reduce_scatter(x, axis, op, sizes, label), x)
            x = x if x.dtype == plan.dtype else x.astype(plan.dtype)
            check_out("reduce_scatter", x[plan.parts[self.rank]], out)
        except UsageError as error:
            return self._refuse("reduce_scatter", label, error)
        if self.size == 1:
            return Pending.completed(x.copy() if out is None else copied(x, out))
        return (self._begin_blocking if waits else self._begin)(plan, x, out)

    def _plan_reduce_scatter(self, x: Array, axis: int, op: str, sizes: tuple[int, ...] | None, label: str) -> Plan:
        own = reducible("reduce_scatter", x, op)
        axis = self._axis("reduce_scatter", own, axis)
        parts = self._parts("reduce_scatter", own, axis, sizes)
        mine = own[parts[self.rank]]
        return Plan(
            self._header("reduce_scatter", own, reduction=op, axis=axis, sizes=sizes or ()),
            ("reduce_scatter", self.axes, label),
            self._between.reduce_scatter if self._between else self._reduce_scatter,
            self._reduced_part,
            self._reduced_part_by_library,
            payload=own.nbytes,
            sent=own.nbytes - mine.nbytes,
            shape=mine.shape,
            dtype=own.dtype,
            parts=parts,
            reduce=reducer(op, own.dtype, backend_of(own).xp if self._reachable(own) else np),
        )

    def _reduced_part(
        self, plan: Plan, x: np.ndarray, blocks: Sequence[np.ndarray], out: np.ndarray | None
    ) -> np.ndarray:
        mine = plan.parts[self.rank]
        return _reduced(plan, x, [block[mine] for block in blocks], out)

    def _reduced_part_by_library(
        self, plan: Plan, x: np.ndarray, _: Sequence[None], out: np.ndarray | None
    ) -> np.ndarray:
        own = self._ready(x)[0]
        return by_library.reduce_scatter(self.comm.library, own, plan.parts, plan.shape, plan.reduce, out)

    def _reduce_scatter(self, plan: Plan, number: int, x: Array, out: Array | None) -> Steps:
        own, home = self._ready(x)
        target = out if out is not None and self._reachable(out) else None
        small = own.nbytes <= self._inline
        copy = target is not None and not small and not shared.keeps_apart(target, own, plan.parts[self.rank])
        lend = plan.header.axis == 0  # else a part lies in too many pieces
        meeting = yield from self._meet(plan, number, own, lend=lend, copy=copy)
        if meeting.by_library:
            return self._reduced_part_by_library(plan, own, meeting.blocks, out)
        if meeting.readable:
            result = self._reduced_part(plan, own, meeting.blocks, target)
            if meeting.exposed:
                yield from meeting.end()
        else:
            result = target if target is not None else backend_of(own).empty(plan.shape, own.dtype)
            flat, parts = packed(own, plan.parts)
            yield from self._messages.reduce_scatter(number, flat, parts, result.reshape(-1), plan.header.reduction)
        return home(result) if out is None else copied(home(result), out)

    def _axis(self, operation: str, x: Array, axis: int) -> int:
        if not -x.ndim <= axis < x.ndim:
            raise UsageError(f"{operation} over {self.axes!r}: axis {axis} of an array of shape {x.shape}")
        return axis % x.ndim

    def _parts(self, operation: str, x: Array, axis: int, sizes: Sequence[int] | None) -> list[tuple[slice, ...]]:
        """Index of each rank's part of ``x`` along ``axis``."""
        if sizes is None:
            cuts = [span(x.shape[axis], self.size, r) for r in range(self.size)]
        else:
            if len(sizes) != self.size or sum(sizes) != x.shape[axis] or min(sizes) < 0:
                raise UsageError(
                    f"{operation} over {self.axes!r}: sizes {list(sizes)} must be {self.size} numbers that "
                    f"add up to {x.shape[axis]}, the array's length along axis {axis}"
                )
            cuts = spans(sizes)
        return [(slice(None),) * axis + (cut,) for cut in cuts]


def _reduced(plan: Plan, _: np.ndarray, blocks: Sequence[np.ndarray], out: np.ndarray | None) -> np.ndarray:
    """The reduction of blocks that are shaped as the result is; ``out`` may be one of them, else it overlaps none."""
    if out is None:
        out = np.empty(plan.shape, plan.dtype)
    shared.reduce_in_pieces(out, blocks, plan.reduce)
    return out


def ints(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Sizes as a header carries them."""
    return None if sizes is None else tuple(map(int, sizes))


def check_out(operation: str, result: Array, out: Array | None) -> None:
    """Raise UsageError unless ``out`` (None: there is none) can receive an array like ``result``."""
    if out is not None and (out.shape != result.shape or out.dtype != result.dtype or not takes_results(out)):
        wanted, given = (f"{a.dtype}{list(a.shape)}" for a in (result, out))
        raise UsageError(f"{operation}: out must be contiguous, writable {wanted}, is {given}")


def takes_results(out: Array) -> bool:
    """Whether ``out`` is contiguous and can be written to."""
    return out.flags.c_contiguous and getattr(out.flags, "writeable", True)  # CuPy's arrays always are
