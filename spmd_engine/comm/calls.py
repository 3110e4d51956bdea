"""Calls of a group: prepared once for those that come again, numbered, begun, and entered in the ledger."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from spmd_engine.arrays import dtypes
from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.comm.agreement import signature
from spmd_engine.comm.agreement.call_agreement import bytes_of
from spmd_engine.comm.agreement.signature import NumberedCall, Signature, Signatures
from spmd_engine.comm.collectives import PREPARE, PreparedCall
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.dispatch import inline_at_most
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import TIMEOUT, Pending, Steps
from spmd_engine.comm.routing import Routing
from spmd_engine.comm.shared_memory.slot_table import LEFT, SlotTable
from spmd_engine.comm.staging import copied
from spmd_engine.errors import UsageError
from spmd_engine.runtime.activity import Line

KEPT = 512  # prepared calls that are kept at most


class Calls:
    """Ranks that call: a communicator, the mesh axes it stands for, and the account it writes to.

    ``check`` compares what ranks call before data moves; ``timeout`` is how many seconds a rank waits for
    others before it raises CommunicationTimeout (None: for ever). ``deterministic``: no sum in the order of the MPI
    library (see ``Tuning.in_rank_order``), but of ranks.
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
        self.comm, self.axes, self.ledger, self.check, self.timeout = comm, axes, ledger, check, timeout
        self.rank, self.size = comm.rank, comm.size
        self._table = comm.table
        self._spins = self._table is not None and comm.spin_tests > 0 and comm.size > 1  # one alone meets nobody
        #: bytes of data that a signature brings along
        self._room = comm.table.room if comm.table else comm.tuning.with_agreement // comm.size
        self.routing = Routing(comm, axes, check, deterministic)
        self._prepared: dict[tuple, PreparedCall] = {}

    # --- the two ways to make a call: to wait for it, and to begin it

    def _call(self, operation: str, x: Array | None, arguments: tuple = (), out: Any = None, label: str = "") -> Any:
        """The result of the next call, for which this rank waits; ``arguments``: as ``PREPARE`` has them."""
        key = _key(operation, x, arguments, label)
        call = self._prepared.get(key)
        if call is not None and call.at_once and call.suits(x, out, self._table):
            return self._at_once(call, x, out)
        try:
            call, x = self._find(key, x, arguments, out)
        except UsageError as error:
            return self._refuse(operation, label, error).wait()
        if self.size == 1:
            return self._alone(call, x, out)
        return self._start(call, x, out, spin_tests=self.comm.spin_tests).wait()

    def _begin(
        self, operation: str, x: Array | None, arguments: tuple = (), out: Any = None, label: str = ""
    ) -> Pending:
        """The same, under way."""
        try:
            call, x = self._find(_key(operation, x, arguments, label), x, arguments, out)
        except UsageError as error:
            return self._refuse(operation, label, error)
        return self._start(call, x, out) if self.size > 1 else Pending.completed(self._alone(call, x, out))

    def _find(self, key: tuple, x: Array | None, arguments: tuple, out: Any) -> tuple[PreparedCall, Array | None]:
        """The call prepared for such an array, and the array as it takes it. Raises UsageError if it cannot be made."""
        call = self._prepared.get(key) or self._keep(key, PREPARE[key[0]](self, x, *arguments, key[-1]), x)
        if x is not None and x.dtype != call.dtype:
            x = x.astype(call.dtype)
        if out is not None:
            call.check_out(x, out, self.size)
        return call, x

    def _alone(self, call: PreparedCall, x: Array | None, out: Any) -> Any:
        """What a call of a single rank returns."""
        if x is None:
            return None
        result = copied(x, out) if out is not None and not isinstance(out, Backend) else x.copy()
        return (result, [x.shape[call.signature.concat_axis]]) if call.tells else result

    # --- to prepare

    def _keep(self, key: tuple, call: PreparedCall, x: Array | None = None) -> PreparedCall:
        """Keep ``call`` for the next one that is described by ``key``, of an array like ``x``."""
        if len(self._prepared) >= KEPT:
            self._prepared.clear()
        call.text = self.comm.progress.activity.called(*call.where)
        call.spins = self._spins and (x is None or (type(x) is np.ndarray and x.dtype == call.dtype))
        call.expect(self._all_like(call))
        self._prepared[key] = call
        return call

    def _all_like(self, call: PreparedCall) -> Signatures | None:
        """What the ranks of this node would say if all called the same."""
        table = self.comm.node_table
        return Signatures([call.signature] * table.size) if table is not None else None

    def signature_of(self, operation: str, x: Array | None, **fields: Any) -> Signature:
        """What to tell the others."""
        if x is None:
            return Signature(operation, **fields)
        if x.ndim > signature.MAX_DIMS:
            raise UsageError(f"{operation}: {x.ndim} dimensions; at most {signature.MAX_DIMS} can be told to others")
        # What others get of it is in one piece; and who has read must wait for the others, which is short if all spin.
        whole = not (fields.get("axis") or fields.get("concat_axis"))
        reads = whole and self._spins and self._table.neighbours.cross_memory is not None
        most = inline_at_most(operation, self.size, self._room, reads, self.comm.tuning)
        small = x.nbytes <= most and isinstance(x, np.ndarray)
        fields.setdefault("inline", x.nbytes if small else 0)
        dtype, host = dtypes.describe(x.dtype), isinstance(x, np.ndarray)
        return Signature(operation, dtype=dtype, shape=x.shape, host=host, **fields)

    def _refuse(self, operation: str, label: str, error: UsageError) -> Pending:
        """A call that this rank cannot make. It says so in its place, and all ranks raise the same UsageError."""
        if self.size == 1:
            raise error
        text = bytes_of(str(error))
        return self._start(self._say("refuse", (operation, self.axes, label), text), text)

    def _say(self, what: str, where: tuple[str, str, str], text: np.ndarray) -> PreparedCall:
        """A call that only brings a text."""
        call = PreparedCall(Signature(what, inline=text.size), where)
        call.expected = self._all_like(call)
        return call

    # --- to make

    def _start(
        self, call: PreparedCall, x: Array | None, out: Any = None, *, number: int = 0, spin_tests: int = 0
    ) -> Pending:
        """Start call ``number``, or the next one, see ``Progress.begin``; write to the ledger when it ends."""
        began = perf_counter()
        number = number or self.comm.next_call(call.text)
        steps = call.steps(self.routing, number, x, out)
        if self._table is None:
            self.comm.turns.enter(number)
        pending = self.comm.progress.begin(Operation(self, call, number, steps), spin_tests)
        pending.on_wait(perf_counter() - began)
        return pending

    def _end(self, number: int) -> None:
        """Call ``number`` is over."""
        if self._table is None:
            self.comm.turns.over(number)
        if self.comm.node_table is not None:
            self.comm.node_table.say(number, LEFT)

    def _at_once(self, call: PreparedCall, x: np.ndarray | None, out: np.ndarray | None) -> Array:
        """The whole of a call that takes one phase; by its steps where the others are far away, or do not agree."""
        began, comm, table, expected = perf_counter(), self.comm, self._table, call.expected
        number, small = comm.next_call(call.text), expected.inline_all
        progress = comm.progress
        with progress.lock:
            blocks = table.meet_at_once(number, expected, x, progress, comm.spin_tests)
            if blocks is None:
                return self._start(call, x, out, number=number).wait()
            try:
                result = call.finish(None if expected.same else expected, blocks, out)
            finally:
                if small:
                    table.leave_at_once(number)
                else:
                    table.say(number, LEFT)
            if not (small or x is None or progress.spin(partial(table.reached, number, LEFT), comm.spin_tests)):
                return progress.begin(Operation(self, call, number, _unread(table, number, result))).wait()
        call.record(self.ledger, result, perf_counter() - began)
        return result


