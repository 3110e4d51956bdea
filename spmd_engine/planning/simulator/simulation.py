"""A discrete-event simulation of a step: when each rank computes, waits and sends, on a given machine.

Each rank follows its own ``RankStep``: it computes, begins communications, and waits where the step waits. A
communication starts when all its ranks have begun it, and takes the time of ``CollectiveTimes``. Communications that
need the same rank's link are executed one after the other, the most urgent first (``Communication.priority``). Ranks of
a node share its cores evenly. Ranks that move bytes themselves do so while they wait, on a core.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, product
from typing import Any

from spmd_engine.axes import count_ranks, position_of
from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.step_analysis import Communication, HashedOnce, Phases, RankStep, StepAnalysis
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.simulator.times import CollectiveTimes, ComputeTimes, Duration
from spmd_engine.training.trace import COMMUNICATION, COMPUTE, TimedSpan

# --- Matching: which call each communication of a simulated rank belongs to


PIPE = "pipe"
#: The most ranks that are all simulated; in a larger job, one rank of each pipeline stage represents the others.
MOST_RANKS = 32
FEW_RANKS = 8  #: the same for ranks that share only links, if all links are equal


@dataclass
class SimulatedCall:
    """A collective or a message: the simulated ranks that take part, and its progress."""

    operation: str
    ranks: tuple[int, ...]  #: the whole group in order; for a message, sender and receiver
    size: int  #: bytes of the whole array
    priority: int  #: the fewest computations that may hide it, over its ranks
    expected: int = 0  #: simulated ranks that take part
    begun: dict[int, float] = field(default_factory=dict)  #: simulated rank -> seconds at which it began
    worked: int = 0  #: ranks that have moved their part, where ranks move bytes themselves
    done: float | None = None  #: seconds at which it completed
    waiters: list[Act] = field(default_factory=list)  #: called at each change

    def duration(self, collectives: CollectiveTimes) -> Duration:
        """How long it takes when all its ranks have begun it."""
        return collectives.of("send" if self.operation == "message" else self.operation, self.ranks, self.size)


def simulated_ranks(analysis: StepAnalysis, most: int = MOST_RANKS) -> list[int]:
    """The ranks to simulate: all or, if they are more than ``most``, the rank of each stage that computes most."""
    if analysis.ranks <= most or analysis.ranks > count_ranks(analysis.axes):  # each owner waits for its helper rank
        return list(range(analysis.ranks))
    chosen: dict[int, tuple[int, int]] = {}
    for rank_class in analysis.classes:
        stage = rank_class.step.coordinates.get(PIPE, 0)
        candidate = (rank_class.step.flops, min(rank_class.ranks))
        if stage not in chosen or candidate[0] > chosen[stage][0]:
            chosen[stage] = candidate
    return sorted(rank for _, rank in chosen.values())


def match_calls(analysis: StepAnalysis, steps: Mapping[int, RankStep]) -> dict[int, list[SimulatedCall]]:
    """For each simulated rank, the call that each of its communications belongs to, in their order.

    Where a rank represents others, its calls match those of the simulated ranks, but have the size of the whole group.
    Raises UsageError if the ranks of a group do not make the same calls.
    """
    all_ranks = len(steps) == analysis.ranks
    groups: dict[tuple, tuple[int, ...]] = {}  # the ranks of each group, in its order
    calls: dict[tuple, SimulatedCall] = {}
    by_rank: dict[int, list[SimulatedCall]] = {}
    for rank, step in steps.items():
        position, counts = position_of(rank, analysis.axes), Counter()
        by_rank[rank] = []
        for communication in step.communications:
            axes = tuple(filter(None, communication.axes.split(",")))
            stage = position.coordinates.get(PIPE, 0) * (PIPE not in axes)
            ends, label = communication.ends_of_message, communication.label
            kind = "message" if ends else communication.operation
            place = tuple(index for axis, index in position.coordinates.items() if axis not in axes)
            key = (kind, axes, 0 if axes == ("helper",) else place if all_ranks else stage)
            key += ends or (communication.ranks, "" if kind == "barrier" else label)
            counts[key] += 1
            key = (*key, counts[key])
            size, priority = communication.whole_bytes, communication.priority
            if key not in calls:
                if axes != ("helper",) and (axes, place) not in groups:
                    peers = position.peers(axes) if axes else [position]
                    groups[axes, place] = HashedOnce(peer.index(None) for peer in peers)
                ranks = _call_ranks(communication, groups.get((axes, place)))
                calls[key] = SimulatedCall(kind, ranks, size, priority)
            call = calls[key]
            call.expected += 1
            call.priority = min(call.priority, priority)
            call.size = max(call.size, size)
            by_rank[rank].append(call)
    for key, call in calls.items() if all_ranks else ():
        expected = 2 if call.operation == "message" else key[3]
        if call.expected != expected:
            raise UsageError(
                f"the step would hang: {call.expected} of {expected} ranks call {call.operation} over "
                f"{','.join(key[1])}"
            )
    return by_rank


def _call_ranks(communication: Communication, members: tuple[int, ...] | None) -> tuple[int, ...]:
    """The ranks that take part in a call of a group; ``members`` None: of helper ranks, with numbers of the job."""
    ends = communication.ends_of_message
    if ends:
        return ends[:2] if members is None else (members[ends[0]], members[ends[1]])
    assert members is not None
    return members[: communication.ranks] if communication.ranks < len(members) else members


BEGIN, WAIT, WORK = "begin", "wait", "work"


def program_of(step: RankStep) -> Iterator[tuple[str, int]]:
    """What a rank does in a step, in order: it begins the communication of this number, waits for it, or does the work
    of the computation of this number.

    Of communications that nothing hides, a rank waits for consecutive messages when all of them have begun, as in a
    ring, where each rank sends before it receives.
    """
    begun, ended = (defaultdict[int, list[int]](list) for _ in range(2))  # before each computation
    exposed = defaultdict[int, list[list[int]]](list)
    for number, call in enumerate(step.communications):
        if call.begins < call.ends:
            begun[call.begins].append(number)
            ended[call.ends].append(number)
            continue
        runs, last = exposed[call.begins], step.communications[number - 1]
        if not runs or runs[-1][-1] != number - 1 or call.peer is None or last.peer is None:
            runs.append([])
        runs[-1].append(number)
    for number in range(len(step.computations) + 1):
        yield from product([BEGIN], begun[number])
        yield from product([WAIT], ended[number])
        for run in exposed[number]:
            yield from product([BEGIN, WAIT], run)
        if number < len(step.computations):
            yield WORK, number


# --- The simulation


REDUCES = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True)
class Prediction:
    """A predicted step."""

    seconds: float
    ranks: Sequence[int]  #: the simulated ranks; if not all, they represent the others
    spans: Mapping[int, Sequence[TimedSpan]]  #: what each rank does: COMPUTE, or wait for COMMUNICATION
    working: Mapping[int, float]  #: seconds of work of each rank, with a core to itself
    taken: Mapping[str, float] = field(default_factory=dict)  #: seconds of all spans, by kind

    @property
    def exposed(self) -> float:
        """Mean seconds that a rank waits in communication, including pipeline bubbles."""
        return self.taken.get(COMMUNICATION, 0.0) / len(self.ranks)

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they do not compute."""
        return 1 - self.taken.get(COMPUTE, 0.0) / (self.seconds * len(self.ranks)) if self.seconds else 0.0


