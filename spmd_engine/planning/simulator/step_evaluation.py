"""The evaluation of a step: its dry run, simulated on a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from statistics import fmean
from typing import Any

from spmd_engine.axes import count_ranks
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.models import Model
from spmd_engine.planning.dry_run.analyze import analyze
from spmd_engine.planning.dry_run.rank_classes import slot_table_bytes
from spmd_engine.planning.dry_run.step_analysis import RankStep, StepAnalysis
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.simulator.simulation import (
    BEGIN,
    WAIT,
    WORK,
    Prediction,
    SimulatedCall,
    match_calls,
    program_of,
    simulate,
)
from spmd_engine.planning.simulator.times import CollectiveTimes, ComputeTimes

# --- How fast a step could be with its communication in the best order, in chunks of any size
#
# A rank's link serves one communication at a time, in an order that is free. So each link is a machine, and the
# communications over it are its jobs: one cannot begin before all ranks have begun it on links that serve all at once
# (its head), and the step goes on at least for what then still depends on it (its tail). The best order of a single
# machine with preemption, always the job with the longest tail first (Jackson's rule; Carlier, 1982), is no slower than
# any order of all links, in any chunks.


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


MOST_SLOTS = 12_000  #: layers times micro-batches; larger steps are extrapolated


@dataclass(frozen=True)
class PlanEvaluation:
    """The predicted step of a plan.

    ``whole`` is False for a step with too many micro-batches: then ``analysis`` and ``prediction`` are of as many
    micro-batches as fill the pipeline, and ``seconds`` and ``bytes_sent`` are extrapolated.
    """

    analysis: StepAnalysis
    prediction: Prediction
    seconds: float
    bytes_sent: int
    machine: Machine
    whole: bool = True

    @cached_property
    def order_saves(self) -> float | None:
        """The largest share of the exposed communication that another order of it could save, with gradients in chunks
        of any size; None if not all ranks are simulated."""
        exposed = self.prediction.exposed
        if not self.whole or len(self.prediction.ranks) < self.analysis.ranks:
            return None
        saved = self.prediction.seconds - least_seconds(self.analysis, self.machine)
        return min(max(saved, 0.0) / exposed, 1.0) if exposed else 0.0

    @property
    def peak_rank(self) -> int:
        """The rank that holds most."""
        peaks = self.analysis.peak_bytes_by_rank()
        return peaks.index(max(peaks))

    @property
    def peak_step(self) -> RankStep:
        return self.analysis.of_rank(self.peak_rank)

    @property
    def peak_bytes_by_kind(self) -> dict[str, int]:
        """Bytes that the rank that holds most holds at its peak, by kind."""
        more = {
            "tables of groups": self.analysis.tables_of_rank(self.peak_rank),
            "places of convolutions": self.peak_step.constants,
        }
        return {**self.peak_step.peak.bytes_by_kind, **{kind: size for kind, size in more.items() if size}}

    def as_json(self) -> dict[str, Any]:
        """The evaluation as JSON."""
        return {
            "seconds": self.seconds,
            "bytes_sent": self.bytes_sent,
            "peak_bytes": self.analysis.peak_bytes_by_rank(),
            "peak": {
                "rank": self.peak_rank,
                "moment": self.peak_step.peak_moment,
                "bytes_by_kind": self.peak_bytes_by_kind,
            },
            "order_saves_at_most": self.order_saves,
            "whole": self.whole,
            "approximate": list(self.analysis.approximate),
        }


def _placed(machine: Machine, axes: Mapping[str, int], composition: ParallelConfig) -> Machine:
    """The machine with its ranks in the order of an analysis: those of the mesh, then the others."""
    others, order = composition.ranks_outside, composition.order
    machine = machine.with_ranks(count_ranks(axes) + len(others))
    if others:
        members = [rank for rank in range(machine.ranks) if rank not in others]
        order = [*(members[number] for number in order or range(len(members))), *others]
    return machine.placed(order)


def evaluate_step(
    model: Model,
    machine: Machine,
    axes: Mapping[str, int],
    composition: ParallelConfig,
    batch_size: int,
    micro_batches: int,
    *,
    known: StepAnalysis | None = None,
    on_work: Callable[[], None] = lambda: None,
    **options: Any,
) -> PlanEvaluation:
    """Analyze and simulate one step, with the machine's ranks in the composition's order.

    ``options`` go to ``analyze``. ``known``: the analysis of the whole step, which does not depend on the order.
    ``on_work`` is called as the evaluation proceeds; what it raises ends it.
    """
    machine = _placed(machine, axes, composition)
    stages = axes.get("pipe", 1)
    few = 2 * stages

    def analyzed(**sizes: int) -> StepAnalysis:
        return analyze(model, axes, composition, device=machine.device, on_work=on_work, **sizes, **options)

    slots = len(model.layers) * micro_batches
    if slots <= MOST_SLOTS or micro_batches <= few + stages:
        analysis = known or analyzed(batch_size=batch_size, micro_batches=micro_batches)
        analysis = with_slot_tables(analysis, machine)
        prediction = simulate(analysis, machine, on_work)
        return PlanEvaluation(analysis, prediction, prediction.seconds, analysis.bytes_sent, machine)
    samples = batch_size // micro_batches
    short, longer = (
        with_slot_tables(analyzed(batch_size=samples * n, micro_batches=n), machine) for n in (few, few + stages)
    )
    first, second = simulate(short, machine, on_work), simulate(longer, machine, on_work)
    more = (micro_batches - few) / stages
    return PlanEvaluation(
        replace(longer, micro_batches=micro_batches),
        second,
        first.seconds + more * (second.seconds - first.seconds),
        round(short.bytes_sent + more * (longer.bytes_sent - short.bytes_sent)),
        machine,
        whole=False,
    )


def with_slot_tables(analysis: StepAnalysis, machine: Machine) -> StepAnalysis:
    """The analysis with the slot tables of the machine's nodes; ranks with their own devices hold none."""
    places = machine.places[: analysis.ranks]
    tables = slot_table_bytes(analysis, [str(number) for number, _ in places])
    return replace(
        analysis, tables=[size * (node.cores is not None) for size, (_, node) in zip(tables, places, strict=True)]
    )


def peak_memory(analysis: StepAnalysis, limits: Sequence[float]) -> float:
    """Bytes of the rank that holds most.

    With memory ``limits`` of unequal ranks: the largest share of its own limit that a rank holds, times their mean.
    """
    if not limits:
        return analysis.peak_bytes
    peaks = zip(analysis.peak_bytes_by_rank(), limits, strict=True)
    return max(peak / limit for peak, limit in peaks) * fmean(limits)