class Operation(Pending):
    """A call of a group under way."""

    __slots__ = ("_calls", "_call", "_number")

    def __init__(self, calls: Calls, call: PreparedCall, number: int, steps: Steps) -> None:
        super().__init__(calls.comm, steps, calls.timeout)
        self._calls, self._call, self._number = calls, call, number
        calls.ledger.open(*call.where)  # now: others may be reading the ledger when this ends

    def describe(self) -> str:
        operation, axes, label = self._call.where
        what = str(NumberedCall(self._number, self._call.signature)) if self._number else operation
        calls = self._calls
        return f"{what} over {axes!r}{f' ({label})' if label else ''}, group rank {calls.rank} of {calls.size}"

    def call(self) -> tuple[Line, int, int]:
        call, comm = self._call, self._calls.comm
        return comm.line, self._number, call.text or comm.progress.activity.called(*call.where)

    def on_end(self) -> None:
        if self._number:
            self._calls._end(self._number)  # first, as others may wait for it
        if self.error is None:
            self._call.record(self._calls.ledger, self.result)

    def on_wait(self, seconds: float) -> None:
        self._calls.ledger.record_wait(*self._call.where, seconds)


def _unread(table: SlotTable, number: int, result: Any) -> Steps:
    """The end of a call whose ``result`` is here: until nobody reads this rank's memory any more."""
    yield from table.come_to(number, LEFT)
    return result


def _key(operation: str, x: Array | None, arguments: tuple, label: str) -> tuple:
    """By what a call is found again: first the operation, and the label last."""
    if x is None:
        return operation, arguments, label
    return operation, type(x), x.dtype, x.shape, arguments, label
