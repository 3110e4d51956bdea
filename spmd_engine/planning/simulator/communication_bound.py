"""How fast a step could be with its communication in the best order, in chunks of any size.

A rank's link serves one communication at a time, in an order that is free. So each link is a machine, and the
communications over it are its jobs: one cannot begin before all ranks have begun it on links that serve all at once
(its head), and the step goes on at least for what then still depends on it (its tail). The best order of a single
machine with preemption, always the job with the longest tail first (Jackson's rule; Carlier, 1982), is no slower than
any order of all links, in any chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from spmd_engine.planning.dry_run.step_analysis import StepAnalysis
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.simulator.collective_time import CollectiveTimes
from spmd_engine.planning.simulator.compute_time import ComputeTimes
from spmd_engine.planning.simulator.simulation import BEGIN, WAIT, WORK, SimulatedCall, match_calls, program_of

Event = tuple[str, SimulatedCall | float]  #: what a rank does: it begins or waits for a call, or works for seconds
Job = tuple[float, float, float]  #: head, seconds on the link, tail


def least_seconds(analysis: StepAnalysis, machine: Machine) -> float:
    """A lower bound of the step's seconds over all orders of its communications, each begun where the step begins it.

    For steps whose ranks are all simulated; what a device's host launches late, and cores that ranks share, make a step
    only slower.
    """
    machine = machine.with_ranks(analysis.ranks)
    steps = {rank: analysis.of_rank(rank) for rank in range(analysis.ranks)}
    calls, compute, collectives = match_calls(analysis, steps), ComputeTimes(machine), CollectiveTimes(machine)
    events: dict[int, list[Event]] = {}
    for rank, step in steps.items():
        works, _ = compute.seconds(rank, step.computations)
        events[rank] = [(what, (works if what == WORK else calls[rank])[number]) for what, number in program_of(step)]
    heads, seconds = _walk(events, collectives)
    opposite = {BEGIN: WAIT, WAIT: BEGIN, WORK: WORK}
    backwards = {rank: [(opposite[what], x) for what, x in reversed(events[rank])] for rank in events}
    tails, _ = _walk(backwards, collectives, backwards=True)
    links: dict[int, list[Job]] = {}
    for number, call in {id(call): call for of_rank in calls.values() for call in of_rank}.items():
        taken = call.duration(collectives)
        for rank in call.ranks if taken.seconds and not taken.works else ():
            links.setdefault(rank, []).append((heads[number], taken.seconds, tails[number]))
    return max([seconds, *map(_jackson, links.values())])


def _walk(
    events: Mapping[int, Sequence[Event]], collectives: CollectiveTimes, *, backwards: bool = False
) -> tuple[dict[int, float], float]:
    """When each call (by its id) has been begun by all ranks, if links serve all calls at once; and the whole seconds.

    Where ranks move the bytes themselves, they do so in their waits: ``backwards``, these are what they begin with.
    """
    clock, at = dict.fromkeys(events, 0.0), dict.fromkeys(events, 0)
    begun: dict[int, list[float]] = {}
    ready: dict[int, float] = {}
    moved = True
    while moved:
        moved = False
        for rank, program in events.items():
            while at[rank] < len(program):
                what, x = program[at[rank]]
                if not isinstance(x, SimulatedCall):
                    clock[rank] += x
                    at[rank] += 1
                    continue
                taken = x.duration(collectives)
                if what == BEGIN:
                    clock[rank] += taken.seconds * (backwards and taken.works)
                    begun.setdefault(id(x), []).append(clock[rank])
                    if len(begun[id(x)]) == x.expected:
                        ready[id(x)] = max(begun[id(x)])
                elif id(x) not in ready:
                    break
                elif taken.works:
                    clock[rank] = max(clock[rank], ready[id(x)]) + taken.seconds * (not backwards)
                else:
                    clock[rank] = max(clock[rank], ready[id(x)] + taken.seconds)
                at[rank] += 1
                moved = True
    return ready, max(clock.values())


def _jackson(jobs: Sequence[Job]) -> float:
    """The least seconds in which one link serves its jobs, with preemption."""
    waiting: list[tuple[float, float]] = []  # (- tail, seconds left)
    ordered, now, last, index = sorted(jobs), 0.0, 0.0, 0
    while index < len(ordered) or waiting:
        if not waiting:
            now = max(now, ordered[index][0])
        while index < len(ordered) and ordered[index][0] <= now:
            heappush(waiting, (-ordered[index][2], ordered[index][1]))
            index += 1
        tail, left = heappop(waiting)
        until = ordered[index][0] if index < len(ordered) else float("inf")
        if now + left > until:
            heappush(waiting, (tail, left - (until - now)))
            now = until
        else:
            now += left
            last = max(last, now - tail)
    return last
