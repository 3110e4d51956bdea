"""Matches the collectives and messages of simulated ranks, as the ranks' own calls match."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmd_engine.axes import MeshPosition
from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.step_analysis import Communication, RankStep, StepAnalysis

PIPE = "pipe"
#: Up to so many ranks are all simulated; of more, one rank of each pipeline stage represents the others.
MOST_RANKS = 32
FEW_RANKS = 8  #: the same where ranks share nothing but links, and all links are equal


@dataclass
class SimulatedCall:
    """A collective or a message: the simulated ranks that take part, and its progress."""

    operation: str
    ranks: tuple[int, ...]  #: the whole group in order; of a message the sender and the receiver
    size: int  #: bytes of the whole array
    priority: int  #: the fewest computations that may hide it, over its ranks
    expected: int = 0  #: simulated ranks that take part
    begun: dict[int, float] = field(default_factory=dict)  #: simulated rank -> seconds at which it began
    worked: int = 0  #: ranks that have moved their part, where ranks move bytes themselves
    done: float | None = None  #: seconds at which it completed
    waiters: list[Callable[[], None]] = field(default_factory=list)  #: called at each change


def simulated_ranks(analysis: StepAnalysis, most: int = MOST_RANKS) -> list[int]:
    """The ranks to simulate: all or, of more than ``most``, the rank of each stage that computes most."""
    if analysis.ranks <= most:
        return list(range(analysis.ranks))
    chosen: dict[int, tuple[int, int]] = {}
    for rank_class in analysis.classes:
        stage = rank_class.step.coordinates.get(PIPE, 0)
        candidate = (rank_class.step.flops, min(rank_class.ranks))
        if stage not in chosen or candidate[0] > chosen[stage][0]:
            chosen[stage] = candidate
    return sorted(rank for _, rank in chosen.values())


def position_of(rank: int, axes: Mapping[str, int]) -> MeshPosition:
    """The position of a rank on the axes, in row-major order."""
    coordinates = {}
    for axis in reversed(axes):
        rank, coordinates[axis] = divmod(rank, axes[axis])
    return MeshPosition(axes, {axis: coordinates[axis] for axis in axes})


def match_calls(analysis: StepAnalysis, steps: Mapping[int, RankStep]) -> dict[int, list[SimulatedCall]]:
    """For each simulated rank, the call that each of its communications belongs to, in their order.

    Where a rank represents others, its calls match those of the simulated ranks, but have the size of the whole group.
    Raises UsageError if the ranks of a group do not make the same calls.
    """
    all_ranks = len(steps) == analysis.ranks
    groups = _Groups(analysis.axes)
    calls: dict[tuple, SimulatedCall] = {}
    by_rank: dict[int, list[SimulatedCall]] = {}
    for rank, step in steps.items():
        position, seen = position_of(rank, analysis.axes), Counter()
        by_rank[rank] = []
        for communication in step.communications:
            axes = tuple(filter(None, communication.axes.split(",")))
            stage = position.coordinates.get(PIPE, 0) * (PIPE not in axes)
            ends, label = _ends(communication), communication.label
            kind = "message" if ends else communication.operation
            key = (kind, axes, groups.number(position, axes) if all_ranks else stage)
            key += ends or (communication.ranks, "" if kind == "barrier" else label)
            seen[key] += 1
            key = (*key, seen[key])
            size, priority = whole_bytes(communication), communication.priority
            if key not in calls:
                calls[key] = SimulatedCall(kind, _members(groups, position, axes, communication), size, priority)
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


def whole_bytes(communication: Communication) -> int:
    """S: bytes of the whole array of a collective; of a message, its own bytes."""
    if communication.operation in ("all_gather", "broadcast", "receive", "scatter"):
        return max(communication.received, communication.payload)
    if communication.operation == "all_to_all":
        return communication.payload * communication.ranks
    return communication.payload


def _ends(communication: Communication) -> tuple | None:
    """Sender, receiver and channel of a message; None for collectives."""
    if communication.operation == "send":
        return communication.place, communication.peer, communication.channel
    if communication.operation == "receive":
        return communication.peer, communication.place, communication.channel
    return None


def _members(
    groups: _Groups, position: MeshPosition, axes: tuple[str, ...], communication: Communication
) -> tuple[int, ...]:
    members = groups.members(position, axes)
    if ends := _ends(communication):
        return members[ends[0]], members[ends[1]]
    return members[: communication.ranks] if communication.ranks < len(members) else members


class _Groups:
    """Groups of a mesh's ranks, by the axes along which their ranks differ."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.axes, self._known = axes, {}

    def number(self, position: MeshPosition, over: Sequence[str]) -> tuple[int, ...]:
        """Which group over these axes a position is in."""
        return tuple(index for axis, index in position.coordinates.items() if axis not in over)

    def members(self, position: MeshPosition, over: tuple[str, ...]) -> tuple[int, ...]:
        """All ranks of that group, in its order."""
        key = over, self.number(position, over)
        if key not in self._known:
            peers = position.peers(over) if over else [position]
            self._known[key] = tuple(peer.index(None) for peer in peers)
        return self._known[key]


