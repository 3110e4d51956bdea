"""Collectives that reduce: all_reduce and reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm import algorithms, shared
from spmd_engine.comm.algorithms import span
from spmd_engine.comm.header import Call
from spmd_engine.comm.messages import Messages
from spmd_engine.comm.pending import Pending, Steps
from spmd_engine.errors import UsageError


class Reductions(Messages):
    """Sums and their kin over a group of ranks, always made in rank order."""

    def all_reduce(self, x: Array, op: str = "sum", *, out: Array | None = None, label: str = "") -> Array:
        """The sum, mean, max, min or prod over ranks, element by element, in rank order: equal on all ranks.

        ``out`` (contiguous, may be ``x`` itself) receives the result. bool is counted as int64; the mean of
        integers is float64; float16 and bfloat16 are accumulated in float32.
        """
        return self.start_all_reduce(x, op, out=out, label=label).wait()

    def start_all_reduce(
        self, x: Array, op: str = "sum", *, out: Array | None = None, label: str = ""
    ) -> Pending:
        x = algorithms.reducible("all_reduce", x, op)
        check_out("all_reduce", x, out)
        if self.size == 1:
            return Pending.completed(x.copy() if out is None else copied(x, out))
        own, home = self._ready(x)
        in_place = out is not None and self._host_memory_or_aware(out)
        target = out if in_place else None
        small = own.nbytes <= self._inline

        def steps(call: Call, tag: int) -> Steps:
            shown = own
            if self._board and not small and self._shown(own) is not None:
                shown = shared.workspace(self._board, own, target)
            meeting = yield from self._meet(call, shown, tag, always=small)
            if meeting.readable and not small:
                yield from shared.reduce_in_place(meeting, op)
                result = shown if target is None else copied(shown, target)
            else:
                result = target if target is not None else backend_of(own).empty(own.shape, own.dtype)
                if meeting.readable:
                    algorithms.reduce_apart(result, meeting.blocks, op)
                elif own.size:
                    yield from algorithms.all_reduce(self.comm, own.reshape(-1), result.reshape(-1), op, tag + 1)
            return home(result) if out is None else copied(home(result), out)

        mine = span(own.size, self.size, self.rank)
        part = (mine.stop - mine.start) * own.itemsize
        sent = own.nbytes - part + part * (self.size - 1)
        call = self._call("all_reduce", own, reduction=op, always=small)
        return self._begin(steps, call, label, payload=own.nbytes, sent=sent)

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
        return self.start_reduce_scatter(x, axis, op, sizes=sizes, out=out, label=label).wait()

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
        x = algorithms.reducible("reduce_scatter", x, op)
        axis = self._axis("reduce_scatter", x, axis)
        parts = self._parts("reduce_scatter", x, axis, sizes)
        mine = x[parts[self.rank]]
        check_out("reduce_scatter", mine, out)
        if self.size == 1:
            return Pending.completed(x.copy() if out is None else copied(x, out))
        own, home = self._ready(x)
        target = out if out is not None and self._host_memory_or_aware(out) else None
        small = own.nbytes <= self._inline

        def steps(call: Call, tag: int) -> Steps:
            copy = target is not None and self._board and not shared.keeps_apart(target, own, parts[self.rank])
            meeting = yield from self._meet(call, own, tag, always=small, copy=copy)
            xp = backend_of(own).xp
            reduced = target if target is not None else xp.empty(mine.shape, own.dtype)
            if meeting.readable:
                shared.reduce_parts(reduced, [block[parts[self.rank]] for block in meeting.blocks], op)
            else:
                blocks = [xp.ascontiguousarray(own[part]) for part in parts]
                yield from algorithms.reduce_scatter(self.comm, blocks, reduced, op, tag + 1)
            yield from meeting.end()
            return home(reduced) if out is None else copied(home(reduced), out)

        sent = own.nbytes - own[parts[self.rank]].nbytes
        call = self._call("reduce_scatter", own, reduction=op, axis=axis, sizes=ints(sizes), always=small)
        return self._begin(steps, call, label, payload=own.nbytes, sent=sent)

    def _axis(self, operation: str, x: Array, axis: int) -> int:
        if not -x.ndim <= axis < x.ndim:
            raise UsageError(f"{operation} over {self.axes!r}: axis {axis} of an array of shape {x.shape}")
        return axis % x.ndim

    def _parts(self, operation: str, x: Array, axis: int, sizes: Sequence[int] | None) -> list[tuple[slice, ...]]:
        """Index of each rank's part of ``x`` along ``axis``."""
        if sizes is None:
            cuts = [span(x.shape[axis], self.size, r) for r in range(self.size)]
        else:
            ends = np.cumsum([0, *sizes]).tolist()
            if len(sizes) != self.size or ends[-1] != x.shape[axis] or min(sizes) < 0:
                raise UsageError(
                    f"{operation} over {self.axes!r}: sizes {list(sizes)} must be {self.size} numbers that "
                    f"add up to {x.shape[axis]}, the array's length along axis {axis}"
                )
            cuts = [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]
        return [(slice(None),) * axis + (cut,) for cut in cuts]


def ints(sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Sizes as a header carries them."""
    return () if sizes is None else tuple(map(int, sizes))


def copied(x: Array, out: Array) -> Array:
    """``out``, with the values of ``x``, which may be ``out`` itself."""
    if x is not out:
        out[...] = x
    return out


def check_out(operation: str, result: Array, out: Array | None) -> None:
    """Raise UsageError unless ``out`` (None: there is none) can receive an array like ``result``."""
    if out is not None and (out.shape != result.shape or out.dtype != result.dtype or not out.flags.c_contiguous):
        wanted, given = (f"{a.dtype}{list(a.shape)}" for a in (result, out))
        raise UsageError(f"{operation}: out must be contiguous {wanted}, is {given}")
