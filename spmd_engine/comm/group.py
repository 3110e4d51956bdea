"""Collectives of a group of ranks, whatever the transport.

Every call takes and returns local arrays, blocks as the method and ``start_...`` as the same thing begun now
and finished by ``.wait()``. Input may be of any dtype NumPy knows, not contiguous, uneven, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, backend_of
from spmd_engine.comm import algorithms, header
from spmd_engine.comm.algorithms import span
from spmd_engine.comm.door import INLINE
from spmd_engine.comm.header import Header
from spmd_engine.comm.messages import Messages
from spmd_engine.comm.pending import Pending, Steps
from spmd_engine.errors import UsageError


class Group(Messages):
    """All collectives, besides the messages between two ranks."""

    def barrier(self) -> None:
        """Return once every rank of the group has come here."""
        self.start_barrier().wait()

    def start_barrier(self, label: str = "") -> Pending:
        if self.size == 1:
            return Pending.completed(None)

        return self._begin(self._meet_only, self._header("barrier"), label)

    def leave(self, reason: str = "") -> None:
        """Say that this rank's program ends. If another rank is in a collective, both get a MismatchError.

        With a ``reason``, an error that this rank reports, the others get RankAborted instead.
        """
        if self.size > 1:
            steps = partial(self._meet_only, inline=reason.encode(errors="replace")[:INLINE])
            if not reason:
                self.comm.announce_end()  # for those who wait in other groups
            meeting = self._begin(steps, self._header("leave"), "")
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

        def steps(call: Header, tag: int) -> Steps:
            small = mine is not None and mine.nbytes <= INLINE and self._host_memory(mine)
            headers, extras = yield from self._meet(call, mine.tobytes() if small else b"", tag, always=True)
            said = headers[root]
            where = home if self.comm.device_aware and not said.inline else CPU
            data = mine.copy() if mine is not None else where.empty(said.shape, header.np_dtype(said.dtype))
            if said.inline and mine is None:
                data.reshape(-1).view(np.uint8)[...] = extras[root]
            elif not said.inline:
                yield from algorithms.broadcast(self.comm, data.reshape(-1), root, tag + 1)
            return home.asarray(data)

        def sent(result: Array) -> int:  # the root hands out the parts, then everyone passes its part on
            own = span(result.size, self.size, self.rank)
            part = (own.stop - own.start) * result.itemsize
            return result.nbytes - part + part * (self.size - 1) if self.rank == root else part * (self.size - 2)

        call = self._header("broadcast", mine, root=root)
        return self._begin(steps, call, label, payload=mine.nbytes if mine is not None else 0, sent=sent)

    def all_gather(
        self, x: Array, axis: int = 0, *, sizes: Sequence[int] | None = None, label: str = ""
    ) -> Array:
        """Everyone's ``x`` joined along ``axis`` in rank order. Shards may differ along ``axis`` and be empty.

        ``sizes`` (each rank's length along ``axis``) spares the exchange of shapes where checks are switched
        off.
        """
        return self.start_all_gather(x, axis, sizes=sizes, label=label).wait()

    def start_all_gather(
        self, x: Array, axis: int = 0, *, sizes: Sequence[int] | None = None, label: str = ""
    ) -> Pending:
        axis = self._axis("all_gather", x, axis)
        if sizes is not None and (len(sizes) != self.size or sizes[self.rank] != x.shape[axis]):
            raise UsageError(
                f"all_gather over {self.axes!r}: sizes {list(sizes)} must be {self.size} numbers; number "
                f"{self.rank} is {x.shape[axis]}, the length of this rank's array along axis {axis}"
            )
        if self.size == 1:
            return Pending.completed(x.copy())
        own, home = self._ready(x)

        def steps(call: Header, tag: int) -> Steps:
            small = own.nbytes <= INLINE and self._host_memory(own) and (self.check or sizes is None)
            inline = own.tobytes() if small else b""
            headers, extras = yield from self._meet(call, inline, tag, always=sizes is None)
            lengths = [h.shape[axis] for h in headers] if headers else sizes
            xp = backend_of(own).xp
            shape = list(own.shape)
            blocks = []
            if axis == 0:  # receive straight into the result
                shape[0] = sum(lengths)
                out = xp.empty(shape, own.dtype)
                ends = np.cumsum([0, *lengths])
                blocks = [out[ends[r] : ends[r + 1]] for r in range(self.size)]
            else:
                for length in lengths:
                    shape[axis] = length
                    blocks.append(xp.empty(shape, own.dtype))
            blocks[self.rank][...] = own
            wanted: list[Array | None] = list(blocks)
            for r, extra in enumerate(extras):
                if headers[r].inline:
                    blocks[r].reshape(-1).view(xp.uint8)[...] = extra
                    wanted[r] = None
            outgoing = [None if inline else own] * self.size
            yield from algorithms.exchange(self.comm, outgoing, wanted, tag + 1)
            return home(out if axis == 0 else xp.concatenate(blocks, axis=axis, dtype=own.dtype))

        call = self._header("all_gather", own, axis=axis)
        return self._begin(steps, call, label, payload=own.nbytes, sent=own.nbytes * (self.size - 1))

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
        if out is not None and (out.shape != x.shape or out.dtype != x.dtype or not out.flags.c_contiguous):
            wanted, given = (f"{a.dtype}{list(a.shape)}" for a in (x, out))
            raise UsageError(f"all_reduce: out must be contiguous {wanted}, is {given}")
        if self.size == 1:
            result = x.copy() if out is None else out
            if out is not None and out is not x:
                out[...] = x
            return Pending.completed(result)
        own, home = self._ready(x)
        in_place = out is not None and self._host_memory_or_aware(out)
        target = out if in_place else backend_of(own).empty(own.shape, own.dtype)

        def steps(call: Header, tag: int) -> Steps:
            small = own.nbytes <= INLINE and self._host_memory(own)
            headers, extras = yield from self._meet(call, own.tobytes() if small else b"", tag, always=small)
            if small:
                blocks = [e.view(own.dtype).reshape(own.shape) for e in extras]
                blocks[self.rank] = own
                if own.size:
                    algorithms.reduce_into(target, blocks, op)
            else:
                yield from algorithms.all_reduce(self.comm, own.reshape(-1), target.reshape(-1), op, tag + 1)
            if in_place:
                return out
            result = home(target)
            if out is not None:
                out[...] = result
            return result if out is None else out

        mine = span(own.size, self.size, self.rank)
        part = (mine.stop - mine.start) * own.itemsize
        sent = own.nbytes - part + part * (self.size - 1)
        call = self._header("all_reduce", own, reduction=op)
        return self._begin(steps, call, label, payload=own.nbytes, sent=sent)

    def reduce_scatter(
        self, x: Array, axis: int = 0, op: str = "sum", *, sizes: Sequence[int] | None = None, label: str = ""
    ) -> Array:
        """This rank's part, along ``axis``, of the reduction over ranks.

        The parts are even, the first ranks getting one more where they cannot be, or as ``sizes`` says.
        """
        return self.start_reduce_scatter(x, axis, op, sizes=sizes, label=label).wait()

    def start_reduce_scatter(
        self, x: Array, axis: int = 0, op: str = "sum", *, sizes: Sequence[int] | None = None, label: str = ""
    ) -> Pending:
        x = algorithms.reducible("reduce_scatter", x, op)
        axis = self._axis("reduce_scatter", x, axis)
        parts = self._parts("reduce_scatter", x, axis, sizes)
        if self.size == 1:
            return Pending.completed(x.copy())
        own, home = self._ready(x)

        def steps(call: Header, tag: int) -> Steps:
            xp = backend_of(own).xp
            yield from self._meet(call, b"", tag)
            blocks = [xp.ascontiguousarray(own[part]) for part in parts]
            out = xp.empty(blocks[self.rank].shape, own.dtype)
            yield from algorithms.reduce_scatter(self.comm, blocks, out, op, tag + 1)
            return home(out)

        sent = own.nbytes - own[parts[self.rank]].nbytes
        call = self._header("reduce_scatter", own, reduction=op, axis=axis, sizes=_ints(sizes))
        return self._begin(steps, call, label, payload=own.nbytes, sent=sent)

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
        axis = self._axis("all_to_all", x, axis)
        concat = axis if concat_axis is None else self._axis("all_to_all", x, concat_axis)
        parts = self._parts("all_to_all", x, axis, splits)
        if self.size == 1:
            return Pending.completed(x.copy())
        if splits is not None and 8 * self.size > INLINE:
            raise UsageError(f"all_to_all: explicit splits are limited to {INLINE // 8} ranks")
        own, home = self._ready(x)

        def steps(call: Header, tag: int) -> Steps:
            xp = backend_of(own).xp
            headers, _ = yield from self._meet(call, b"", tag, always=True)
            blocks = [xp.ascontiguousarray(own[part]) for part in parts]
            incoming = []
            for r in range(self.size):
                shape = list(blocks[self.rank].shape)
                theirs = headers[r].shape
                shape[concat] = theirs[concat]
                cut = span(theirs[axis], self.size, self.rank)
                shape[axis] = headers[r].sizes[self.rank] if headers[r].sizes else cut.stop - cut.start
                incoming.append(xp.empty(shape, own.dtype))
            incoming[self.rank] = blocks[self.rank]
            yield from algorithms.exchange(self.comm, blocks, incoming, tag + 1)
            return home(xp.concatenate(incoming, axis=concat, dtype=own.dtype))

        sent = own.nbytes - own[parts[self.rank]].nbytes
        call = self._header("all_to_all", own, axis=axis, concat_axis=concat, sizes=_ints(splits))
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


def _ints(sizes: Sequence[int] | None) -> tuple[int, ...]:
    return () if sizes is None else tuple(map(int, sizes))
