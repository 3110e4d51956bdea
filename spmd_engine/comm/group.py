"""The one door for every collective: checks, device staging and the ledger, whatever the transport.

Every call takes and returns local arrays, blocks as the method and ``start_...`` as the same thing begun now
and finished by ``.wait()``. Input may be of any dtype NumPy knows, not contiguous, uneven, or empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.comm import algorithms, header
from spmd_engine.comm.algorithms import span
from spmd_engine.comm.communicator import Communicator
from spmd_engine.comm.header import Header
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import TIMEOUT, Pending, Steps
from spmd_engine.errors import UsageError

INLINE = 4096  # bytes that ride behind the header: small collectives then need one exchange, not three
_PHASES = 4  # tags a collective may use
_COLLECTIVE_TAGS = 4096 * _PHASES  # collectives use tags below, send and receive those above


class Group:
    """Ranks that communicate: a communicator, the mesh axes it stands for, and the account it writes to."""

    def __init__(
        self,
        comm: Communicator,
        axes: str,
        ledger: Ledger,
        *,
        check: bool = True,
        timeout: float | None = TIMEOUT,
    ) -> None:
        self.comm, self.axes, self.ledger, self.check, self.timeout = comm, axes, ledger, check, timeout
        self.rank, self.size = comm.rank, comm.size

    # --- collectives -------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return once every rank of the group has come here."""
        self.start_barrier().wait()

    def start_barrier(self, label: str = "") -> Pending:
        if self.size == 1:
            return Pending.completed(None)

        return self._begin(self._meet_only, self._header("barrier"), label)

    def leave(self) -> None:
        """Say that this rank's program ends. If another rank is in a collective, both get a MismatchError."""
        if self.size > 1:
            self._begin(self._meet_only, self._header("leave"), "").wait()

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
        x = _summable("all_reduce", x, op)
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
        x = _summable("reduce_scatter", x, op)
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

    # --- between two ranks -------------------------------------------------------------------------------

    def send(self, to: int, x: Array, *, label: str = "") -> None:
        """Send ``x``, with its shape and dtype, to rank ``to`` of the group."""
        self.start_send(to, x, label=label).wait()

    def start_send(self, to: int, x: Array, *, label: str = "") -> Pending:
        self._peer("send", to)
        own, _ = self._ready(x)
        tag = self._message_tag("to", to)

        def steps(call: Header, tag: int) -> Steps:
            said = np.frombuffer(call.pack(), np.uint8)
            backend_of(own).synchronize()
            requests = self.comm.start_send(said, to, tag)
            yield requests + (self.comm.start_send(own, to, tag + 1) if own.size else [])

        call = self._header("send", own)
        return self._begin(steps, call, label, payload=own.nbytes, sent=own.nbytes, tag=tag)

    def receive(self, source: int, *, like: Backend = CPU, label: str = "") -> Array:
        """The next array that rank ``source`` sends here; shape and dtype come with it. ``like``: where to."""
        return self.start_receive(source, like=like, label=label).wait()

    def start_receive(self, source: int, *, like: Backend = CPU, label: str = "") -> Pending:
        self._peer("receive", source)
        tag = self._message_tag("from", source)

        def steps(call: Header, tag: int) -> Steps:
            said = np.empty(header.SIZE, np.uint8)
            yield self.comm.start_receive(said, source, tag)
            theirs = Header.unpack(said.tobytes())
            where = like if self.comm.device_aware else CPU
            data = where.empty(theirs.shape, header.np_dtype(theirs.dtype))
            if data.size:
                where.synchronize()
                yield self.comm.start_receive(data, source, tag + 1)
            return like.asarray(data)

        return self._begin(steps, self._header("send"), label, tag=tag, operation="receive")

    # --- what they share ---------------------------------------------------------------------------------

    def _begin(
        self,
        steps: Callable[[Header, int], Steps],
        call: Header,
        label: str,
        *,
        payload: int = 0,
        sent: int | Callable[[Array], int] = 0,
        tag: int | None = None,
        operation: str | None = None,
    ) -> Pending:
        """Start ``steps``; write to the ledger when they end. ``sent`` may need the result to be known."""
        if tag is None:
            tag = call.sequence % (_COLLECTIVE_TAGS // _PHASES) * _PHASES
        name = operation or call.operation
        where = name, self.axes, label

        def on_result(result: Any) -> None:
            size = sent(result) if callable(sent) else sent
            self.ledger.record(*where, payload=payload, sent=size)

        def on_wait(seconds: float) -> None:
            self.ledger.record_wait(*where, seconds)

        def describe() -> str:
            what = name if operation else str(call)
            return f"{what} over {self.axes!r}{f' ({label})' if label else ''}, group rank {self.rank} of {self.size}"

        pending = Pending(self.comm, steps(call, tag), describe, self.timeout, on_result, on_wait)
        return self.comm.progress.begin(pending)

    def _header(self, operation: str, x: Array | None = None, **fields: Any) -> Header:
        sequence = self.comm.next_call() if operation != "send" else 0
        dtype = header.dtype_name(x.dtype) if x is not None else ""
        if x is not None and x.ndim > header.MAX_DIMS:
            raise UsageError(f"{operation}: {x.ndim} dimensions; at most {header.MAX_DIMS} can be described to others")
        return Header(sequence, operation, dtype=dtype, shape=x.shape if x is not None else None, **fields)

    def _meet(self, call: Header, inline: bytes, tag: int, always: bool = False) -> Steps:
        """Exchange headers, with ``inline`` behind this rank's; check that they agree.

        Returns everyone's headers and inline bytes; with checks switched off, two empty lists unless
        ``always`` (where the operation itself needs them).
        """
        if not (self.check or always):
            return [], []
        inline = inline or np.array(call.sizes, np.int64).tobytes()[:INLINE]
        call = Header(**{**call.__dict__, "inline": len(inline)})
        own = np.frombuffer(call.pack() + inline, np.uint8)
        said = np.empty((self.size, header.SIZE + INLINE), np.uint8)
        yield from algorithms.exchange(self.comm, [own] * self.size, list(said), tag)
        said[self.rank, : own.size] = own
        headers = [Header.unpack(row.tobytes()) for row in said]
        if self.check:
            header.check(headers, self.axes)
        return headers, [
            row[header.SIZE : header.SIZE + h.inline] for row, h in zip(said, headers, strict=True)
        ]

    def _meet_only(self, call: Header, tag: int) -> Steps:
        yield from self._meet(call, b"", tag, always=True)

    def _ready(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        """``x`` contiguous where the transport can read it, and what brings a result home to its device."""
        backend = backend_of(x)
        if backend.on_device and not self.comm.device_aware:
            return self._host(x), backend.asarray
        contiguous = backend.xp.ascontiguousarray(x)
        return contiguous.reshape(x.shape), lambda result: result  # ascontiguousarray makes scalars 1-D

    def _host(self, x: Array) -> np.ndarray:
        backend = backend_of(x)
        if not backend.on_device:
            return np.ascontiguousarray(x).reshape(np.shape(x))
        staged = backend.pinned_empty(x.shape, x.dtype)
        backend.synchronize()
        backend.copy_to_host(x, staged)
        return staged

    def _host_memory(self, x: Array) -> bool:
        return not backend_of(x).on_device

    def _host_memory_or_aware(self, x: Array) -> bool:
        return self.comm.device_aware or self._host_memory(x)

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

    def _peer(self, operation: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"{operation} over {self.axes!r}: rank {rank} is not one of {self.size} ranks")
        if rank == self.rank and self.size == 1:
            raise UsageError(f"{operation} over {self.axes!r}: a group of one rank has nobody to talk to")

    def _message_tag(self, way: str, rank: int) -> int:
        return _COLLECTIVE_TAGS + self.comm.next_message(way, rank) % 4096 * 2


def _ints(sizes: Sequence[int] | None) -> tuple[int, ...]:
    return () if sizes is None else tuple(map(int, sizes))


def _summable(operation: str, x: Array, op: str) -> Array:
    if op not in header.REDUCTIONS[1:]:
        raise UsageError(f"{operation}: unknown op {op!r}; choose one of {', '.join(header.REDUCTIONS[1:])}")
    kind = x.dtype.kind
    if kind == "b" and op in ("sum", "prod", "mean"):
        x = x.astype(np.int64)
    if op == "mean" and x.dtype.kind in "iu":
        x = x.astype(np.float64)
    return x
