"""The one door that every call goes through: headers, device staging, and the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm import by_library, dtypes, header, meeting, staging
from spmd_engine.comm.activity import Line
from spmd_engine.comm.between_nodes import BetweenNodes
from spmd_engine.comm.board import LEFT
from spmd_engine.comm.communicator import Communicator
from spmd_engine.comm.header import Call, Header, Said
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import TIMEOUT, Pending, Steps
from spmd_engine.comm.transports.messages import Messages
from spmd_engine.errors import UsageError

_PLANS = 512  # plans that are kept at most


@dataclass(slots=True)
class Plan:
    """All of a call that does not depend on the values in its array; made once for calls that come again."""

    header: Header
    where: tuple[str, str, str]  # operation, axes and label, as the ledger has them
    steps: Callable[[Plan, int, Array | None, Any], Steps]  # of plan, number, array and out: the whole of it
    #: Of plan, array, everyone's inline blocks, and out: the result, of a call that needs no more than these.
    finish: Callable[[Plan, Array | None, Sequence[Array | None], Any], Array | None] | None = None
    library: Callable[[Plan, Array, Sequence[None], Any], Array] | None = None  # as finish: where MPI's moves the data
    payload: int = 0  # bytes
    sent: int | Callable[[Array], int] = 0  # bytes; a function of the result, where that must be known
    shape: tuple[int, ...] = ()  # of the result, if all ranks call the same
    dtype: Any = None  # what the array is cast to first
    parts: list[tuple[slice, ...]] | None = None  # of the array, by rank
    sizes: Sequence[int] | None = None  # lengths by rank, as the caller says
    reduce: Callable[[Array, Sequence[Array]], None] | None = None  # of out and blocks
    at_once: bool = False  # whether a blocking call may be made without the machinery for those under way
    said: Said | None = None  # by everyone on the board, last time
    by_library: Plan | None = None  # for blocking calls, if the MPI library is to move the data
    told: Header | None = None  # what ranks of several nodes tell each other: the terms of it in place of the sizes
    text: int = 0  # the number of what it is, see ``Activity.called``; 0: not asked for yet
    quick: bool = False  # whether this rank needs no more than the others say to finish


class Door:
    """Ranks that communicate: a communicator, the mesh axes it stands for, and the account it writes to.

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
        self._board, self._lanes = comm.board, comm.lanes
        self._pages = comm.lanes.board if comm.lanes else comm.board  #: whose pages calls take in turn, if any
        self._between = BetweenNodes(comm, axes, deterministic) if comm.board is None else None
        self._messages = Messages(comm)
        #: bytes of data that a header brings along
        self._inline = comm.board.room if comm.board else comm.tuning.with_agreement // comm.size
        self._plans: dict[tuple, Plan] = {}

    def _keep(self, key: tuple, plan: Plan, x: Array | None = None) -> Plan:
        """Keep ``plan`` for the next call that is described by ``key``, of an array like ``x``."""
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        plan.text = self.comm.progress.activity.called(*plan.where)
        self._plans[key] = plan
        if self._between is not None:
            host = x is None or isinstance(x, np.ndarray)
            terms = plan.header.terms(plan.sizes, host, plan.payload)
            inline = plan.header.inline if plan.header.shape is not None else 0
            plan.told = replace(plan.header, sizes=terms, inline=inline)
        if self._board is not None and self.comm.looks > 0:
            if self._is_for_the_library(plan, x):
                told = replace(plan.header, by_library=True)
                plan.by_library = replace(plan, header=told, finish=plan.library, quick=True)
                self._expect(plan.by_library, Said([told] * self.size))
            elif plan.finish is not None and (x is None or plan.header.inline) and (x is None or plan.dtype == x.dtype):
                plan.quick = True
                self._expect(plan, Said([plan.header] * self.size))
        return plan

    def _is_for_the_library(self, plan: Plan, x: Array | None) -> bool:
        """Whether the MPI library is to move the data of a blocking call."""
        if plan.library is None or self.comm.library is None or type(x) is not np.ndarray or plan.dtype != x.dtype:
            return False
        return not plan.header.inline and 0 < plan.payload <= by_library.MOST[plan.header.operation]

    def _expect(self, plan: Plan, said: Said) -> None:
        """The next call of this plan will probably find ``said`` on the board."""
        plan.said, plan.at_once = said, plan.quick and said.at_once

    def _begin_blocking(self, plan: Plan, x: Array, out: Array | None = None) -> Pending:
        """Start the next call, of one who will wait for it. Memory that ranks share is faster read where it is."""
        if plan.by_library is None or self._is_shared(x) or (out is not None and not self._is_ordinary(out)):
            return self._begin(plan, x, out)
        plan = plan.by_library
        if plan.at_once and suits(plan, out):
            return Pending.completed(self._at_once(plan, x, out))
        return self._begin(plan, x, out)

    def _is_shared(self, x: Array) -> bool:
        return self._board.neighbours.offset(x) is not None

    def _is_ordinary(self, out: Array) -> bool:
        return type(out) is np.ndarray and not self._is_shared(out)

    def _header(self, operation: str, x: Array | None, *, limit: int | None = None, **fields: Any) -> Header:
        """What to tell the others, with at most ``limit`` bytes of data."""
        if x is None:
            return Header(operation, **fields)
        if x.ndim > header.MAX_DIMS:
            raise UsageError(f"{operation}: {x.ndim} dimensions; at most {header.MAX_DIMS} can be told to others")
        small = x.nbytes <= (self._inline if limit is None else limit) and isinstance(x, np.ndarray)
        name = dtypes.describe(x.dtype)
        return Header(operation, dtype=name, shape=x.shape, inline=x.nbytes if small else 0, **fields)

    def _refuse(self, operation: str, label: str, error: UsageError) -> Pending:
        """A call that this rank cannot make. It says so in its place, and all ranks raise the same UsageError."""
        if self.size == 1:
            raise error
        text = meeting.bytes_of(str(error))
        return self._begin(self._say("refuse", (operation, self.axes, label), text), text)

    def _say(self, what: str, where: tuple[str, str, str], text: np.ndarray) -> Plan:
        """A call that only brings a text."""
        steps = self._between.meet_only if self._between else self._meet_only
        plan = Plan(Header(what, inline=text.size), where, steps)
        if self._between:
            plan.told = Header(what, sizes=plan.header.terms(None, True, 0))
        return plan

    def _begin(self, plan: Plan, x: Array | None, out: Any = None) -> Pending:
        """Start the next call; write to the ledger when it ends."""
        number, began = self.comm.next_call(plan.text), perf_counter()
        steps = plan.steps(plan, number, x, out)
        if self._between is not None:
            self.comm.turns.enter(number)
        if self._lanes is not None:
            steps = self._lanes.in_turn(number, steps)
        pending = self.comm.progress.begin(Operation(self, plan, number, steps))
        pending.on_wait(perf_counter() - began)
        return pending

    def _at_once(self, plan: Plan, x: np.ndarray | None, out: np.ndarray | None) -> Array:
        """The whole of a small call; where the others are far away, or do not agree, by its steps."""
        began, number = perf_counter(), self.comm.next_call(plan.text)
        with self.comm.progress.lock:
            blocks = self._board.meet_at_once(number, plan.said, x, self.comm.progress, self.comm.looks)
            if blocks is None:
                steps = plan.steps(plan, number, x, out)
                return self.comm.progress.begin(Operation(self, plan, number, steps)).wait()
            try:
                result = plan.finish(plan, x, blocks, out)
            finally:
                self._board.say(number, LEFT)
            sent = plan.sent(result) if callable(plan.sent) else plan.sent
        self.ledger.record(*plan.where, payload=plan.payload, sent=sent, seconds=perf_counter() - began)
        return result

    def _meet(self, plan: Plan, number: int, x: Array | None, **how: Any) -> Steps:
        """Tell the others of this call, show them ``x``, and hear them: steps to a Meeting. ``how``: see on_board."""
        # device memory goes by messages
        shown = x if isinstance(x, np.ndarray) and not plan.header.by_library else None
        how["expected"] = plan.said
        met = yield from meeting.on_board(self._board, Call(number, plan.header), shown, self.axes, self.check, **how)
        if met.said is not plan.said:
            self._expect(plan, met.said)
        return met

    def _meet_only(self, plan: Plan, number: int, text: np.ndarray | None, _: None) -> Steps:
        yield from self._meet(plan, number, text)

    def _ready(self, x: Array) -> tuple[Array, Callable[[Array], Array]]:
        return staging.ready(self.comm, x)

    def _reachable(self, x: Array) -> bool:
        return staging.is_reachable(self.comm, x)


