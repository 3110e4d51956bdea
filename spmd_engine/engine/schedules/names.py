"""Schedules by name."""

from __future__ import annotations

from spmd_engine.engine.schedules.interleaved import Interleaved
from spmd_engine.engine.schedules.one_at_a_time import Naive, Sequential
from spmd_engine.engine.schedules.pipelined import GPipe, OneForwardOneBackward
from spmd_engine.engine.schedules.schedule import Schedule
from spmd_engine.engine.schedules.zero_bubble import ZeroBubble, ZeroBubbleH2
from spmd_engine.errors import UsageError, one_of

SCHEDULES: dict[str, type[Schedule]] = {
    kind.name: kind for kind in (Sequential, Naive, GPipe, OneForwardOneBackward, Interleaved, ZeroBubble, ZeroBubbleH2)
}


def named(name: str, chunks: int | None = None) -> Schedule:
    """The schedule of that name; ``chunks`` of layers a stage, if it is to have another number than usual.

    Raises UsageError for an unknown name, and for a number of chunks that the schedule cannot have.

    >>> named("interleaved", chunks=4)
    Interleaved(chunks=4)
    """
    if name not in SCHEDULES:
        raise UsageError(f"no schedule {name!r}; {one_of(name, SCHEDULES)}")
    return SCHEDULES[name]() if chunks is None else SCHEDULES[name](chunks)


def chosen(schedule: Schedule | str | None, stages: int) -> Schedule:
    """The schedule for so many stages, by name or itself; 1f1b by default. One stage alone needs none, named or not."""
    if isinstance(schedule, Schedule):
        return schedule
    by_name = named("1f1b" if schedule is None else schedule)
    return by_name if stages > 1 else named("sequential")
