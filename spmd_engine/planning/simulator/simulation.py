"""An event simulation of a step: when each rank computes, waits and sends, on a given machine.

Every rank follows its own ``RankStep``: it computes, begins communications, and waits where the step waits. A
communication starts when all who take part have begun it; it then takes what ``CollectiveTimes`` says. Those that want
the same rank's link at once go one after the other, the more urgent first (``Communication.priority``: how few
computations can hide it). Ranks that share cores share them evenly; where ranks move bytes themselves, through memory,
they do that when they wait, with a core.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.match_calls import (
    FEW_RANKS,
    MOST_RANKS,
    SimulatedCall,
    by_computation,
    match,
    names_of,
    simulated,
)
from spmd_engine.planning.dry_run.step_analysis import RankStep, StepAnalysis
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.simulator.collective_time import CollectiveTimes, Duration
from spmd_engine.planning.simulator.compute_time import ComputeTimes

COMPUTE, COMMUNICATION = "compute", "communication"
REDUCES = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True)
class Span:
    """What a rank did from ``start`` to ``end``, in seconds."""

    rank: int
    name: str
    kind: str  #: COMPUTE, or COMMUNICATION: standing there waiting for it
    start: float
    end: float


@dataclass(frozen=True)
class Prediction:
    """A step as it would run."""

    seconds: float
    ranks: Sequence[int]  #: that were simulated; of many, they stand for all
    spans: Sequence[Span]
    working: Mapping[int, float]  #: seconds of work of each of them, had it a core for itself

    @property
    def exposed(self) -> float:
        """Mean seconds that a rank stands waiting in communication, bubbles of a pipeline among them."""
        return sum(span.end - span.start for span in self.spans if span.kind == COMMUNICATION) / len(self.ranks)

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they compute nothing."""
        busy = sum(span.end - span.start for span in self.spans if span.kind == COMPUTE)
        return 1 - busy / (self.seconds * len(self.ranks)) if self.seconds else 0.0


def simulate(analysis: StepAnalysis, machine: Machine, placement: Sequence[int] | None = None) -> Prediction:
    """The step of ``analysis`` on a machine, whose rank ``placement[r]`` is the mesh's rank r: by default r itself.

    Raises UsageError for a machine with too few ranks, and for steps in which ranks would wait for ever.
    """
    machine = machine.with_ranks(max([analysis.ranks, *(rank + 1 for rank in placement or ())]))
    alike = all(node.cores is None for node in machine.nodes) and not machine.pairs and not machine.unlike
    ranks = simulated(analysis, FEW_RANKS if alike else MOST_RANKS)
    steps = {rank: analysis.of_rank(rank) for rank in ranks}
    return _Simulation(machine, steps, match(analysis, steps), placement).run()


Waits = Generator[tuple[str, Any], None, None]


