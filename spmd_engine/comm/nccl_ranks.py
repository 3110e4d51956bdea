"""Ranks that NCCL connects: the host queues the transfers of their calls on a stream, and does not wait.

A communicator of NCCL has its own stream, which waits for the event at which a call's arrays are complete; the stream
of computations waits for the call's event when its result is used. So the host runs ahead of the devices, and waits for
them only where it reads values. There it looks for errors of NCCL, and if ranks do not arrive, or have ended or failed,
it aborts all communicators: their kernels end, and so can the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from threading import Thread, get_ident
from typing import Any, NamedTuple

import numpy as np

from spmd_engine.arrays.backend import Array, CudaBackend
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.agreement.tree import agree
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.exchange import EXPLANATION, tag
from spmd_engine.comm.pending import CallOrder, Condition, Operation, Steps
from spmd_engine.errors import SpmdError
from spmd_engine.runtime.activity import Line

KEY_BYTES = 128  #: of the id of ranks that NCCL connects

_open: list[NcclRanks] = []  # of this process


class QueuedCall(NamedTuple):
    """A call or a message whose transfers are queued."""

    number: int  #: of the call in its communicator, or of the message in its pair
    what: str  #: the call, as text
    text: int  #: number of its description, see ``Activity.called``
    timeout: float | None
    event: Any = None  #: done when they are complete


class NcclRanks:
    """The ranks of a communicator, which NCCL connects in their first call. ``backend``: of this rank's device;
    ``call_order``: of their calls.

    Where the thread that creates it waits for the device, it watches these ranks.
    """

    def __init__(self, comm: Communicator, call_order: CallOrder, backend: CudaBackend) -> None:
        self.comm, self.call_order, self.backend, self.library = comm, call_order, backend, backend.nccl
        self.members = list(range(comm.size))  #: ranks of ``comm``, in NCCL's order
        self.communicator: Any = None  #: NCCL's
        self.stream: Any = None
        self.thread, self._works, self._error = get_ident(), deque[QueuedCall](), None
        self._pairs: dict[tuple[int, int], NcclPair] = {}
        comm.progress.aborts.append(self.abort)
        backend.await_event = _await_event
        _open.append(self)

    def close(self) -> None:
        """End its use, when its work is complete or aborted."""
        for pair in self._pairs.values():
            pair.close()
        if self._error is None and self._works:
            _await_event(self._works[-1].event)
        self.comm.progress.aborts.remove(self.abort)
        _open.remove(self)
        if self.communicator is not None:
            self.communicator.destroy()

    def pair(self, sender: int, receiver: int) -> NcclPair:
        """What moves the messages from one rank to another."""
        ranks = sender, receiver
        if ranks not in self._pairs:
            self._pairs[ranks] = NcclPair(self, ranks)
        return self._pairs[ranks]

    def abort(self, cause: SpmdError) -> None:
        """End the kernels of its work; its later calls raise ``cause``."""
        if self._error is None and self.communicator is not None:
            self._error = cause
            self.communicator.abort()

    def first_work(self) -> QueuedCall | None:
        """The first work that is not complete."""
        while self._works and self._works[0].event.done:
            self._works.popleft()
        return self._works[0] if self._works else None

    def check(self) -> None:
        """Raise SpmdError if it was aborted, or if NCCL has found an error, such as a lost connection."""
        if self._error is None and self.communicator is not None:
            try:
                self.communicator.check_async_error()
            except self.library.NcclError as error:
                self.comm.progress.abort(self._failure(error))
        if self._error is not None:
            raise self._error

    def share_key(self, number: int) -> Steps:
        """NCCL's id of these ranks, from the first of them to all, in call ``number``."""
        row = self.library.get_unique_id() if self.comm.rank == 0 else b""
        words, phase = Signature("barrier").words, tag(number, EXPLANATION)  # free, as the ranks have agreed
        _, key = yield from agree(self.comm, words, np.frombuffer(row, np.uint8), phase)
        return key.tobytes()

    def connect(self, key: bytes) -> Steps:
        """Create NCCL's communicator and its stream. Collective.

        NCCL waits inside for all ranks: in a thread of its own, so that this rank can report for whom it waits.
        """
        made: list[Any] = []

        def create() -> None:
            self.backend.enter()
            try:
                rank = self.members.index(self.comm.rank)
                made.append(self.library.NcclCommunicator(len(self.members), key, rank))
            except Exception as error:  # of any kind: the ranks wait for the end of this thread
                made.append(self._failure(error))

        Thread(target=create, name="spmd_engine NCCL", daemon=True).start()
        yield Condition(lambda: bool(made), lambda rank: False, messages=True)
        if isinstance(made[0], SpmdError):
            raise made[0]
        self.communicator, self.stream = made[0], self.backend.xp.cuda.Stream(non_blocking=True)

    def queue(self, work: QueuedCall, move: Callable[[], Steps], ready: Any = None) -> Steps:
        """Queue the transfers of a call, ``move()``, after the event ``ready`` or, without one, after all computations
        so far; returns the event of their end."""
        yield from self.turn(work.number)
        if self.communicator is None:
            yield from self.connect((yield from self.share_key(work.number)))
        self.check()
        self.stream.wait_event(ready or self.backend.record())
        with self.stream:
            for _ in move():
                raise AssertionError("a transfer by NCCL does not wait on the host")
        event = self.backend.record(self.stream)
        self.first_work()  # forgets those that are complete
        self._works.append(work._replace(event=event))
        self.end_turn(work.number)
        return event

    def turn(self, number: int) -> Steps:
        """Wait until the transfers of call ``number`` are the next to be queued, on each of the ranks."""
        yield from self.call_order.wait(number)

    def end_turn(self, number: int) -> None:
        """Those of call ``number`` are queued."""
        self.call_order.finish(number)

    def _failure(self, error: Exception) -> SpmdError:
        ranks = ", ".join(str(self.comm.members[rank]) for rank in self.members)
        return SpmdError(f"NCCL between ranks {ranks}: {error}; set NCCL_DEBUG=WARN, or use --transport staged")


