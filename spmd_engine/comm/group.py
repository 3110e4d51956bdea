"""Collectives of a group of ranks, whatever the transport.

Every call takes and returns local arrays, blocks as the method and ``start_...`` as the same thing begun now
and finished by ``.wait()``. Input may be of any dtype NumPy knows, not contiguous, uneven, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.comm import dtypes, prepare
from spmd_engine.comm.calls import Calls
from spmd_engine.comm.pending import Pending
from spmd_engine.comm.point_to_point import PointToPoint
from spmd_engine.comm.prepare import check_out, takes_results
from spmd_engine.comm.rendezvous import bytes_of
from spmd_engine.comm.staging import copied, ready
from spmd_engine.errors import UsageError


class Group(Calls):
    """Ranks, and what passes between them.

    Sums and their kin are made once and in the same order, so they are equal on all ranks. That is the order of ranks;
    but large arrays of a group that has several ranks on each of several nodes are first combined within nodes, in
    rank order, and then node by node, in the order of the nodes' first ranks (see ``transports.hierarchical``); and
    those of many nodes in an order of the MPI library's (see ``Tuning``).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._point_to_point = PointToPoint(self)

    def barrier(self) -> None:
        """Return once every rank of the group has come here."""
        call = self._waiting.get(("barrier", ""))
        if call is not None and call.at_once:
            self._at_once(call, None, None)
        else:
            self.start_barrier().wait()

    def start_barrier(self, label: str = "") -> Pending:
        if self.size == 1:
            return Pending.completed(None)
        key = "barrier", label
        return self._start(self._prepared.get(key) or self._keep(key, prepare.barrier(self, label)), None)

    def leave(self, reason: str = "") -> None:
        """Say that this rank's program ends. If another rank is in a collective, both get a MismatchError.

        With a ``reason``, an error that this rank reports, the others get RankAborted instead.
        """
        if self.size > 1:
            text = bytes_of(reason)
            if not reason:
                self.comm.announce_end()  # for those who wait in other groups
            last = self._start(self._say("leave", ("leave", self.axes, ""), text), text)
            last.until_the_end = True
            last.wait()
            if not reason:
                self.comm.announce_end()  # to those who have asked meanwhile

    def broadcast(self, x: Array | None, root: int = 0, *, label: str = "") -> Array:
        """The root's ``x`` on every rank; what the others give is not looked at, and may be None."""
        if x is None or type(x) is np.ndarray:
            mine = x if self.rank == root else None
            call = self._waiting.get(_broadcast_key(mine, root, label))
            if call is not None and call.at_once:
                return self._at_once(call, mine, CPU)
        return self._broadcast(x, root, label, waits=True)

    def start_broadcast(self, x: Array | None, root: int = 0, *, label: str = "") -> Pending:
        return self._broadcast(x, root, label, waits=False)

    def _broadcast(self, x: Array | None, root: int, label: str, waits: bool) -> Any:
        """The result if this rank ``waits``, else a Pending; so are the others."""
        try:
            if not 0 <= root < self.size:
                raise UsageError(f"broadcast over {self.axes!r}: root {root} is not one of {self.size} ranks")
            if self.rank == root and x is None:
                raise UsageError(f"broadcast over {self.axes!r}: the root must give an array")
            if self.size == 1:
                dtypes.describe(x.dtype)  # what several ranks would refuse
                return self._alone(np.array(x, copy=True) if isinstance(x, np.ndarray) else x.copy(), waits)
            mine = ready(self.comm, x)[0] if self.rank == root else None
            key = _broadcast_key(mine, root, label)
            call = self._prepared.get(key) or self._keep(key, prepare.broadcast(self, mine, root, label), mine)
        except UsageError as error:
            return self._refused("broadcast", label, error, waits)
        return self._make(call, mine, backend_of(x) if x is not None else CPU, waits)

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

        ``sizes`` (each rank's length along ``axis``) spares ranks of several nodes the exchange of lengths. ``out``,
        contiguous, with axis 0, receives the result; ``x`` may be this rank's part of it.
        """
        call = self._waiting.get(("all_gather", type(x), x.dtype, x.shape, axis, ints(sizes), label))
        if call is not None and call.at_once and call.suits(out):
            return self._at_once(call, x, out)
        return self._all_gather(x, axis, sizes, out, label, waits=True)

    def start_all_gather(
        self,
        x: Array,
        axis: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Pending:
        return self._all_gather(x, axis, sizes, out, label, waits=False)

    def _all_gather(
        self, x: Array, axis: int, sizes: Sequence[int] | None, out: Array | None, label: str, waits: bool
    ) -> Any:
        sizes = ints(sizes)
        key = "all_gather", type(x), x.dtype, x.shape, axis, sizes, label
        try:
            call = self._prepared.get(key) or self._keep(key, prepare.all_gather(self, x, axis, sizes, label), x)
            if out is not None and (call.signature.axis or out.dtype != x.dtype or not takes_results(out)):
                raise UsageError(f"all_gather: out must be a contiguous, writable array of {x.dtype}, and axis 0")
        except UsageError as error:
            return self._refused("all_gather", label, error, waits)
        if self.size == 1:
            check_out("all_gather", x, out)
            return self._alone(x.copy() if out is None else copied(x, out), waits)
        return self._make(call, x, out, waits)

    def all_reduce(self, x: Array, op: str = "sum", *, out: Array | None = None, label: str = "") -> Array:
        """The sum, mean, max, min or prod over ranks, element by element, in a fixed order: equal on all ranks.

        ``out`` (contiguous, may be ``x`` itself) receives the result. bool is counted as int64; the mean of
        integers is float64; float16 and bfloat16 are accumulated in float32.
        """
        call = self._waiting.get(("all_reduce", type(x), x.dtype, x.shape, op, label))
        if call is not None and call.at_once and (out is None or call.suits(out)):
            return self._at_once(call, x, out)
        return self._all_reduce(x, op, out, label, waits=True)

    def start_all_reduce(
        self, x: Array, op: str = "sum", *, out: Array | None = None, label: str = ""
    ) -> Pending:
        return self._all_reduce(x, op, out, label, waits=False)

    def _all_reduce(self, x: Array, op: str, out: Array | None, label: str, waits: bool) -> Any:
        key = "all_reduce", type(x), x.dtype, x.shape, op, label
        try:
            call = self._prepared.get(key) or self._keep(key, prepare.all_reduce(self, x, op, label), x)
            x = x if x.dtype == call.dtype else x.astype(call.dtype)
            check_out("all_reduce", x, out)
        except UsageError as error:
            return self._refused("all_reduce", label, error, waits)
        if self.size == 1:
            return self._alone(x.copy() if out is None else copied(x, out), waits)
        return self._make(call, x, out, waits)

    def reduce_scatter(
        self,
        x: Array,
        axis: int = 0,
        op: str = "sum",
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Array:
        """This rank's part, along ``axis``, of the reduction over ranks.

        The parts are even, the first ranks getting one more where they cannot be, or as ``sizes`` says. ``out``
        (contiguous; may be this rank's part of ``x``) receives the result.
        """
        call = self._waiting.get(("reduce_scatter", type(x), x.dtype, x.shape, axis, op, ints(sizes), label))
        if call is not None and call.at_once and call.suits(out):
            return self._at_once(call, x, out)
        return self._reduce_scatter(x, axis, op, sizes, out, label, waits=True)

    def start_reduce_scatter(
        self,
        x: Array,
        axis: int = 0,
        op: str = "sum",
        *,
        sizes: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Pending:
        return self._reduce_scatter(x, axis, op, sizes, out, label, waits=False)

    def _reduce_scatter(
        self,
        x: Array,
        axis: int,
        op: str,
        sizes: Sequence[int] | None,
        out: Array | None,
        label: str,
        waits: bool,
    ) -> Any:
        sizes = ints(sizes)
        key = "reduce_scatter", type(x), x.dtype, x.shape, axis, op, sizes, label
        try:
            call = self._prepared.get(key)
            call = call or self._keep(key, prepare.reduce_scatter(self, x, axis, op, sizes, label), x)
            x = x if x.dtype == call.dtype else x.astype(call.dtype)
            check_out("reduce_scatter", x[call.parts[self.rank]], out)
        except UsageError as error:
            return self._refused("reduce_scatter", label, error, waits)
        if self.size == 1:
            return self._alone(x.copy() if out is None else copied(x, out), waits)
        return self._make(call, x, out, waits)

    def all_to_all(
        self,
        x: Array,
        axis: int = 0,
        concat_axis: int | None = None,
        *,
        splits: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Any:
        """Part r of ``x`` along ``axis`` goes to rank r; what comes is joined along ``concat_axis`` (``axis``).

        Parts are even. With ``splits``, the length of each, of any sum, 0 included and different on every rank, it
        returns (y, received): also how long along ``concat_axis`` that is which came from each rank, the splits of the
        way back. Who knows these says them, and ranks of several nodes, if all do, need not ask: they must be right.
        ``out``, contiguous, with ``concat_axis`` 0, receives y.
        """
        key = "all_to_all", type(x), x.dtype, x.shape, axis, concat_axis, ints(splits), ints(received), label
        call = self._waiting.get(key)
        if call is not None and call.at_once and call.suits(out):
            return self._at_once(call, x, out)
        return self._all_to_all(x, axis, concat_axis, splits, received, out, label, waits=True)

    def start_all_to_all(
        self,
        x: Array,
        axis: int = 0,
        concat_axis: int | None = None,
        *,
        splits: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        out: Array | None = None,
        label: str = "",
    ) -> Pending:
        return self._all_to_all(x, axis, concat_axis, splits, received, out, label, waits=False)

    def _all_to_all(
        self,
        x: Array,
        axis: int,
        concat_axis: int | None,
        splits: Sequence[int] | None,
        received: Sequence[int] | None,
        out: Array | None,
        label: str,
        waits: bool,
    ) -> Any:
        splits, received = ints(splits), ints(received)
        key = "all_to_all", type(x), x.dtype, x.shape, axis, concat_axis, splits, received, label
        try:
            call = self._prepared.get(key) or self._keep(
                key, prepare.all_to_all(self, x, axis, concat_axis, splits, received, label), x
            )
            if out is not None and (call.signature.concat_axis or out.dtype != x.dtype or not takes_results(out)):
                kind = f"a contiguous, writable array of {x.dtype}"
                raise UsageError(f"all_to_all: out must be {kind}, and what comes be joined along axis 0")
            if out is not None and isinstance(x, np.ndarray) and np.may_share_memory(x, out):
                raise UsageError("all_to_all: out must not share memory with what is sent")
        except UsageError as error:
            return self._refused("all_to_all", label, error, waits)
        if self.size == 1:
            check_out("all_to_all", x, out)
            y = x.copy() if out is None else copied(x, out)
            return self._alone(y if splits is None else (y, list(splits)), waits)
        return self._make(call, x, out, waits)

    # --- between two ranks

    def send(self, to: int, x: Array, *, channel: int | None = None, label: str = "") -> None:
        """Send ``x``, with its shape and dtype, to rank ``to`` of the group. What cannot be sent, neither side gets:
        both raise the same UsageError."""
        self.start_send(to, x, channel=channel, label=label).wait()

    def start_send(self, to: int, x: Array, *, channel: int | None = None, label: str = "") -> Pending:
        """See ``PointToPoint`` for channels."""
        return self._point_to_point.start_send(to, x, channel, label)

    def receive(self, source: int, *, like: Backend = CPU, channel: int | None = None, label: str = "") -> Array:
        """The next array that rank ``source`` sends here; shape and dtype come with it. ``like``: where to."""
        return self.start_receive(source, like=like, channel=channel, label=label).wait()

    def start_receive(
        self, source: int, *, like: Backend = CPU, channel: int | None = None, label: str = ""
    ) -> Pending:
        return self._point_to_point.start_receive(source, like, channel, label)

    # --- ends of all

    def _alone(self, result: Array, waits: bool) -> Any:
        return result if waits else Pending.completed(result)

    def _refused(self, operation: str, label: str, error: UsageError, waits: bool) -> Any:
        pending = self._refuse(operation, label, error)
        return pending.wait() if waits else pending


def ints(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Sizes as a signature carries them."""
    return None if sizes is None else tuple(map(int, sizes))


def _broadcast_key(mine: Array | None, root: int, label: str) -> tuple:
    if mine is None:
        return "broadcast", None, root, label
    return "broadcast", type(mine), mine.dtype, mine.shape, root, label
