"""Calls of a group: prepared once for those that come again, numbered, begun, and entered in the ledger."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.comm import dtypes, rendezvous, signature
from spmd_engine.comm.collectives import PREPARE, Collective
from spmd_engine.comm.communicator import Communicator
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.operation import Operation
from spmd_engine.comm.pending import TIMEOUT, Pending
from spmd_engine.comm.prepared_call import PreparedCall
from spmd_engine.comm.routing import Routing
from spmd_engine.comm.signature import Signature, Signatures
from spmd_engine.comm.slot_table import LEFT
from spmd_engine.comm.staging import copied
from spmd_engine.comm.ways import blocking_at_most, inline_at_most
from spmd_engine.errors import SpmdError, UsageError

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
        self._table, self._lanes = comm.table, comm.lanes
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
        if call is not None and call.at_once and call.suits(out):
            return self._at_once(call, x, out)
        try:
            call, x = self._find(key, x, arguments, out)
        except UsageError as error:
            return self._refuse(operation, label, error).wait()
        return self._wait_for(call, x, out) if self.size > 1 else self._alone(call, x, out)

    def _begin(
        self, operation: str, x: Array | None, arguments: tuple = (), out: Any = None, label: str = ""
    ) -> Pending:
        """The same, under way."""
        try:
            call, x = self._find(_key(operation, x, arguments, label), x, arguments, out)
        except UsageError as error:
            return self._refuse(operation, label, error)
        return self._start(call, x, out) if self.size > 1 else Pending.completed(self._alone(call, x, out))

    def _find(self, key: tuple, x: Array | None, arguments: tuple, out: Any) -> tuple[Collective, Array | None]:
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
        self._prepared[key] = call
        if self._table is None:
            call.terms = self._terms_of(call, x is None or isinstance(x, np.ndarray))
            return call
        call.expected = Signatures([call.signature] * self.size)
        plain = x is None or (type(x) is np.ndarray and x.dtype == call.dtype)
        if plain and self._spins and isinstance(call, Collective):
            call.waiting = self._offering(call, x)
        return call

    def _offering(self, call: PreparedCall, x: Array | None) -> PreparedCall:
        """The same for a rank that waits, with ordinary memory: larger data are for the library to move."""
        large = x is not None and 0 < x.nbytes <= blocking_at_most(call.signature.operation, self.comm.tuning)
        told = replace(call.signature, waits=large and not call.signature.inline and self.comm.library is not None)
        if told != call.signature:
            call = replace(call, signature=told)
        call.is_small = x is None or call.signature.inline > 0
        call.expect(Signatures([told] * self.size))
        return call

    def signature_of(self, operation: str, x: Array | None, **fields: Any) -> Signature:
        """What to tell the others."""
        if x is None:
            return Signature(operation, **fields)
        if x.ndim > signature.MAX_DIMS:
            raise UsageError(f"{operation}: {x.ndim} dimensions; at most {signature.MAX_DIMS} can be told to others")
        most = inline_at_most(operation, self.size, self._room, self.comm.tuning)
        small = x.nbytes <= most and isinstance(x, np.ndarray)
        fields.setdefault("inline", x.nbytes if small else 0)
        return Signature(operation, dtype=dtypes.describe(x.dtype), shape=x.shape, **fields)

    def _terms_of(self, call: PreparedCall, host: bool) -> Signature:
        told = call.signature
        inline = told.inline if told.shape is not None else 0
        return replace(told, sizes=told.terms(call.sizes, host, call.payload), inline=inline)

    def _refuse(self, operation: str, label: str, error: UsageError) -> Pending:
        """A call that this rank cannot make. It says so in its place, and all ranks raise the same UsageError."""
        if self.size == 1:
            raise error
        text = rendezvous.bytes_of(str(error))
        return self._start(self._say("refuse", (operation, self.axes, label), text), text)

    def _say(self, what: str, where: tuple[str, str, str], text: np.ndarray) -> PreparedCall:
        """A call that only brings a text."""
        call = PreparedCall(Signature(what, inline=text.size), where)
        if self._table is None:
            call.terms = replace(self._terms_of(call, True), inline=0)
        else:
            call.expected = Signatures([call.signature] * self.size)
        return call

    # --- to make

    def _start(self, call: PreparedCall, x: Array | None, out: Any = None) -> Pending:
        """Start the next call; write to the ledger when it ends."""
        number, began = self.comm.next_call(call.text), perf_counter()
        steps = call.steps(self.routing, number, x, out)
        if self._table is None:
            self.comm.turns.enter(number)
        if self._lanes is not None:
            steps = self._lanes.in_turn(number, steps)
        pending = self.comm.progress.begin(Operation(self, call, number, steps))
        pending.on_wait(perf_counter() - began)
        return pending

    def _wait_for(self, call: PreparedCall, x: Array | None, out: Any = None) -> Any:
        """The result of the next call, with no more ado than it takes where the others are not far."""
        if not self._spins:
            return self._start(call, x, out).wait()
        if call.waiting is not None and self._is_ordinary(x) and self._is_ordinary(out):
            call = call.waiting
            if call.library_at_once and call.suits(out):
                return self._at_once(call, x, out)
        began, number = perf_counter(), self.comm.next_call(call.text)
        progress, steps, operation = self.comm.progress, call.steps(self.routing, number, x, out), None
        with progress.lock:
            try:
                awaited = next(steps)
                while not isinstance(awaited, list) and progress.spin(awaited, self.comm.spin_tests):
                    awaited = next(steps)
                operation = Operation(self, call, number, steps, awaited)
            except StopIteration as stop:
                result = stop.value
                self._table.say(number, LEFT)
            except Exception as error:
                self._table.say(number, LEFT)
                raise error.with_traceback(None) if isinstance(error, SpmdError) else error from None
        if operation is not None:
            operation.on_wait(perf_counter() - began)
            return progress.begin(operation).wait()
        call.record(self.ledger, result, perf_counter() - began)
        return result

    def _at_once(self, call: PreparedCall, x: np.ndarray | None, out: np.ndarray | None) -> Array:
        """The whole of a call of small data, or for the library; by its steps where the others are far away, or do not
        agree."""
        began, comm, table, expected = perf_counter(), self.comm, self._table, call.expected
        number = comm.next_call(call.text)
        progress = comm.progress
        with progress.lock:
            blocks = table.meet_at_once(number, expected, x, progress, comm.spin_tests)
            if blocks is None:
                steps = call.steps(self.routing, number, x, out)
                return progress.begin(Operation(self, call, number, steps)).wait()
            try:
                if expected.wait:
                    result = call.by_library(comm.library, x, out)
                else:
                    result = call.finish(None if expected.same else expected, blocks, out)
            finally:
                table.leave_at_once(number)
        call.record(self.ledger, result, perf_counter() - began)
        return result

    def _is_ordinary(self, x: Array | None) -> bool:
        """Whether it is memory of this process alone: what ranks share is faster read where it is, if it is large."""
        return x is None or (type(x) is np.ndarray and self._table.neighbours.offset(x) is None)


def _key(operation: str, x: Array | None, arguments: tuple, label: str) -> tuple:
    """By what a call is found again: first the operation, and the label last."""
    if x is None:
        return operation, arguments, label
    return operation, type(x), x.dtype, x.shape, arguments, label
