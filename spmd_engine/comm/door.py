"""The one door that every call goes through: headers, device staging, and the ledger."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm import header, meeting
from spmd_engine.comm.board import LEFT, ROOM
from spmd_engine.comm.communicator import Communicator
from spmd_engine.comm.header import Call, Header
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import TIMEOUT, Pending, Steps
from spmd_engine.errors import UsageError

_PHASES = 4  # tags a collective may use
COLLECTIVE_TAGS = 4096 * _PHASES  # collectives use tags below, send and receive those above
_HEADERS = 512  # headers that are kept at most, for calls that come again


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
        self._board = comm.board
        self._inline = ROOM if comm.board else meeting.INLINE  #: bytes of data that travel with a header
        self._headers: dict[tuple, Header] = {}

    def _begin(
        self,
        steps: Callable[[Call, int], Steps],
        call: Call,
        label: str,
        *,
        payload: int = 0,
        sent: int | Callable[[Array], int] = 0,
        tag: int | None = None,
        operation: str | None = None,
    ) -> Pending:
        """Start ``steps``; write to the ledger when they end. ``sent`` may need the result to be known."""
        meets = tag is None
        if meets:
            tag = call.number % (COLLECTIVE_TAGS // _PHASES) * _PHASES
        where = operation or call.header.operation, self.axes, label

        def on_result(result: Any) -> None:
            self.ledger.record(*where, payload=payload, sent=sent(result) if callable(sent) else sent)

        def on_wait(seconds: float) -> None:
            self.ledger.record_wait(*where, seconds)

        def describe() -> str:
            what = operation or str(call)
            return f"{what} over {self.axes!r}{f' ({label})' if label else ''}, group rank {self.rank} of {self.size}"

        on_end = partial(self._board.say, call.number, LEFT) if meets and self._board else None
        pending = Pending(self.comm, steps(call, tag), describe, self.timeout, on_result, on_end, on_wait)
        return self.comm.progress.begin(pending)

    def _call(
        self,
        operation: str,
        x: Array | None = None,
        *,
        reduction: str = "",
        axis: int = 0,
        concat_axis: int = 0,
        root: int = 0,
        sizes: tuple[int, ...] = (),
        always: bool = False,
    ) -> Call:
        """The next call of the group. ``always``: its ranks meet even with checks switched off."""
        number = self.comm.next_call() if operation != "send" else 0
        described = (x.dtype, x.shape) if x is not None else None
        small = x is not None and x.nbytes <= self._inline and self._meets(always) and self._shown(x) is not None
        key = operation, described, reduction, axis, concat_axis, root, sizes, small
        if key not in self._headers:
            if x is not None and x.ndim > header.MAX_DIMS:
                raise UsageError(f"{operation}: {x.ndim} dimensions; at most {header.MAX_DIMS} can be told to others")
            dtype = header.dtype_name(x.dtype) if x is not None else ""
            shape = x.shape if x is not None else None
            if len(self._headers) >= _HEADERS:
                self._headers.clear()
            self._headers[key] = Header(
                operation, reduction, dtype, shape, axis, concat_axis, root, sizes, x.nbytes if small else 0
            )
        return Call(number, self._headers[key])

    def _meets(self, always: bool) -> bool:
        return always or self.check or self._board is not None

    def _meet(self, call: Call, x: Array | None, tag: int, *, always: bool = False, copy: bool = False) -> Steps:
        """Tell the others of ``call``, show them ``x``, and hear them: steps to a Meeting."""
        shown = self._shown(x)
        if self._board is not None:
            return meeting.on_board(self._board, call, shown, self.axes, self.check, copy)
        if not self._meets(always):
            return meeting.not_at_all()
        return meeting.by_messages(self.comm, call, shown, self.axes, self.check, tag)

    def _meet_only(self, call: Call, tag: int, text: np.ndarray | None = None) -> Steps:
        yield from self._meet(call, text, tag, always=True)

    def _shown(self, x: Array | None) -> np.ndarray | None:
        """``x`` if it is host memory, which others may be shown; device memory goes by messages."""
        return x if isinstance(x, np.ndarray) else None

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
