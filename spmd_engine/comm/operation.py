"""A call of a group under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spmd_engine.comm.pending import Pending, Steps
from spmd_engine.comm.prepared_call import PreparedCall
from spmd_engine.comm.signature import NumberedCall
from spmd_engine.comm.slot_table import LEFT
from spmd_engine.watchdog.activity import Line

if TYPE_CHECKING:
    from spmd_engine.comm.calls import Calls


class Operation(Pending):
    """A call of a group under way; it waits for what is ``awaited``."""

    __slots__ = ("_calls", "_call", "_number")

    def __init__(
        self, calls: Calls, call: PreparedCall, number: int, steps: Steps, awaited: list | Callable[[], bool] = ()
    ) -> None:
        super().__init__(calls.comm, steps, calls.timeout)
        if awaited:
            self._awaited = awaited
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

    def on_result(self) -> None:
        self._call.record(self._calls.ledger, self.result)

    def on_end(self) -> None:
        if self._number:
            comm = self._calls.comm
            if comm.table is None:
                comm.turns.over(self._number)
            table = comm.node_table
            if table is not None:
                table.say(self._number, LEFT)

    def on_wait(self, seconds: float) -> None:
        self._calls.ledger.record_wait(*self._call.where, seconds)
