"""A group of ranks: its collectives and messages, by any transport.

Every call takes and returns local arrays. ``start_...`` takes the same arguments as the blocking method and returns a
Pending, whose ``wait()`` returns the result. Arrays may have any NumPy dtype, and be non-contiguous, uneven, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from time import perf_counter
from typing import Any, NoReturn

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, CudaBackend, backend_of
from spmd_engine.comm.agreement.call_agreement import INLINE, bytes_of, refused, text_of
from spmd_engine.comm.agreement.signature import NumberedCall, Signature, Signatures, room
from spmd_engine.comm.calls import PreparedCall, copied
from spmd_engine.comm.collectives import PREPARE
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.dispatch import Routing
from spmd_engine.comm.exchange import COLLECTIVE_TAGS, Requests, settled
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.nccl_ranks import KEY_BYTES, NcclPair
from spmd_engine.comm.pending import TIMEOUT, Operation, Pending, Queued, Steps
from spmd_engine.comm.shared_memory.slot_table import RELEASED
from spmd_engine.errors import MeshError, UsageError, described
from spmd_engine.runtime.activity import Line

Sizes = Sequence[int] | None  #: a length for each rank
Out = Array | None  #: the array that receives the result

KEPT = 512  # most prepared calls of a group
_NUMBERED, _CHANNELS = 2048, 4094  # messages of a pair that can be distinguished while in progress
_TAGS = 3  # of a message: signature, data, and the receiver's answer


class Group:
    """Ranks that communicate.

    Reductions have a fixed order, so results are equal on all ranks. Within a node it is rank order. On several nodes
    with equally many ranks, each node reduces its arrays first; then those of the nodes are reduced in the order of
    ``agreement.tree``, of ``rounds`` if they are larger, or, if they are large, of the nodes' first ranks.

    ``comm``: the ranks. ``axes``: the mesh axes of the group. ``check``: compare the calls of all ranks before data
    move. ``timeout``: seconds that a rank waits for others before it raises CommunicationTimeout (None: no limit).
    ``deterministic``: add in the order of the ranks, or of the nodes, whatever the messages' order is.
    """

    def __init__(
        self,
        comm: Communicator,
        axes: str,
        ledger: Ledger,
        *,
        check: bool = True,
        timeout: float | None = TIMEOUT,
        deterministic: bool = False,
    ) -> None:
        self.comm, self.axes, self.ledger, self.timeout = comm, axes, ledger, timeout
        self.rank, self.size = comm.rank, comm.size
        self.lowest = 0  #: the rank that is lowest in the mesh's communicator: rank 0 of the job, in a group of all
        self._routing = Routing(comm, axes, check, deterministic, timeout)
        self.connections = self._routing.connections
        self._table: Any = self.connections.table if self._routing.spins else None  # in which calls need not wait
        self._prepared: dict[tuple, PreparedCall] = {}

    def _run(self, operation: str, x: Array | None, arguments: tuple = (), out: Any = None, label: str = "") -> Any:
        """Make the next call and return its result. ``arguments``: of ``PREPARE[operation]``, without the label."""
        try:
            call, x = self._prepare(operation, x, arguments, out, label)
        except UsageError as error:
            return self._refuse(operation, label, error).wait()
        if self.size == 1:
            return self._run_alone(call, x, out)
        if call.inline and self._table is not None:
            return self._repeat(call, x, out)
        return self._start(call, x, out, spin_tests=self.comm.spin_tests).wait()

    def _begin(
        self, operation: str, x: Array | None, arguments: tuple = (), out: Any = None, label: str = ""
    ) -> Pending:
        """Start the next call; the same arguments as ``_run``."""
        try:
            call, x = self._prepare(operation, x, arguments, out, label)
        except UsageError as error:
            return self._refuse(operation, label, error)
        return self._start(call, x, out) if self.size > 1 else Pending.completed(self._run_alone(call, x, out))

    def _prepare(
        self, operation: str, x: Any, arguments: tuple, out: Any, label: str
    ) -> tuple[PreparedCall, Array | None]:
        """The prepared call, and ``x`` in its dtype. Raises UsageError if the call cannot be made."""
        key: tuple = (operation, arguments, label)
        if operation not in ("broadcast", "barrier") or x is not None:  # else from another rank, or none
            try:
                key = operation, type(x), x.dtype, x.shape, arguments, label
            except AttributeError:
                raise _no_array(operation, x) from None
        call = self._prepared.get(key) or self._keep(key, PREPARE[operation](self._routing, x, *arguments, label))
        if x is not None and x.dtype != call.dtype:
            x = x.astype(call.dtype)
        if out is not None:
            call.check_out(x, out)
        return call, x

    def _run_alone(self, call: PreparedCall, x: Array | None, out: Any) -> Any:
        """The result of a call in a group of one rank."""
        if x is None:
            return None
        result = copied(x, out) if out is not None and not isinstance(out, Backend) else x.copy()
        return (result, [x.shape[call.signature.concat_axis]]) if call.returns_lengths else result

    def _keep(self, key: tuple, call: PreparedCall) -> PreparedCall:
        """Keep ``call`` for the next call with the same ``key``."""
        if len(self._prepared) >= KEPT:
            self._prepared.clear()
        call.text = self.comm.progress.activity.called(*call.where)
        self._expect_same(call)
        self._prepared[key] = call
        return call

    def _expect_same(self, call: PreparedCall) -> None:
        """Expect the same call from all ranks of this node."""
        if (table := self.connections.node_table) is not None:
            call.expected = Signatures([call.signature] * table.size)

    def _refuse(self, operation: str, label: str, error: UsageError) -> Pending:
        """Notify the other ranks that this rank cannot make its call. All ranks raise the same UsageError."""
        if self.size == 1:
            raise error
        return self._send_text("refuse", (operation, self.axes, label), str(error))

    def _send_text(self, operation: str, where: tuple[str, str, str], text: str) -> Operation:
        """Start a call that carries only a text, in place of a collective."""
        data = bytes_of(text)
        call = PreparedCall(Signature(operation, inline=data.size), where)
        self._expect_same(call)
        return self._start(call, data)

    def _start(
        self, call: PreparedCall, x: Array | None, out: Any = None, *, number: int = 0, spin_tests: int = 0
    ) -> Operation:
        """Start call ``number``, or the next one, see ``Progress.begin``."""
        began = perf_counter()
        number = number or self.connections.next_call(call.text)
        steps = call.steps(self._routing, number, x, out)
        if self.connections.ordered:
            self.connections.call_order.enter(number)
        operation = self.comm.progress.begin(GroupOperation(self, call, number, steps), spin_tests)
        self.ledger.record_wait(call.where, perf_counter() - began)
        return operation

    def _repeat(self, call: PreparedCall, x: Array | None, out: Any) -> Any:
        """The result of a call whose data were inline on this node in the last such call: if the other ranks repeat
        theirs and arrive soon, its steps follow each other here, and no Operation has to wait for them."""
        began, expected, table = perf_counter(), call.expected, self._table
        number, progress, spin_tests = self.connections.next_call(call.text), self.comm.progress, self.comm.spin_tests
        fits = out is None or (expected.same and type(out) is np.ndarray and out.shape == call.shape)
        with progress.lock:
            entries = table.exchange(number, call.signature, x, None, expected) if fits else None
            if fits and entries is None:
                entries = progress.spin(spin_tests, table.exchange, number, call.signature, x, None, expected)
            if entries is not None and entries.signatures is expected:
                try:
                    result = call.finish(None if expected.same else expected, entries.blocks, out)
                finally:
                    table.set_phase(number, RELEASED)
                call.record(self.ledger, result, perf_counter() - began)
                return result
        return self._start(call, x, out, number=number, spin_tests=spin_tests).wait()  # with this entry

    def _end(self, number: int) -> None:
        """Release the slot of call ``number`` and its place in the call order."""
        if self.connections.ordered:
            self.connections.call_order.finish(number)
        if (table := self.connections.node_table) is not None:
            table.set_phase(number, RELEASED)

    def close(self) -> None:
        """Refuse all further calls: the communicator is freed."""

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise MeshError("the mesh of this group is closed, by its 'with' or close(); make calls before, or a mesh")

        self._run = self._begin = self._begin_message = refuse

    # --- collectives

    def barrier(self, label: str = "") -> None:
        """Return once every rank of the group has called it."""
        return self._run("barrier", None, label=label)

    def start_barrier(self, label: str = "") -> Pending:
        """Start ``barrier``."""
        return self._begin("barrier", None, label=label)

    def leave(self, reason: str = "") -> None:
        """Announce that this rank's program ends. If another rank is in a collective, both raise MismatchError.

        Ranks that wait in other groups hear of it while this rank waits, once all calls that it has begun are complete.
        With a ``reason``, the text of this rank's error, the other ranks raise RankAborted instead.
        """
        if self.size > 1:
            last = self._send_text("leave", ("leave", self.axes, ""), reason)
            last.until_the_end = True
            last.wait()

    def broadcast(self, x: Array | None, root: int = 0, *, label: str = "") -> Array:
        """The root's ``x`` on every rank. The other ranks' ``x`` is ignored and may be None."""
        return self._run("broadcast", *self._broadcast(x, root), label)

    def start_broadcast(self, x: Array | None, root: int = 0, *, label: str = "") -> Pending:
        """Start ``broadcast``."""
        return self._begin("broadcast", *self._broadcast(x, root), label)

    def _broadcast(self, x: Array | None, root: int) -> tuple[Array | None, tuple[int, bool], Backend | None]:
        """The root's array, the arguments, and the backend of the result."""
        backend = backend_of(x) if x is not None and type(x) is not np.ndarray else None
        on_device = backend is not None and self._routing.nccl_of(x) is not None
        if not hasattr(root, "__index__"):
            raise UsageError(f"broadcast over {self.axes!r}: root is {root!r}; give a number of the group")
        return x if self.rank == root else None, (int(root), on_device), backend

    def all_gather(self, x: Array, axis: int = 0, *, sizes: Sizes = None, out: Out = None, label: str = "") -> Array:
        """The ``x`` of all ranks joined along ``axis`` in rank order. Shards may differ along ``axis`` and be empty.

        ``sizes`` (each rank's length along ``axis``) saves ranks of several nodes the exchange of lengths. ``out``
        (contiguous, with axis 0) receives the result; ``x`` may be this rank's part of ``out``.
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

        The parts are even, with the remainder on the first ranks, or have the lengths ``sizes``. ``out`` (contiguous;
        may be this rank's part of ``x``) receives the result.
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

        Parts are even by default. ``splits`` are their lengths, which may be 0 and differ on every rank; the call then
        returns (y, received), where ``received`` are the lengths along ``concat_axis`` of the blocks from each rank:
        the splits of the reverse call. The argument ``received`` gives these lengths, if known, and must be correct;
        if all ranks pass it, ranks of several nodes skip the exchange of lengths. ``out`` (contiguous, with
        ``concat_axis`` 0) receives y.
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
        cannot be sent, both ranks raise the same UsageError. Only the timeout detects a missing partner.
        """
        self.start_send(to, x, channel=channel, label=label).wait()

    def start_send(self, to: int, x: Array, *, channel: int | None = None, label: str = "") -> Pending:
        """Start ``send``."""
        self._check_peer("send", to)
        tag = self._tag("to", to, channel)
        key = "send", type(x), getattr(x, "dtype", None), getattr(x, "shape", None), label
        call = self._prepared.get(key)
        if call is None:
            where = "send", self.axes, label
            try:
                if key[2] is None:
                    raise _no_array("send", x)
                signature = self._routing.signature("send", x, inline=0)
            except UsageError as error:
                text = bytes_of(str(error))
                call = PreparedCall(Signature("refuse", inline=text.size), where)
                return self._begin_message(call, self._send_refusal(call, text, to, tag))
            call = self._keep(key, PreparedCall(signature, where, payload=x.nbytes, sent=x.nbytes))
        return self._begin_message(call, self._send(call, x, to, tag))

    def receive(self, source: int, *, like: Backend = CPU, channel: int | None = None, label: str = "") -> Array:
        """The next array that rank ``source`` sends, with its shape and dtype. ``like``: backend of the result."""
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
        return self._begin_message(call, self._receive(call, source, like, tag))

    def _check_peer(self, operation: str, rank: int) -> None:
        """Raise UsageError unless ``rank`` is a rank of the group, which has others."""
        if not hasattr(rank, "__index__") or getattr(rank, "ndim", 0):
            raise UsageError(f"{operation} over {self.axes!r}: rank is {described(rank)}; give a number of the group")
        if not 0 <= rank < self.size:
            raise UsageError(f"{operation} over {self.axes!r}: rank {rank} is not one of {self.size} ranks")
        if self.size == 1:
            raise UsageError(
                f"{operation} over {self.axes!r}: a group of one rank has no other rank to exchange messages with"
            )

    def _begin_message(self, call: PreparedCall, steps: Steps) -> Pending:
        return self.comm.progress.begin(GroupOperation(self, call, 0, steps))

    def _send(self, call: PreparedCall, x: Array, to: int, tag: int) -> Steps:
        header = np.frombuffer(call.signature.packed, np.uint8)
        if x.size and (nccl := self._routing.nccl_of(x)) is not None:
            return (yield from self._send_by_nccl(nccl.pair(self.rank, to), call, x, to, tag))
        local = yield from self._routing.ready(x, messages=True)
        yield from settled(local)
        requests = Requests(self.comm).add(to, self.comm.start_send(header, to, tag))
        yield requests.add(to, self.comm.start_send(local, to, tag + 1) if local.size else [])

    def _send_by_nccl(self, pair: NcclPair, call: PreparedCall, x: Array, to: int, tag: int) -> Steps:
        """Send signature and id of the pair; when the receiver has answered with a number, queue the transfer."""
        local = yield from self._routing.ready(x)
        ready, answer = pair.backend.record(), np.empty(1, np.int64)
        header = np.frombuffer(call.signature.packed + pair.key, np.uint8)
        requests = Requests(self.comm).add(to, self.comm.start_receive(answer, to, tag + 2))
        yield requests.add(to, self.comm.start_send(header, to, tag))
        work = self._routing.queued(int(answer[0]), f"send to rank {to}", call.where)
        return Queued(None, pair.backend, (yield from pair.move(local, work, ready)), local)

    def _receive_by_nccl(
        self, pair: NcclPair, signature: Signature, where: tuple[str, str, str], source: int, tag: int
    ) -> Steps:
        """Answer with a number, and queue the transfer."""
        data, number = pair.backend.empty(*signature.array_type), np.array([next(pair.numbers)])
        ready = pair.backend.record()
        requests = self.comm.start_send(number, source, tag + 2)
        work = self._routing.queued(int(number[0]), f"receive from rank {source}", where)
        event = yield from pair.move(data, work, ready)
        yield Requests(self.comm).add(source, requests)
        return Queued(data, pair.backend, event)

    def _send_refusal(self, call: PreparedCall, text: np.ndarray, to: int, tag: int) -> Steps:
        """Send the error text instead of the array."""
        message = np.frombuffer(call.signature.packed + text.tobytes(), np.uint8)
        yield Requests(self.comm).add(to, self.comm.start_send(message, to, tag))
        raise refused({text_of(text): [self.comm.rank]}, self.axes, self.comm.size)

    def _receive(self, call: PreparedCall, source: int, like: Backend, tag: int) -> Steps:
        pair = nccl.pair(source, self.rank) if (nccl := self.connections.nccl) is not None else None
        header = np.empty(room(0) + INLINE, np.uint8)
        yield Requests(self.comm).add(source, self.comm.start_receive(header, source, tag))
        signature = Signature.unpack(header.tobytes())
        if signature.operation == "refuse":
            begin = len(signature.packed)
            text = text_of(header[begin : begin + signature.inline])
            raise refused({text: [source]}, self.axes, self.comm.size)
        if pair is not None and not signature.host and prod(signature.array_type[0]):
            pair.key = header[len(signature.packed) :][:KEY_BYTES].tobytes()
            queued = yield from self._receive_by_nccl(pair, signature, call.where, source, tag)
            return queued if like.on_device else (yield from self._routing.staged(queued.use()))
        staged = like.on_device and not self.connections.device_aware
        data = (like.pinned_empty if staged else like.empty)(*signature.array_type)
        if data.size:
            yield from settled(data)
            yield Requests(self.comm).add(source, self.comm.start_receive(data, source, tag + 1))
        if not isinstance(like, CudaBackend) or not staged:
            return data
        data, event = like.start_from_host(data)
        return Queued(data, like, event)

    def _tag(self, direction: str, rank: int, channel: int | None) -> int:
        """The first tag of a message. MPI allows tags up to at least 32,767; the communicator uses the last few."""
        if channel is None:
            return COLLECTIVE_TAGS + next(self.connections.messages[direction, rank]) % _NUMBERED * _TAGS
        return COLLECTIVE_TAGS + (_NUMBERED + channel % _CHANNELS) * _TAGS


