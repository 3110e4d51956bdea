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
                whole = into if into is not None else xp.empty(shape, own.dtype)
                if whole.shape != tuple(shape):
                    raise UsageError(f"all_gather: out has shape {whole.shape}, the result {tuple(shape)}")
                ends = np.cumsum([0, *lengths])
                blocks = [whole[ends[r] : ends[r + 1]] for r in range(self.size)]
            else:
                for length in lengths:
                    shape[axis] = length
                    blocks.append(xp.empty(shape, own.dtype))
            copied(own, blocks[self.rank])
            wanted: list[Array | None] = list(blocks)
            for r, extra in enumerate(extras):
                if headers[r].inline:
                    blocks[r].reshape(-1).view(xp.uint8)[...] = extra
                    wanted[r] = None
            outgoing = [None if inline else own] * self.size
            yield from algorithms.exchange(self.comm, outgoing, wanted, tag + 1)
            result = home(whole if axis == 0 else xp.concatenate(blocks, axis=axis, dtype=own.dtype))
            return result if out is None or result is out else copied(result, out)

        call = self._header("all_gather", own, axis=axis)
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
        call = self._header("all_to_all", own, axis=axis, concat_axis=concat, sizes=ints(splits))
        return self._begin(steps, call, label, payload=own.nbytes, sent=sent)
