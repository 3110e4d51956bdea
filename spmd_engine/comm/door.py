"""The one door that every call goes through: headers, device staging, and the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm import algorithms, header
from spmd_engine.comm.communicator import Communicator
from spmd_engine.comm.header import Header
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import TIMEOUT, Pending, Steps
from spmd_engine.errors import RankAborted, UsageError

INLINE = 4096  # bytes that ride behind the header: small collectives then need one exchange, not three
_PHASES = 4  # tags a collective may use
COLLECTIVE_TAGS = 4096 * _PHASES  # collectives use tags below, send and receive those above


class Door:
    """Ranks that communicate: a communicator, the mesh axes it stands for, and the account it writes to.

    ``check`` compares what ranks call before data moves; ``timeout`` is how many seconds a rank waits for
    others before it raises CommunicationTimeout (None: for ever).
    """

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
            tag = call.sequence % (COLLECTIVE_TAGS // _PHASES) * _PHASES
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
        extras = [row[header.SIZE : header.SIZE + h.inline] for row, h in zip(said, headers, strict=True)]
        for rank, h in enumerate(headers):
            if h.operation == "leave" != call.operation and h.inline:
                raise RankAborted(f"rank {rank} of {self.axes!r} failed: {extras[rank].tobytes().decode()}")
        if self.check:
            header.check(headers, self.axes)
        return headers, extras

    def _meet_only(self, call: Header, tag: int, inline: bytes = b"") -> Steps:
        yield from self._meet(call, inline, tag, always=True)

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