def calls_by_computation(step: RankStep) -> dict[int, tuple[list[int], list[int], list[list[int]]]]:
    """For each computation's number: the communications that begin before it and last, those that began earlier and
    are waited for before it, and runs of those that begin and end there. Communications are given by number.

    The communications of a run begin together: one collective, or consecutive messages. They are waited for when all
    have begun, as in a ring, where each rank sends before it receives.
    """
    plan: dict[int, tuple[list[int], list[int], list[list[int]]]] = defaultdict(lambda: ([], [], []))
    for number, communication in enumerate(step.communications):
        if communication.begins < communication.ends:
            plan[communication.begins][0].append(number)
            plan[communication.ends][1].append(number)
            continue
        runs = plan[communication.begins][2]
        if runs and _ends(communication) and runs[-1][-1] == number - 1 and _ends(step.communications[number - 1]):
            runs[-1].append(number)
        else:
            runs.append([number])
    return plan


def trace_names(step: RankStep) -> Iterator[str]:
    """The name of each communication in a trace."""
    for communication in step.communications:
        label = f" ({communication.label})" if communication.label else ""
        yield f"{communication.operation} over {communication.axes}{label}"


# --- The critical path: the longest chain of computations through all ranks, by FLOPs, that the end of a step waits for


Node = tuple[int, int]  # class of ranks, number of the computation


@dataclass(frozen=True)
class CriticalPath:
    """A chain of computations, each of which waits for the one before, on its own rank or on another."""

    flops: int  #: of the chain: on any number of ranks a step executes at least these one after the other
    nodes: Sequence[Node]

    @property
    def classes(self) -> list[int]:
        """The classes of ranks that it passes through, in order."""
        passed = [number for number, _ in self.nodes]
        return [number for index, number in enumerate(passed) if not index or passed[index - 1] != number]


def critical_path(analysis: StepAnalysis) -> CriticalPath:
    """The longest chain. Communication takes no time here, but is waited for."""
    return _PathFinder([rank_class.step for rank_class in analysis.classes]).find()


class _PathFinder:
    """Executes the steps of all classes of ranks, and notes what each computation waited for."""

    def __init__(self, steps: Sequence[RankStep]) -> None:
        self.steps = steps
        self.keys = [list(_keys(step)) for step in steps]
        self.done: list[list[int]] = [[] for _ in steps]  # FLOPs before the end of each computation
        self.after: dict[Node, Node | None] = {}  # what each computation waited for
        #: of each communication, by class: the FLOPs before it began, and the computation before it
        self.begun: dict[Any, dict[int, tuple[int, Node | None]]] = defaultdict(dict)
        self.parties: dict[Any, set[int]] = defaultdict(set)
        for number, keys in enumerate(self.keys):
            for key, call in keys:
                self.parties[key].update([number] if call.peer is not None else call.classes)

    def find(self) -> CriticalPath:
        left = set(range(len(self.steps)))
        while left:
            moved = [number for number in sorted(left) if self._advance(number)]
            left = {number for number in left if len(self.done[number]) < len(self.steps[number].computations)}
            if not moved:
                break  # the rest waits for calls that are not recorded: the path ends here
        ends = [(flops[-1], number) for number, flops in enumerate(self.done) if flops]
        if not ends:
            return CriticalPath(0, ())
        flops, number = max(ends)
        nodes, node = [], (number, len(self.done[number]) - 1)
        while node is not None:
            nodes.append(node)
            node = self.after[node]
        return CriticalPath(flops, nodes[::-1])

    def _advance(self, number: int) -> bool:
        """Execute one class of ranks until it waits; whether it moved."""
        step, done, keys = self.steps[number], self.done[number], self.keys[number]
        first = len(done)
        while True:
            index = len(done)
            last = (done[-1], (number, index - 1)) if done else (0, None)
            for key, call in keys:
                if call.begins <= index:
                    self.begun[key].setdefault(number, last)
            waits = [key for key, call in keys if call.ends == index and call.operation != "send"]
            if index == len(step.computations) or any(set(self.begun[key]) < self.parties[key] for key in waits):
                return index > first
            flops, node = max([last, *(end for key in waits for end in self.begun[key].values())], key=lambda x: x[0])
            done.append(flops + step.computations[index].flops)
            self.after[number, index] = node


def _keys(step: RankStep) -> Iterator[tuple[Any, Communication]]:
    """A key for each communication, equal on all ranks that take part in it."""
    counts: dict[Any, int] = defaultdict(int)
    for communication in step.communications:
        if communication.peer is not None:
            key: Any = ("message", communication.axes, _ends(communication), communication.classes)
        else:
            key = (communication.where, communication.classes)
        counts[key] += 1
        yield (key, counts[key]), communication
