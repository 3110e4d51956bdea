"""Collectives of a group of ranks, whatever the transport.

Every call takes and returns local arrays, blocks as the method and ``start_...`` as the same thing begun now
and finished by ``.wait()``. Input may be of any dtype NumPy knows, not contiguous, uneven, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, backend_of
from spmd_engine.comm import algorithms
from spmd_engine.comm.algorithms import span
from spmd_engine.comm.header import Call, Header
from spmd_engine.comm.meeting import INLINE
from spmd_engine.comm.pending import Pending, Steps
from spmd_engine.comm.reductions import Reductions, check_out, copied, ints
from spmd_engine.errors import UsageError


class Group(Reductions):
    """All collectives, besides the messages between two ranks."""

    def barrier(self) -> None:
        """Return once every rank of the group has come here."""
        self.start_barrier().wait()

    def start_barrier(self, label: str = "") -> Pending:
        if self.size == 1:
            return Pending.completed(None)

        return self._begin(self._meet_only, self._call("barrier"), label)

    def leave(self, reason: str = "") -> None:
        """Say that this rank's program ends. If another rank is in a collective, both get a MismatchError.

        With a ``reason``, an error that this rank reports, the others get RankAborted instead.
        """
        if self.size > 1:
            text = np.frombuffer(reason.encode(errors="replace")[:INLINE], np.uint8)
            if not reason:
                self.comm.announce_end()  # for those who wait in other groups
            call = Call(self.comm.next_call(), Header("leave", inline=text.size))
            meeting = self._begin(partial(self._meet_only, text=text), call, "")
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

        def steps(call: Call, tag: int) -> Steps:
            meeting = yield from self._meet(call, mine, tag, always=True)
            block = meeting.blocks[root]
            where = home if self.comm.device_aware and block is None else CPU
            data = mine.copy() if mine is not None else where.empty(*meeting.headers[root].array_type)
            if block is None:
                yield from algorithms.broadcast(self.comm, data.reshape(-1), root, tag + 1)
            elif mine is None:
                data[...] = block
            yield from meeting.end()
            return home.asarray(data)

        def sent(result: Array) -> int:  # the root hands out the parts, then everyone passes its part on
            own = span(result.size, self.size, self.rank)
            part = (own.stop - own.start) * result.itemsize
            return result.nbytes - part + part * (self.size - 1) if self.rank == root else part * (self.size - 2)

        call = self._call("broadcast", mine, root=root, always=True)
        return self._begin(steps, call, label, payload=mine.nbytes if mine is not None else 0, sent=sent)

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
        axis = self._axis("all_gather", x, axis)
        if sizes is not None and (len(sizes) != self.size or sizes[self.rank] != x.shape[axis]):
            raise UsageError(
                f"all_gather over {self.axes!r}: sizes {list(sizes)} must be {self.size} numbers; number "
                f"{self.rank} is {x.shape[axis]}, the length of this rank's array along axis {axis}"
            )
        if out is not None and (axis or out.dtype != x.dtype or not out.flags.c_contiguous):
            raise UsageError(f"all_gather: out must be a contiguous array of {x.dtype}, and axis 0")
        if self.size == 1:
            check_out("all_gather", x, out)
            return Pending.completed(x.copy() if out is None else copied(x, out))
        own, home = self._ready(x)
        into = out if out is not None and self._host_memory_or_aware(out) else None

        def steps(call: Call, tag: int) -> Steps:
            meeting = yield from self._meet(call, own, tag, always=sizes is None)
            lengths = [each.shape[axis] for each in meeting.headers] if meeting.headers else sizes
            ends = np.cumsum([0, *lengths]).tolist()
            xp = backend_of(own).xp
            shape = (*own.shape[:axis], ends[-1], *own.shape[axis + 1 :])
            whole = into if into is not None else xp.empty(shape, own.dtype)
            if whole.shape != shape:
                raise UsageError(f"all_gather: out has shape {whole.shape}, the result {shape}")
            before = (slice(None),) * axis
            spaces = [whole[(*before, slice(*pair))] for pair in zip(ends, ends[1:], strict=False)]
            copied(own, spaces[self.rank])
            missing = [None] * self.size
            for r, (space, block) in enumerate(zip(spaces, meeting.blocks or missing, strict=True)):
                if block is not None:
                    if r != self.rank and space.size:
                        space[...] = block
                else:  # received straight into the result, if it lies there in one piece
                    missing[r] = space if axis == 0 else xp.empty(space.shape, own.dtype)
            if any(each is not None for each in missing):
                outgoing = own if missing[self.rank] is not None else None
                yield from algorithms.exchange(self.comm, [outgoing] * self.size, missing, tag + 1)
                for r, each in enumerate(missing):
                    if axis and each is not None and r != self.rank:
                        spaces[r][...] = each
            yield from meeting.end()
            result = home(whole)
            return result if out is None or result is out else copied(result, out)

        call = self._call("all_gather", own, axis=axis, always=sizes is None)
        return self._begin(steps, call, label, payload=own.nbytes, sent=own.nbytes * (self.size - 1))

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
        own, home = self._ready(x)

        def steps(call: Call, tag: int) -> Steps:
            xp = backend_of(own).xp
            meeting = yield from self._meet(call, own, tag, always=True)
            incoming: list[Array] = []
            missing: list[Array | None] = [None] * self.size
            for r, (theirs, block) in enumerate(zip(meeting.headers, meeting.blocks, strict=True)):
                shape = list(theirs.shape)
                cut = span(shape[axis], self.size, self.rank)
                if theirs.sizes:
                    cut = slice(sum(theirs.sizes[: self.rank]), sum(theirs.sizes[: self.rank + 1]))
                shape[axis] = cut.stop - cut.start
                if r == self.rank:
                    incoming.append(own[parts[r]])
                elif block is not None:
                    incoming.append(block[(slice(None),) * axis + (cut,)])
                else:
                    missing[r] = xp.empty(shape, own.dtype)
                    incoming.append(missing[r])
            if not meeting.readable:
                sends = meeting.blocks[self.rank] is None
                outgoing = [xp.ascontiguousarray(own[part]) if sends else None for part in parts]
                yield from algorithms.exchange(self.comm, outgoing, missing, tag + 1)
            result = xp.concatenate(incoming, axis=concat, dtype=own.dtype)
            yield from meeting.end()
            return home(result)

        sent = own.nbytes - own[parts[self.rank]].nbytes
        call = self._call("all_to_all", own, axis=axis, concat_axis=concat, sizes=ints(splits), always=True)
        return self._begin(steps, call, label, payload=own.nbytes, sent=sent)
