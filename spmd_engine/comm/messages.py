"""Between two ranks: send and receive, with shape and dtype on the way."""

from __future__ import annotations

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.comm import header
from spmd_engine.comm.awaited import Requests
from spmd_engine.comm.door import Door, Operation, Plan
from spmd_engine.comm.header import Header
from spmd_engine.comm.meeting import INLINE, bytes_of, text_of
from spmd_engine.comm.pending import Pending, Steps
from spmd_engine.comm.transports.messages import COLLECTIVE_TAGS
from spmd_engine.errors import UsageError

_NUMBERED, _CHANNELS = 4096, 4094  # messages of a pair that can be told apart while they are under way


class Messages(Door):
    """Messages of one (sender, receiver) arrive in the order sent; those of different *channels*, numbers that both
    sides agree on, may overtake each other, and on one channel one message at a time may be under way. No check can
    find a missing partner: the timeout does."""

    def send(self, to: int, x: Array, *, channel: int | None = None, label: str = "") -> None:
        """Send ``x``, with its shape and dtype, to rank ``to`` of the group. What cannot be sent, neither side gets:
        both raise the same UsageError."""
        self.start_send(to, x, channel=channel, label=label).wait()

    def start_send(self, to: int, x: Array, *, channel: int | None = None, label: str = "") -> Pending:
        self._peer("send", to)
        own, _ = self._ready(x)
        tag = self._message_tag("to", to, channel)
        key = "send", own.dtype, own.shape, label
        plan = self._plans.get(key)
        if plan is None:
            where = "send", self.axes, label
            try:
                told = self._header("send", own, limit=0)
            except UsageError as error:
                text = bytes_of(str(error))
                plan = Plan(Header("refuse", inline=text.size), where, self._refuse_to_send)
                return self.comm.progress.begin(Operation(self, plan, 0, self._refuse_to_send(plan, text, to, tag)))
            plan = self._keep(key, Plan(told, where, self._send, payload=own.nbytes, sent=own.nbytes))
        return self.comm.progress.begin(Operation(self, plan, 0, self._send(plan, own, to, tag)))

    def _send(self, plan: Plan, own: Array, to: int, tag: int) -> Steps:
        said = np.frombuffer(plan.header.packed, np.uint8)
        backend_of(own).synchronize()
        requests = Requests().add(to, self.comm.start_send(said, to, tag))
        yield requests.add(to, self.comm.start_send(own, to, tag + 1) if own.size else [])

    def _refuse_to_send(self, plan: Plan, text: np.ndarray, to: int, tag: int) -> Steps:
        """Say why nothing comes, to the one who waits for it."""
        said = np.frombuffer(plan.header.packed + text.tobytes(), np.uint8)
        yield Requests().add(to, self.comm.start_send(said, to, tag))
        raise header.refused({text_of(text): [self.rank]}, self.axes, self.size)

    def receive(self, source: int, *, like: Backend = CPU, channel: int | None = None, label: str = "") -> Array:
        """The next array that rank ``source`` sends here; shape and dtype come with it. ``like``: where to."""
        return self.start_receive(source, like=like, channel=channel, label=label).wait()

    def start_receive(
        self, source: int, *, like: Backend = CPU, channel: int | None = None, label: str = ""
    ) -> Pending:
        self._peer("receive", source)
        tag = self._message_tag("from", source, channel)

        key = "receive", label
        plan = self._plans.get(key)
        if plan is None:  # what comes is known when it comes
            plan = self._keep(key, Plan(Header("send"), ("receive", self.axes, label), self._receive))
        return self.comm.progress.begin(Operation(self, plan, 0, self._receive(source, like, tag)))

    def _receive(self, source: int, like: Backend, tag: int) -> Steps:
        said = np.empty(header.room(0) + INLINE, np.uint8)
        yield Requests().add(source, self.comm.start_receive(said, source, tag))
        theirs = Header.unpack(said.tobytes())
        if theirs.operation == "refuse":
            begin = len(theirs.packed)
            text = text_of(said[begin : begin + theirs.inline])
            raise header.refused({text: [source]}, self.axes, self.size)
        where = like if self.comm.device_aware else CPU
        data = where.empty(*theirs.array_type)
        if data.size:
            where.synchronize()
            yield Requests().add(source, self.comm.start_receive(data, source, tag + 1))
        return like.asarray(data)

    def _peer(self, operation: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"{operation} over {self.axes!r}: rank {rank} is not one of {self.size} ranks")
        if rank == self.rank and self.size == 1:
            raise UsageError(f"{operation} over {self.axes!r}: a group of one rank has nobody to talk to")

    def _message_tag(self, way: str, rank: int, channel: int | None) -> int:
        """Two tags, for header and data. MPI promises tags up to 32,767; the last few are the transport's own."""
        if channel is None:
            return COLLECTIVE_TAGS + self.comm.next_message(way, rank) % _NUMBERED * 2
        return COLLECTIVE_TAGS + (_NUMBERED + channel % _CHANNELS) * 2
