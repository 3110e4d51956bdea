"""Between two ranks: send and receive, with shape and dtype on the way."""

from __future__ import annotations

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.comm.agreement import signature
from spmd_engine.comm.agreement.call_agreement import INLINE, bytes_of, text_of
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.calls import Calls, Operation
from spmd_engine.comm.collectives import PreparedCall
from spmd_engine.comm.condition import Requests
from spmd_engine.comm.pending import Pending, Steps
from spmd_engine.comm.staging import ready
from spmd_engine.comm.transports.messages import COLLECTIVE_TAGS
from spmd_engine.errors import UsageError

_NUMBERED, _CHANNELS = 4096, 4094  # messages of a pair that can be told apart while they are under way


class PointToPoint(Calls):
    """Messages of one (sender, receiver) arrive in the order sent; those of different *channels*, numbers that both
    sides agree on, may overtake each other, and on one channel one message at a time may be under way. No check can
    find a missing partner: the timeout does."""

    def send(self, to: int, x: Array, *, channel: int | None = None, label: str = "") -> None:
        """Send ``x``, with its shape and dtype, to rank ``to`` of the group. What cannot be sent, neither side gets:
        both raise the same UsageError."""
        self.start_send(to, x, channel=channel, label=label).wait()

    def start_send(self, to: int, x: Array, *, channel: int | None = None, label: str = "") -> Pending:
        self._check_peer("send", to)
        own, _ = ready(self.comm, x)
        tag = self._tag("to", to, channel)
        key = "send", own.dtype, own.shape, label
        call = self._prepared.get(key)
        if call is None:
            where = "send", self.axes, label
            try:
                told = self.signature_of("send", own, inline=0)
            except UsageError as error:
                text = bytes_of(str(error))
                call = PreparedCall(Signature("refuse", inline=text.size), where)
                return self._begin_message(call, self._send_refusal(call, text, to, tag))
            call = self._keep(key, PreparedCall(told, where, payload=own.nbytes, sent=own.nbytes))
        return self._begin_message(call, self._send(call, own, to, tag))

    def receive(self, source: int, *, like: Backend = CPU, channel: int | None = None, label: str = "") -> Array:
        """The next array that rank ``source`` sends here; shape and dtype come with it. ``like``: where to."""
        return self.start_receive(source, like=like, channel=channel, label=label).wait()

    def start_receive(
        self, source: int, *, like: Backend = CPU, channel: int | None = None, label: str = ""
    ) -> Pending:
        self._check_peer("receive", source)
        tag = self._tag("from", source, channel)
        key = "receive", label
        call = self._prepared.get(key)
        if call is None:  # what comes is known when it comes
            call = self._keep(key, PreparedCall(Signature("send"), ("receive", self.axes, label)))
        return self._begin_message(call, self._receive(source, like, tag))

    def _check_peer(self, operation: str, rank: int) -> None:
        """Raise UsageError unless ``rank`` is another of the group."""
        if not 0 <= rank < self.size:
            raise UsageError(f"{operation} over {self.axes!r}: rank {rank} is not one of {self.size} ranks")
        if self.size == 1:
            raise UsageError(f"{operation} over {self.axes!r}: a group of one rank has nobody to talk to")

    def _begin_message(self, call: PreparedCall, steps: Steps) -> Pending:
        return self.comm.progress.begin(Operation(self, call, 0, steps))

    def _send(self, call: PreparedCall, own: Array, to: int, tag: int) -> Steps:
        told = np.frombuffer(call.signature.packed, np.uint8)
        backend_of(own).synchronize()
        requests = Requests(self.comm).add(to, self.comm.start_send(told, to, tag))
        yield requests.add(to, self.comm.start_send(own, to, tag + 1) if own.size else [])

    def _send_refusal(self, call: PreparedCall, text: np.ndarray, to: int, tag: int) -> Steps:
        """Say why nothing comes, to the one who waits for it."""
        told = np.frombuffer(call.signature.packed + text.tobytes(), np.uint8)
        yield Requests(self.comm).add(to, self.comm.start_send(told, to, tag))
        raise signature.refused({text_of(text): [self.comm.rank]}, self.axes, self.comm.size)

    def _receive(self, source: int, like: Backend, tag: int) -> Steps:
        told = np.empty(signature.room(0) + INLINE, np.uint8)
        yield Requests(self.comm).add(source, self.comm.start_receive(told, source, tag))
        theirs = Signature.unpack(told.tobytes())
        if theirs.operation == "refuse":
            begin = len(theirs.packed)
            text = text_of(told[begin : begin + theirs.inline])
            raise signature.refused({text: [source]}, self.axes, self.comm.size)
        where = like if self.comm.device_aware else CPU
        data = where.empty(*theirs.array_type)
        if data.size:
            where.synchronize()
            yield Requests(self.comm).add(source, self.comm.start_receive(data, source, tag + 1))
        return like.asarray(data)

    def _tag(self, way: str, rank: int, channel: int | None) -> int:
        """Two tags, for signature and data. MPI promises tags up to 32,767; the last few are the transport's own."""
        if channel is None:
            return COLLECTIVE_TAGS + self.comm.next_message(way, rank) % _NUMBERED * 2
        return COLLECTIVE_TAGS + (_NUMBERED + channel % _CHANNELS) * 2