class Operation(Pending):
    """A call of a group under way."""

    __slots__ = ("_door", "_plan", "_number")

    def __init__(self, door: Door, plan: Plan, number: int, steps: Steps) -> None:
        super().__init__(door.comm, steps, door.timeout)
        self._door, self._plan, self._number = door, plan, number
        door.ledger.open(*plan.where)  # now: others may be reading the ledger when this ends

    def describe(self) -> str:
        operation, axes, label = self._plan.where
        what = str(Call(self._number, self._plan.header)) if self._number else operation
        door = self._door
        return f"{what} over {axes!r}{f' ({label})' if label else ''}, group rank {door.rank} of {door.size}"

    def call(self) -> tuple[Line, int, int]:
        plan, comm = self._plan, self._door.comm
        return comm.line, self._number, plan.text or comm.progress.activity.called(*plan.where)

    def on_result(self) -> None:
        sent = self._plan.sent
        self._door.ledger.record(
            *self._plan.where, payload=self._plan.payload, sent=sent(self.result) if callable(sent) else sent
        )

    def on_end(self) -> None:
        if self._number:
            self._door.comm.turns.over(self._number)
            if self._door._pages is not None:
                self._door._pages.say(self._number, LEFT)

    def on_wait(self, seconds: float) -> None:
        self._door.ledger.record_wait(*self._plan.where, seconds)


def suits(plan: Plan, out: Array | None) -> bool:
    """Whether ``out`` can receive the result of this call at once."""
    return out is None or (
        plan.said.same
        and type(out) is np.ndarray
        and out.shape == plan.shape
        and out.dtype is plan.dtype
        and out.flags.carray  # contiguous, and can be written to
    )