class GroupOperation(Operation):
    """A call of a group in progress."""

    __slots__ = ("_group", "_call", "_number")

    def __init__(self, group: Group, call: PreparedCall, number: int, steps: Steps) -> None:
        super().__init__(group.comm, steps, group.timeout)
        self._group, self._call, self._number = group, call, number
        group.ledger.entries[call.where]  # made now: another thread may be reading the ledger when the call ends

    def describe(self) -> str:
        operation, axes, label = self._call.where
        description = str(NumberedCall(self._number, self._call.signature)) if self._number else operation
        rank, size = self._group.rank, self._group.size
        return f"{description} over {axes!r}{f' ({label})' if label else ''}, group rank {rank} of {size}"

    def call(self) -> tuple[Line, int, int]:
        call, comm = self._call, self._group.comm
        return comm.line, self._number, call.text or comm.progress.activity.called(*call.where)

    def on_end(self) -> None:
        if self._number:
            self._group._end(self._number)  # first, because other ranks may wait for the slot
        if self.error is None:
            result = self.result.result if isinstance(self.result, Queued) else self.result
            self._call.record(self._group.ledger, result)

    def on_wait(self, seconds: float) -> None:
        self._group.ledger.record_wait(self._call.where, seconds)


def _no_array(operation: str, x: Any) -> UsageError:
    return UsageError(f"{operation} takes an array, not a {type(x).__name__}: make it one, by numpy.asarray")


def _ints(sizes: Sizes) -> tuple[int, ...] | None:
    """Sizes in the form of a signature; raises UsageError unless they are whole numbers."""
    try:
        return None if sizes is None else tuple(map(index, sizes))
    except TypeError:
        raise UsageError(f"sizes {sizes!r}: give a list with a whole number for each rank") from None
