"""The report of a hang: which ranks wait for which, in one list for all ranks.

Pure functions of the states of ranks.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmd_engine.runtime.activity import CallRecord, State, ranges

_STANDARD = os.path.dirname(os.__file__)
HELD = 5.0  #: seconds after which the report mentions that a running process has not updated its record


class Hang(NamedTuple):
    """A hang: the activity of all ranks."""

    summary: str  #: in one line: how many ranks wait, and for which
    lines: tuple[str, ...]  #: all ranks, in groups that do the same; first those for which others wait
    stuck: tuple[int, ...]  #: the ranks for which the others wait
    why: str  #: in one line: what the stuck ranks do, or which ranks wait for each other

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"  {line}" for line in self.lines)])


def look_at(states: Sequence[State], size: int) -> Hang | None:
    """The hang that the states show; None if no wait is overdue, or all are for ranks that wait for something outside
    the job. ``size``: the number of ranks of the job."""
    by_rank = {state.rank: state for state in states}
    waiters = [state for state in states if state.wait and not state.condition]  # a stopped rank does not wait
    late = [state for state in waiters if state.wait and state.wait.overdue]
    if not late:
        return None
    waits_for = {state.rank: awaited(state, by_rank) for state in waiters}
    reached: set[int] = set()
    ahead = [state.rank for state in late]
    while ahead:
        for other in waits_for.get(ahead.pop(), ()):
            if other not in reached:
                reached.add(other)
                ahead.append(other)
    stuck = sorted(rank for rank in reached if rank not in waits_for)
    if stuck and all(rank in by_rank and by_rank[rank].idle and not by_rank[rank].condition for rank in stuck):
        return None
    longest = max(state.wait.seconds for state in late if state.wait)
    waiting = [state.rank for state in late]
    prefix = f"{_format(waiting)} of {size} {'has' if len(waiting) == 1 else 'have'} waited for {longest:.0f} s"
    if stuck:
        why = "; ".join(f"{_format(ranks)} {text}" for text, ranks in _group_ranks(stuck, by_rank).items())
        summary = f"{prefix}, for {_format(stuck)}:"
    else:
        circle = (f"{_format([rank])} for {_format(others)}" for rank, others in sorted(waits_for.items()) if others)
        why = f"ranks wait for each other: {', '.join(circle) or 'for ranks that could not be determined'}"
        summary = f"{prefix}; {why}"
    order = [*stuck, *(rank for rank in sorted(by_rank) if rank not in stuck)]
    lines = [f"{_format(ranks)} {text}" for text, ranks in _group_ranks(order, by_rank, waits_for).items()]
    return Hang(summary, tuple(lines), tuple(stuck), why)


def awaited(state: State, by_rank: Mapping[int, State]) -> list[int]:
    """The ranks for which a rank waits: the members that have not begun its collective; else those in its note.

    If all have begun it, the ranks that cannot continue, or else those that do not wait.
    """
    wait = state.wait
    assert wait
    if not wait.call.number:
        return list(wait.missing)
    others = [rank for rank in wait.call.members if rank != state.rank]
    missing = [
        rank for rank in others if rank not in by_rank or last_begun(by_rank[rank], wait.call) < wait.call.number
    ]
    named = [rank for rank in wait.missing if rank != state.rank]
    halted = [rank for rank in others if rank in by_rank and by_rank[rank].condition]
    return missing or named or halted or [rank for rank in others if not by_rank[rank].wait]


def last_begun(state: State, of: CallRecord) -> int:
    """The number of the last call that a rank has begun in the communicator of a call."""
    return next((call.number for call in state.begun if call.communicator == of.communicator), 0)


def _group_ranks(
    ranks: Sequence[int], by_rank: Mapping[int, State], waits_for: Mapping[int, Sequence[int]] | None = None
) -> dict[str, list[int]]:
    """Ranks by their descriptions."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        state = by_rank.get(rank)
        if state is None:
            groups["not heard from: on another node, or gone"].append(rank)
        elif state.wait:
            groups[_describe_wait(state, (waits_for or {}).get(rank, ()))].append(rank)
        else:
            groups[_describe_activity(state, by_rank)].append(rank)
    return groups


def _describe_wait(state: State, waited_for: Sequence[int]) -> str:
    wait = state.wait
    assert wait
    call = wait.call
    if call.operation == "leave":
        return "at the end of the program"
    if call.operation:
        label = f" ({call.label})" if call.label else ""
        counted = f" #{call.number}" if call.number else ""
        activity = f"in {call.operation}{counted}{label} over {call.axes!r}"
    else:
        activity = f"waiting {wait.what}".rstrip()
    others = f", for {_format(waited_for)}" if waited_for else ""
    at = f", at {wait.at}" if wait.at else ""
    return f"{activity}{others}, since {wait.seconds:.0f} s{at}{_phase(state)}{_condition(state)}"


def _describe_activity(state: State, by_rank: Mapping[int, State]) -> str:
    """The description of a rank that does not wait: its last call, and the calls that it has not begun."""
    overdue_calls = {
        other.wait.call.communicator: other.wait.call
        for other in by_rank.values()
        if other.wait and other.wait.overdue and other.wait.call.number and state.rank in other.wait.call.members
    }
    parts = []
    for call in overdue_calls.values():
        begun = next((record for record in state.begun if record.communicator == call.communicator), None)
        if begun is None:
            parts.append(f"has not come to #{call.number} over {call.axes!r}, nor to one before")
        elif begun.number < call.number:
            label = f" ({begun.label})" if begun.label else ""
            parts.append(
                f"came to {begun.operation} #{begun.number}{label} over {begun.axes!r} and not to #{call.number}"
            )
    lines = [line.strip() for line in state.stack.split("\n") if " in " in line]
    # Without the standard library, such as threading.py.
    user_lines = [line for line in lines if not line.startswith(_STANDARD) or "site-packages" in line]
    at = f", at {(user_lines or lines)[-1].rpartition('/')[2]}" if lines else ""
    at += f" {state.stack_seconds:.0f} s ago" if at and state.stack_seconds > 1.5 else ""
    return f"{'; '.join(parts) or 'waiting for no rank'}{_phase(state)}{at}{_condition(state)}"


def _phase(state: State) -> str:
    return f", {state.phase} (since {state.phase_seconds:.0f} s)" if state.phase else ""


def _condition(state: State) -> str:
    if state.condition:
        return f", {state.condition}"
    if state.stack_seconds > HELD:
        return f", no sign of life since {state.stack_seconds:.0f} s: in a call that lets no other thread run"
    return ""


def _format(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0-2,5``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ranges(sorted(ranks))