def simulate(analysis: StepAnalysis, machine: Machine, on_work: Callable[[], None] = lambda: None) -> Prediction:
    """The predicted step of ``analysis`` on a machine, whose rank r is the mesh's rank r. ``on_work`` is called at each
    event; what it raises ends the simulation.

    Raises UsageError for a machine with too few ranks, and for a step that would hang.
    """
    machine = machine.with_ranks(analysis.ranks)
    uniform = all(node.cores is None for node in machine.nodes) and not machine.pairs and not machine.heterogeneous
    ranks = simulated_ranks(analysis, FEW_RANKS if uniform else MOST_RANKS)
    steps = {rank: analysis.of_rank(rank) for rank in ranks}
    return _Simulation(machine, steps, match_calls(analysis, steps)).run(on_work)


Waits = Generator[tuple[str, Any], None, None]
Act = Callable[[], None]


class _Simulation:
    """The clock, the events to come, and each rank as a generator that yields what it waits for."""

    def __init__(
        self,
        machine: Machine,
        steps: Mapping[int, RankStep],
        calls: Mapping[int, Sequence[SimulatedCall]],
    ) -> None:
        self.machine, self.steps, self.calls = machine, steps, calls
        self.compute, self.collectives = ComputeTimes(machine), CollectiveTimes(machine)
        self.clock, self._events, self._order = 0.0, [], count()
        self._cores: dict[int, SharedCores] = {}  # by node
        self.disks = Disks(machine, list(steps))
        self.spans: dict[int, list[TimedSpan]] = {rank: [] for rank in steps}
        self.working, self.taken = dict.fromkeys(steps, 0.0), defaultdict[str, float](float)
        self._ports: dict[int, bool] = {}  # ranks whose link is busy
        self._queue: list[tuple[int, int, SimulatedCall]] = []
        self._live = len(steps)

    def run(self, on_work: Callable[[], None] = lambda: None) -> Prediction:
        for rank in self.steps:
            self._advance(rank, self._program(rank))
        while self._events:
            on_work()
            self.clock, _, act = heappop(self._events)
            act()
        if self._live:
            stuck = {call.operation for calls in self.calls.values() for call in calls if not call.done}
            raise UsageError(f"the step would hang: some ranks never complete {', '.join(sorted(stuck)) or 'the step'}")
        return Prediction(self.clock, tuple(self.steps), self.spans, self.working, self.taken)

    def _schedule(self, when: float, act: Act) -> None:
        heappush(self._events, (when, next(self._order), act))

    # --- ranks

    def _program(self, rank: int) -> Waits:
        step, calls = self.steps[rank], self.calls[rank]
        works, hosts = self.compute.seconds(rank, step.computations)
        launched = 0.0  # when a device's host has launched the next work
        for what, number in program_of(step):
            if what == BEGIN:
                self._begin(rank, calls[number])
                continue
            if what == WAIT:
                communication = step.communications[number]
                where, label = f"{communication.operation} over {communication.axes}", communication.label
                yield from self._wait(rank, calls[number], f"{where} ({label})" if label else where)
                if communication.peer is not None and communication.priority:
                    launched = max(launched, self.clock)  # the host, too, waits for messages of other stages
                continue
            computation = step.computations[number]
            moved, streams = (computation.loaded, computation.stored), computation.phase == Phases.UPDATE
            ready = (self.disks.stream if streams else self.disks.read_ahead)(rank, self.clock, *moved)
            if not streams:
                yield "at", ready
            began = self.clock
            launched += hosts[number]
            work = works[number] + (0.0 if streams else self.disks.copy_seconds(rank, sum(moved)))
            yield "work", max(work, launched - began)
            if computation.waits:  # the host has waited for the device
                launched = self.clock
            yield "at", ready
            self.working[rank] += work
            self._note(rank, computation.name, COMPUTE, began)

    def _note(self, rank: int, name: str, kind: str, began: float) -> None:
        self.spans[rank].append((name, kind, began, self.clock))
        self.taken[kind] += self.clock - began

    def _advance(self, rank: int, program: Waits) -> None:
        """Continue a rank until it waits."""
        for kind, value in program:
            if kind == "work":
                if value:
                    self._work(rank, value, lambda: self._advance(rank, program))
                    return
            elif kind == "at":
                if value > self.clock:
                    self._schedule(value, lambda: self._advance(rank, program))
                    return
            else:
                value.waiters.append(lambda: self._advance(rank, program))
                return
        self._live -= 1

    def _work(self, rank: int, seconds: float, then: Act) -> None:
        """Let a rank work for ``seconds`` of a full core, and then call ``then``."""
        number, node = self.machine.places[rank]
        if node.cores is None or node.cores >= node.ranks:
            self._schedule(self.clock + seconds, then)
            return
        cores = self._cores.setdefault(number, SharedCores(node.cores, self._schedule))
        cores.work(self.clock, seconds, then)

    # --- communications

    def _begin(self, rank: int, call: SimulatedCall) -> None:
        call.begun[rank] = self.clock
        if len(call.begun) < call.expected:
            return
        duration = call.duration(self.collectives)
        if duration.works:
            self._wake(call)
        elif duration.seconds == 0:
            self._finish(call)
        else:
            heappush(self._queue, (call.priority, next(self._order), call))
            self._start_queued()

    def _start_queued(self) -> None:
        """Start the calls whose ranks all have free links, the most urgent first."""
        left = []
        while self._queue:
            entry = heappop(self._queue)
            call = entry[2]
            if any(self._ports.get(rank) for rank in call.begun):
                left.append(entry)
                continue
            for rank in call.begun:
                self._ports[rank] = True
            ends = self.clock + call.duration(self.collectives).seconds
            self._schedule(ends, lambda call=call: self._arrived(call))
        for entry in left:
            heappush(self._queue, entry)

    def _arrived(self, call: SimulatedCall) -> None:
        for rank in call.begun:
            self._ports[rank] = False
        self._finish(call)
        self._start_queued()

    def _finish(self, call: SimulatedCall) -> None:
        call.done = self.clock
        self._wake(call)

    def _wake(self, call: SimulatedCall) -> None:
        waiters, call.waiters = call.waiters, []
        for resume in waiters:
            resume()

    def _wait(self, rank: int, call: SimulatedCall, name: str) -> Waits:
        began = self.clock
        while len(call.begun) < call.expected:
            yield "until", call
        duration = call.duration(self.collectives)
        if duration.works:
            yield "work", duration.seconds
            self.working[rank] += duration.seconds
            call.worked += 1
            if call.worked == call.expected:
                self._finish(call)
            while call.operation in REDUCES and call.done is None:
                yield "until", call
        while not duration.works and call.done is None:
            yield "until", call
        if self.clock > began:
            self._note(rank, name, COMMUNICATION, began)


