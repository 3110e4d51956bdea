"""A group of ranks: its collectives and messages, whatever the route.

Every call takes and returns local arrays. ``start_...`` takes the same arguments as the blocking method and returns a
Pending, whose ``wait()`` returns the result. Arrays may have any NumPy dtype, and be non-contiguous, uneven, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.comm.agreement.call_agreement import INLINE, Signature, bytes_of, refused, room, text_of
from spmd_engine.comm.calls import Calls, Operation
from spmd_engine.comm.collectives import PreparedCall, ready
from spmd_engine.comm.pending import Pending, Requests, Steps
from spmd_engine.comm.transports.messages import COLLECTIVE_TAGS
from spmd_engine.errors import UsageError

Sizes = Sequence[int] | None  #: a length for each rank
Out = Array | None  #: where the result goes

_NUMBERED, _CHANNELS = 4096, 4094  # messages of a pair that can be distinguished while in progress


class Group(Calls):
    """Ranks that communicate.

    Reductions are made once and in a fixed order, so results are equal on all ranks. That is rank order, except that
    large arrays of a group with several ranks on each of several nodes are first combined within nodes, then node by
    node, in the order of the nodes' first ranks (see ``transports.hierarchical``), and sums of small arrays of many
    ranks are in the MPI library's order (see ``Tuning.in_rank_order``).
    """

    def barrier(self, label: str = "") -> None:
        """Return once every rank of the group has called it."""
        return self._run("barrier", None, label=label)

    def start_barrier(self, label: str = "") -> Pending:
        """Start ``barrier``."""
        return self._begin("barrier", None, label=label)

    def leave(self, reason: str = "") -> None:
        """Announce that this rank's program ends. If another rank is in a collective, both get a MismatchError.

        With a ``reason``, an error that this rank reports, the others get RankAborted instead.
        """
        if self.size > 1:
            if not reason:
                self.comm.announce_end()  # for ranks that wait in other groups
            last = self._send_text("leave", ("leave", self.axes, ""), reason)
            last.until_the_end = True
            last.wait()

    def broadcast(self, x: Array | None, root: int = 0, *, label: str = "") -> Array:
        """The root's ``x`` on every rank. The other ranks' ``x`` is ignored and may be None."""
        return self._run("broadcast", *self._broadcast(x, root), label)

    def start_broadcast(self, x: Array | None, root: int = 0, *, label: str = "") -> Pending:
        """Start ``broadcast``."""
        return self._begin("broadcast", *self._broadcast(x, root), label)

    def _broadcast(self, x: Array | None, root: int) -> tuple[Array | None, tuple[int], Backend | None]:
        """The root's array where the transport can read it, the arguments, and the backend of the result."""
        mine, home = x if self.rank == root else None, None
        if x is not None and type(x) is not np.ndarray:
            home = backend_of(x)
            mine = ready(self.comm, mine)[0] if mine is not None and self.size > 1 else mine
        return mine, (root,), home

    def all_gather(self, x: Array, axis: int = 0, *, sizes: Sizes = None, out: Out = None, label: str = "") -> Array:
        """The ``x`` of all ranks joined along ``axis`` in rank order. Shards may differ along ``axis`` and be empty.

        ``sizes`` (each rank's length along ``axis``) saves ranks of several nodes the exchange of lengths. ``out``
        (contiguous, with axis 0) receives the result; ``x`` may be this rank's part of it.
        """
        return self._run("all_gather", x, (axis, _ints(sizes)), out, label)

    def start_all_gather(
        self, x: Array, axis: int = 0, *, sizes: Sizes = None, out: Out = None, label: str = ""
    ) -> Pending:
        """Start ``all_gather``."""
        return self._begin("all_gather", x, (axis, _ints(sizes)), out, label)

    def all_reduce(self, x: Array, op: str = "sum", *, out: Out = None, label: str = "") -> Array:
        """The elementwise sum, mean, max, min or prod over ranks, in a fixed order: equal on all ranks.

        ``out`` (contiguous, may be ``x`` itself) receives the result. bool is counted as int64; the mean of
        integers is float64; float16 and bfloat16 are accumulated in float32.
        """
        return self._run("all_reduce", x, (op,), out, label)

    def start_all_reduce(self, x: Array, op: str = "sum", *, out: Out = None, label: str = "") -> Pending:
        """Start ``all_reduce``."""
        return self._begin("all_reduce", x, (op,), out, label)

    def reduce_scatter(
        self, x: Array, axis: int = 0, op: str = "sum", *, sizes: Sizes = None, out: Out = None, label: str = ""
    ) -> Array:
        """This rank's part, along ``axis``, of the reduction over ranks.

        The parts are even, by remainder on the first ranks, or have the lengths ``sizes``. ``out`` (contiguous; may be
        this rank's part of ``x``) receives the result.
        """
        return self._run("reduce_scatter", x, (axis, op, _ints(sizes)), out, label)

    def start_reduce_scatter(
        self, x: Array, axis: int = 0, op: str = "sum", *, sizes: Sizes = None, out: Out = None, label: str = ""
    ) -> Pending:
        """Start ``reduce_scatter``."""
        return self._begin("reduce_scatter", x, (axis, op, _ints(sizes)), out, label)

    def all_to_all(
        self,
        x: Array,
        axis: int = 0,
        concat_axis: int | None = None,
        *,
        splits: Sizes = None,
        received: Sizes = None,
        out: Out = None,
        label: str = "",
    ) -> Any:
        """Send part r of ``x`` along ``axis`` to rank r; join the received blocks along ``concat_axis`` (``axis``).

        Parts are even. With ``splits``, their lengths, which may be 0 and differ on every rank, it returns
        (y, received): also the lengths along ``concat_axis`` of the blocks from each rank, which are the splits of the
        reverse call. ``received``: these lengths, if known; if all ranks pass it, ranks of several nodes skip the
        exchange of lengths. It must be right. ``out`` (contiguous, with ``concat_axis`` 0) receives y.
        """
        return self._run("all_to_all", x, (axis, concat_axis, _ints(splits), _ints(received)), out, label)

    def start_all_to_all(
        self,
        x: Array,
        axis: int = 0,
        concat_axis: int | None = None,
        *,
        splits: Sizes = None,
        received: Sizes = None,
        out: Out = None,
        label: str = "",
    ) -> Pending:
        """Start ``all_to_all``."""
        return self._begin("all_to_all", x, (axis, concat_axis, _ints(splits), _ints(received)), out, label)

    # --- messages between two ranks

    def send(self, to: int, x: Array, *, channel: int | None = None, label: str = "") -> None:
        """Send ``x``, with its shape and dtype, to rank ``to`` of the group.

        Messages of one (sender, receiver) arrive in the order sent. Those of different *channels*, numbers on which
        both sides agree, may overtake each other; on a channel one message at a time may be in progress. If ``x``
        cannot be sent, both sides raise the same UsageError. A missing partner is found by the timeout only.
        """
        self.start_send(to, x, channel=channel, label=label).wait()

    def start_send(self, to: int, x: Array, *, channel: int | None = None, label: str = "") -> Pending:
        """Start ``send``."""
        self._check_peer("send", to)
        own, _ = ready(self.comm, x)
        tag = self._tag("to", to, channel)
        key = "send", own.dtype, own.shape, label
        call = self._prepared.get(key)
        if call is None:
            where = "send", self.axes, label
            try:
                own_signature = self._routing.signature("send", own, inline=0)
            except UsageError as error:
                text = bytes_of(str(error))
                call = PreparedCall(Signature("refuse", inline=text.size), where)
                return self._begin_message(call, self._send_refusal(call, text, to, tag))
            call = self._keep(key, PreparedCall(own_signature, where, payload=own.nbytes, sent=own.nbytes))
        return self._begin_message(call, self._send(call, own, to, tag))

    def receive(self, source: int, *, like: Backend = CPU, channel: int | None = None, label: str = "") -> Array:
        """The next array that rank ``source`` sends; shape and dtype come with it. ``like``: backend of the result."""
        return self.start_receive(source, like=like, channel=channel, label=label).wait()

    def start_receive(
        self, source: int, *, like: Backend = CPU, channel: int | None = None, label: str = ""
    ) -> Pending:
        """Start ``receive``."""
        self._check_peer("receive", source)
        tag = self._tag("from", source, channel)
        key = "receive", label
        call = self._prepared.get(key)
        if call is None:  # shape and dtype arrive with the message
            call = self._keep(key, PreparedCall(Signature("send"), ("receive", self.axes, label)))
        return self._begin_message(call, self._receive(source, like, tag))

    def _check_peer(self, operation: str, rank: int) -> None:
        """Raise UsageError unless ``rank`` is another rank of the group."""
        if not 0 <= rank < self.size:
            raise UsageError(f"{operation} over {self.axes!r}: rank {rank} is not one of {self.size} ranks")
        if self.size == 1:
            raise UsageError(
                f"{operation} over {self.axes!r}: a group of one rank has no other rank to exchange messages with"
            )

    def _begin_message(self, call: PreparedCall, steps: Steps) -> Pending:
        return self.comm.progress.begin(Operation(self, call, 0, steps))

    def _send(self, call: PreparedCall, own: Array, to: int, tag: int) -> Steps:
        header = np.frombuffer(call.signature.packed, np.uint8)
        backend_of(own).synchronize()
        requests = Requests(self.comm).add(to, self.comm.start_send(header, to, tag))
        yield requests.add(to, self.comm.start_send(own, to, tag + 1) if own.size else [])

    def _send_refusal(self, call: PreparedCall, text: np.ndarray, to: int, tag: int) -> Steps:
        """Send the error text instead of the array."""
        message = np.frombuffer(call.signature.packed + text.tobytes(), np.uint8)
        yield Requests(self.comm).add(to, self.comm.start_send(message, to, tag))
        raise refused({text_of(text): [self.comm.rank]}, self.axes, self.comm.size)

    def _receive(self, source: int, like: Backend, tag: int) -> Steps:
        header = np.empty(room(0) + INLINE, np.uint8)
        yield Requests(self.comm).add(source, self.comm.start_receive(header, source, tag))
        theirs = Signature.unpack(header.tobytes())
        if theirs.operation == "refuse":
            begin = len(theirs.packed)
            text = text_of(header[begin : begin + theirs.inline])
            raise refused({text: [source]}, self.axes, self.comm.size)
        where = like if self.comm.device_aware else CPU
        data = where.empty(*theirs.array_type)
        if data.size:
            where.synchronize()
            yield Requests(self.comm).add(source, self.comm.start_receive(data, source, tag + 1))
        return like.asarray(data)

    def _tag(self, direction: str, rank: int, channel: int | None) -> int:
        """The first of two tags, for signature and data. MPI allows tags up to 32,767 at least; the communicator uses
        the last few."""
        if channel is None:
            return COLLECTIVE_TAGS + self.comm.next_message(direction, rank) % _NUMBERED * 2
        return COLLECTIVE_TAGS + (_NUMBERED + channel % _CHANNELS) * 2


def _ints(sizes: Sizes) -> tuple[int, ...] | None:
    """Sizes as a signature carries them."""
    return None if sizes is None else tuple(map(int, sizes))