class NcclPair(NcclRanks):
    """The sender and the receiver of messages, with a communicator of NCCL and a stream of their own, so that messages
    to other ranks, or in the other direction, never wait for these.

    NCCL matches transfers by their order, while messages on channels are sent and awaited in different orders. So the
    receiver numbers the messages when it is ready for them, and both ranks queue their transfers in this order.
    """

    def __init__(self, ranks: NcclRanks, pair: tuple[int, int]) -> None:
        super().__init__(ranks.comm, ranks.call_order, ranks.backend)
        self.members, self.thread = list(pair), ranks.thread
        #: NCCL's id of the pair; the receiver learns it from a message
        self.key = self.library.get_unique_id() if ranks.comm.rank == pair[0] else b""
        self.numbers = count()  #: of the receiver
        self._queued = 0

    def move(self, x: Array, work: QueuedCall, ready: Any) -> Steps:
        """Queue the transfer of contiguous ``x``, on the device, after the event ``ready``; returns the event of its
        end."""
        sends = self.comm.rank == self.members[0]

        def transfer() -> Steps:
            call, peer = (self.communicator.send, 1) if sends else (self.communicator.recv, 0)
            call(x.data.ptr, x.nbytes, int(self.library.NCCL_UINT8), peer, self.stream.ptr)
            yield from ()

        return (yield from self.queue(work, transfer, ready))

    def share_key(self, number: int) -> Steps:
        yield from ()
        return self.key

    def turn(self, number: int) -> Steps:
        yield Condition(lambda: self._queued == number, lambda rank: False, messages=True)

    def end_turn(self, number: int) -> None:
        self._queued += 1


class _DeviceWait(Operation):
    """The host's wait for an event of the device, which waits for ``work`` with other ranks."""

    __slots__ = ("_work",)

    def __init__(self, ranks: NcclRanks, work: QueuedCall, steps: Steps) -> None:
        super().__init__(ranks.comm, steps, work.timeout, work.what)
        self._work = work

    def call(self) -> tuple[Line | None, int, int]:
        return self.communicator.line, self._work.number, self._work.text


def _await_event(event: Any) -> None:
    """Wait until an event of the device is done; an error if that needs ranks that do not arrive, or that fail."""
    mine = [ranks for ranks in _open if ranks.thread == get_ident()]
    busy = [(ranks, work) for ranks in mine if (work := ranks.first_work()) is not None]

    def is_done() -> bool:
        for ranks in mine:
            ranks.check()
        return event.done

    def steps() -> Steps:
        yield Condition(is_done, lambda rank: False, messages=True)

    if not busy:
        return
    ranks, work = busy[0]
    progress = ranks.comm.progress
    try:
        progress.begin(_DeviceWait(ranks, work, steps())).wait()
    except SpmdError as error:
        progress.abort(error)
        raise