# --- Disks, shared by the ranks of a node


class Disks:
    """Transfers of offloaded arrays. Those of a node's ranks use its disk one after the other."""

    def __init__(self, machine: Machine, ranks: Sequence[int]) -> None:
        self._machine, self._free = machine, defaultdict[int, float](float)
        self._stored: dict[int, float] = {}  # when the writes of a rank so far end
        self._asked: dict[int, float] = {}  # when a rank began to read ahead
        simulated = Counter(machine.places[rank][0] for rank in ranks)
        all_ranks = Counter(number for number, _ in machine.places)
        self._alike = {node: all_ranks[node] / count for node, count in simulated.items()}  # ranks that one represents
        self._ranks = all_ranks

    def copy_seconds(self, rank: int, size: int) -> float:
        """Seconds by which these bytes, which other threads move, lengthen a computation. An update has its buffers in
        memory, and moves them without copies."""
        number, node = self._machine.places[rank]
        return node.copy_seconds(self._ranks[number], size)

    def stream(self, rank: int, now: float, loaded: int, stored: int) -> float:
        """When these bytes are read and written, if that begins now."""
        return self._transfer(rank, now, loaded, stored) if loaded or stored else now

    def read_ahead(self, rank: int, now: float, loaded: int, stored: int) -> float:
        """When a rank can continue that needs bytes which it has read ahead since it needed the last ones, and that
        lets others be written behind, once those before are written."""
        ready = now
        if stored:
            ready = max(now, self._stored.get(rank, now))
            self._stored[rank] = self._transfer(rank, ready, 0, stored)
            self._asked.pop(rank, None)
        if loaded:
            ready = max(ready, self._transfer(rank, self._asked.get(rank, now), loaded, 0))
            self._asked[rank] = ready
        return ready

    def _transfer(self, rank: int, begin: float, loaded: int, stored: int) -> float:
        number, node = self._machine.places[rank]
        self._free[number] = max(begin, self._free[number]) + self._alike[number] * node.disk_seconds(loaded, stored)
        return self._free[number]


