"""A thread that reports which ranks wait for which when a rank has waited for too long.

Every process has one. It reads the records of all ranks of its node (``activity``), also of ranks that are stopped or
killed, and writes the stacks of its own threads into its own record. When a wait is overdue, the lowest rank of the
node with a live watchdog reports it once for all; with several nodes, these first exchange their states. The watchdog
does not end the job: the waiting ranks raise CommunicationTimeout in the end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from spmd_engine.errors import UsageError
from spmd_engine.files import open_regular
from spmd_engine.runtime.activity import Activity, Record, State, frames_of_others, stack_of, stacks_here
from spmd_engine.runtime.hang_report import Hang, look_at

if TYPE_CHECKING:
    from spmd_engine.runtime.other_nodes import OtherNodes

PERIOD = 0.5  # seconds between checks
FRESH = 10.0  # seconds after which nodes exchange their states again
ANSWERS = 3 * PERIOD  # seconds to wait for the states of other nodes
ALIVE = 4.0  # seconds: a watchdog is alive if its record is no older
AGAIN = 4  # a hang is reported again when it has lasted this many times as long
FILE = "hang.txt"  #: in the folder of a run: the report, and all stacks

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Watchdog:
    """Watches the ranks of a node from one of them: ``activity`` is its own record, which knows all of the others."""

    def __init__(self, activity: Activity, rank: int, size: int, elsewhere: OtherNodes | None = None) -> None:
        self._activity, self._records, self._rank, self._size = activity, list(activity.records), rank, size
        self._elsewhere = elsewhere
        self._ends = threading.Event()
        self._sent_at, self._heard = -FRESH, list[State]()
        activity.explain = self.explain
        self._thread = threading.Thread(target=self._run, name="spmd_engine watchdog", daemon=True)
        self._start()

    def _start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            _attempt(self._beat)
            if self._ends.wait(PERIOD):
                return
            _attempt(self._look)

    def _beat(self) -> None:
        names = {thread.ident or 0: thread.name for thread in threading.enumerate()}
        self._activity.beat(stacks_here(names))

    def _look(self) -> None:
        self._heard = self._elsewhere.heard() if self._elsewhere else []
        if self._leads and (self._heard or any(record.is_overdue for record in self._records)):
            self._check_for_hang(self._heard)

    def explain(self) -> str:
        """The activity of the ranks for which others wait, by this node's records and other nodes' states."""
        hang = _attempt(lambda: look_at([*self._states(), *self._heard], self._size))
        return hang.why if hang else ""

    @property
    def _leads(self) -> bool:
        """Whether no lower rank of this node has a live watchdog."""
        now = time.monotonic_ns()
        lower = [record for record in self._records if record.rank < self._rank]
        return not any(now - record.beat < 1e9 * ALIVE for record in lower)

    def _states(self) -> list[State]:
        """The states of this watchdog's ranks."""
        return [record.state(condition_of(record.process)) for record in self._records]

    def _check_for_hang(self, heard: Sequence[State]) -> None:
        states = self._states()
        if self._elsewhere:
            now = time.monotonic()
            if now - self._sent_at > FRESH:
                self._sent_at = now
                self._elsewhere.send_states(states)
            patience = ANSWERS * (2 if states[0].rank else 1)  # so that the first node reports it, if it can
            if now - self._sent_at < patience:
                return  # their states may still arrive
            if any(state.rank < states[0].rank for state in heard):
                return  # a live node with lower ranks reports it
        all_states = sorted([*states, *heard], key=lambda state: state.rank)
        hang = look_at(all_states, self._size)
        if hang is not None and self._should_report(states):
            report_hang(hang, all_states, self._activity.folder)
            self._activity.reported()
            if self._elsewhere:  # so that a node that answers late does not report this hang
                self._elsewhere.send_states([record.state() for record in self._records])

    def _should_report(self, states: Sequence[State]) -> bool:
        """Whether no node has reported this hang, or it has lasted AGAIN times as long as at that time."""
        now, reported = time.monotonic(), max(record.reported for record in self._records) / 1e9
        begun = [now - state.wait.seconds for state in states if state.wait and state.wait.overdue]
        if self._elsewhere:
            reported = max(reported, self._elsewhere.reported)
            begun += self._elsewhere.begun  # the ranks of this node may have ended their waits by now
        first = min(begun, default=now)
        return reported <= first or now - first > AGAIN * (reported - first)


class ThreadWatchdog(Watchdog):
    """Watches ranks that are threads of this process; it starts when one of them waits for long."""

    def __init__(self, ranks: Sequence[Activity], threads: Callable[[], Mapping[int, int]]) -> None:
        """``threads`` returns the numbers of the threads by rank."""
        self._threads, self._started = threads, threading.Lock()
        records = [Record(rank, activity.memory) for rank, activity in enumerate(ranks)]
        for activity in ranks:
            activity.on_long_wait, activity.explain, activity.records = self._start_once, self.explain, records
        super().__init__(ranks[0], 0, len(ranks))

    def _start(self) -> None:
        """See ``_start_once``."""

    def _start_once(self) -> None:
        if self._started.acquire(blocking=False):
            super()._start()

    def _states(self) -> list[State]:
        frames, thread_of = frames_of_others(), self._threads()
        return [record.state(stack=stack_of(frames.get(thread_of.get(record.rank, 0)))) for record in self._records]


def _attempt(act: Callable[[], T]) -> T | None:
    """The result of ``act()``; after an error a warning and None, since no error may end a watchdog or its job."""
    try:
        return act()
    except Exception:  # noqa: BLE001
        logger.warning("the watchdog could not look this time", exc_info=True)
        return None


def report_hang(hang: Hang, states: Sequence[State], folder: Path | None) -> None:
    """Log the report, with the stacks of ranks for which others wait; write all stacks into the folder."""
    all_stacks = "\n\n".join(
        f"rank {state.rank}, process {state.process}{_format_age(state)}:\n{state.stack}" for state in states
    )
    location = ""
    if folder is not None:
        with suppress(OSError, UsageError):
            with open(open_regular(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{hang}\n\n{all_stacks}\n\n")
            location = f"\n  all stacks are in {folder / FILE}"
    first = [state for state in states if state.rank in hang.stuck and state.stack][:2]
    stacks = "".join(f"\n  stack of rank {state.rank}{_format_age(state)}:\n{_tail(state.stack)}" for state in first)
    logger.warning("%s%s%s", hang, location, stacks)


def condition_of(process: int) -> str:
    """Why a process cannot continue, by the operating system: it is stopped, or gone; empty if it can."""
    try:
        letter = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "its process is gone" if Path("/proc/self/stat").exists() else ""
    return {
        "T": "its process is stopped (SIGSTOP)",
        "t": "its process is stopped by a debugger",
        "Z": "its process has ended",
        "X": "its process has ended",
        "D": "its process waits for a disk or a device",
    }.get(letter, "")


def _format_age(state: State) -> str:
    return f", {state.stack_seconds:.0f} s ago" if state.stack_seconds > 2 * PERIOD else ""


def _tail(stack: str) -> str:
    """The last lines of the main thread, which comes last in ``stack``."""
    return "\n".join(f"  {line}" for line in stack.rpartition("MainThread:\n")[2].split("\n")[-8:])