class _Simulation:
    """The clock, what is to come, and every rank as a generator that says what it waits for."""

    def __init__(
        self,
        machine: Machine,
        steps: Mapping[int, RankStep],
        meetings: Mapping[int, Sequence[SimulatedCall]],
        placement: Sequence[int] | None,
    ) -> None:
        self.machine, self.steps, self.meetings = machine, steps, meetings
        self.at = placement if placement is not None else range(machine.ranks)
        self.compute, self.collectives = ComputeTimes(machine), CollectiveTimes(machine)
        self.clock, self._events, self._order = 0.0, [], count()
        self.processors = Processors(machine, self._at)
        self.spans: list[Span] = []
        self.working = dict.fromkeys(steps, 0.0)
        self._ports: dict[int, bool] = {}  # ranks whose link is busy
        self._queue: list[tuple[int, int, SimulatedCall]] = []
        self._durations: dict[tuple, Duration] = {}
        self._live = len(steps)

    def run(self) -> Prediction:
        for rank in self.steps:
            self._advance(rank, self._program(rank))
        while self._events:
            self.clock, _, act = heappop(self._events)
            act()
        if self._live:
            stuck = {
                meeting.operation for meetings in self.meetings.values() for meeting in meetings if not meeting.done
            }
            raise UsageError(f"the step would hang: some ranks never come to {', '.join(sorted(stuck)) or 'an end'}")
        return Prediction(self.clock, tuple(self.steps), self.spans, self.working)

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heappush(self._events, (when, next(self._order), act))

    # --- ranks

    def _program(self, rank: int) -> Waits:
        step, meetings = self.steps[rank], self.meetings[rank]
        plan, names = by_computation(step), list(names_of(step))
        works, hosts = self.compute.seconds(self.at[rank], step.computations)
        handed = 0.0  # when a device's host has handed over what comes next
        for number in range(len(step.computations) + 1):
            if number in plan:
                begins, ends, both = plan[number]
                for each in begins:
                    self._begin(rank, meetings[each])
                for each in ends:
                    yield from self._wait(rank, meetings[each], names[each])
                    if meetings[each].operation == "message":  # the host, too, waits for what other stages send
                        handed = max(handed, self.clock)
                for run in both:
                    for each in run:
                        self._begin(rank, meetings[each])
                    for each in run:
                        yield from self._wait(rank, meetings[each], names[each])
            if number < len(step.computations):
                computation = step.computations[number]
                began = self.clock
                handed += hosts[number]
                yield "work", max(works[number], handed - began)
                self.working[rank] += works[number]
                self.spans.append(Span(rank, computation.name, COMPUTE, began, self.clock))

    def _advance(self, rank: int, program: Waits) -> None:
        """Let a rank go on until it waits."""
        for what, value in program:
            if what == "work":
                if value:
                    self.processors.work(self.clock, self.at[rank], value, lambda: self._advance(rank, program))
                    return
            else:
                value.waiters.append(lambda: self._advance(rank, program))
                return
        self._live -= 1

    # --- communications

    def _begin(self, rank: int, meeting: SimulatedCall) -> None:
        meeting.begun[rank] = self.clock
        if len(meeting.begun) < meeting.expected:
            return
        duration = self._duration(meeting)
        if duration.works:
            self._wake(meeting)
        elif duration.seconds == 0:
            self._finish(meeting)
        else:
            heappush(self._queue, (meeting.priority, next(self._order), meeting))
            self._start_queued()

    def _duration(self, meeting: SimulatedCall) -> Duration:
        key = meeting.operation, id(meeting.ranks), meeting.size  # groups are large, and few
        if key not in self._durations:
            operation = "send" if meeting.operation == "message" else meeting.operation
            ranks = tuple(self.at[member] for member in meeting.ranks)
            self._durations[key] = self.collectives.of(operation, ranks, meeting.size)
        return self._durations[key]

    def _start_queued(self) -> None:
        """Start what has all its ranks' links free, the most urgent first."""
        left = []
        while self._queue:
            entry = heappop(self._queue)
            meeting = entry[2]
            if any(self._ports.get(rank) for rank in meeting.begun):
                left.append(entry)
                continue
            for rank in meeting.begun:
                self._ports[rank] = True
            ends = self.clock + self._duration(meeting).seconds
            self._at(ends, lambda meeting=meeting: self._arrived(meeting))
        for entry in left:
            heappush(self._queue, entry)

    def _arrived(self, meeting: SimulatedCall) -> None:
        for rank in meeting.begun:
            self._ports[rank] = False
        self._finish(meeting)
        self._start_queued()

    def _finish(self, meeting: SimulatedCall) -> None:
        meeting.done = self.clock
        self._wake(meeting)

    def _wake(self, meeting: SimulatedCall) -> None:
        waiters, meeting.waiters = meeting.waiters, []
        for go_on in waiters:
            go_on()

    def _wait(self, rank: int, meeting: SimulatedCall, name: str) -> Waits:
        began = self.clock
        while len(meeting.begun) < meeting.expected:
            yield "until", meeting
        duration = self._duration(meeting)
        if duration.works:
            yield "work", duration.seconds
            self.working[rank] += duration.seconds
            meeting.worked += 1
            if meeting.worked == meeting.expected:
                self._finish(meeting)
            while meeting.operation in REDUCES and meeting.done is None:
                yield "until", meeting
        while not duration.works and meeting.done is None:
            yield "until", meeting
        if self.clock > began:
            self.spans.append(Span(rank, name, COMMUNICATION, began, self.clock))


# --- Cores that the ranks of a node share evenly


Act = Callable[[], None]


class Processors:
    """Work on nodes: each node's ranks get min(1, cores / working ranks) of a core each.

    A node's work is kept by the *virtual time* at which it ends: the seconds of a core that each of its working ranks
    has had. So when ranks begin and end, nothing but the speed of that time changes (Parekh and Gallager, 1993).
    """

    def __init__(self, machine: Machine, at: Callable[[float, Act], None]) -> None:
        self.machine, self._at, self._order = machine, at, count()
        self._shared: dict[int, _Shared] = {}

    def work(self, now: float, rank: int, seconds: float, then: Act) -> None:
        """Have a rank work from now on for so many seconds of a core of its own, and call ``then`` when done."""
        number, node = self.machine.places[rank]
        if node.cores is None or node.cores >= node.ranks:
            self._at(now + seconds, then)
            return
        shared = self._shared.setdefault(number, _Shared(node.cores))
        shared.pass_time(now)
        heappush(shared.work, (shared.virtual + seconds, next(self._order), then))
        self._look_again(now, shared)

    def _look_again(self, now: float, shared: _Shared) -> None:
        """Come back when the first work ends, if nothing changes before."""
        shared.version += 1
        if not shared.work:
            return
        version = shared.version
        ends = now + (shared.work[0][0] - shared.virtual) / shared.speed

        def look() -> None:
            if shared.version != version:
                return
            shared.pass_time(ends)
            ended = []
            while shared.work and shared.work[0][0] <= shared.virtual * (1 + 1e-12):
                ended.append(heappop(shared.work)[2])
            self._look_again(ends, shared)
            for then in ended:
                then()

        self._at(ends, look)


class _Shared:
    """The cores of one node, and the work under way."""

    def __init__(self, cores: float) -> None:
        self.cores, self.virtual, self.since, self.version = cores, 0.0, 0.0, 0
        self.work: list[tuple[float, int, Act]] = []

    @property
    def speed(self) -> float:
        """Of virtual time."""
        return min(1.0, self.cores / len(self.work)) if self.work else 1.0

    def pass_time(self, now: float) -> None:
        if self.work:
            self.virtual += (now - self.since) * self.speed
        self.since = now