# --- Cores, shared evenly by the ranks of a node


class SharedCores:
    """The cores of a node, of which each working rank gets min(1, cores / working ranks).

    Work is ordered by the *virtual time* at which it ends: the core seconds that each working rank of the node has had.
    When ranks begin or end, only the speed of virtual time changes (Parekh and Gallager, 1993).
    """

    def __init__(self, cores: float, at: Callable[[float, Act], None]) -> None:
        self._number, self._schedule, self._order = cores, at, count()
        self._virtual, self._since, self._version = 0.0, 0.0, 0
        self._left: list[tuple[float, int, Act]] = []

    def work(self, now: float, seconds: float, then: Act) -> None:
        """Let a rank work from ``now`` on for ``seconds`` of a full core, and then call ``then``."""
        self._pass_time(now)
        heappush(self._left, (self._virtual + seconds, next(self._order), then))
        self._schedule_next(now)

    @property
    def _speed(self) -> float:
        """Seconds of virtual time per second."""
        return min(1.0, self._number / len(self._left))

    def _pass_time(self, now: float) -> None:
        if self._left:
            self._virtual += (now - self._since) * self._speed
        self._since = now

    def _schedule_next(self, now: float) -> None:
        """Schedule an event for the end of the first work; a change before makes it void."""
        self._version += 1
        if not self._left:
            return
        version, ends = self._version, now + (self._left[0][0] - self._virtual) / self._speed

        def end_work() -> None:
            if self._version != version:
                return
            self._pass_time(ends)
            ended = []
            while self._left and self._left[0][0] <= self._virtual * (1 + 1e-12):
                ended.append(heappop(self._left)[2])
            self._schedule_next(ends)
            for then in ended:
                then()

        self._schedule(ends, end_work)
