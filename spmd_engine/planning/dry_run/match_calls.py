"""Who meets whom: the communications of simulated ranks, matched as the ranks' own calls are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from spmd_engine.axes import MeshPosition
from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.step_analysis import Communication, RankStep, StepAnalysis

PIPE = "pipe"
#: Ranks that are all simulated; of more, one for each stage of a pipeline stands for those like it.
MOST_RANKS = 32
FEW_RANKS = 8  #: as many, where ranks have nothing to share with each other but links, and all links are alike


@dataclass
class SimulatedCall:
    """A collective, or a message: the simulated ranks that take part, and how far it is."""

    operation: str
    ranks: tuple[int, ...]  #: of its whole group, in order; of a message the sender and the receiver
    size: int  #: bytes of the whole array
    priority: int  #: computations that may hide it, of the rank with fewest
    expected: int = 0
    begun: dict[int, float] = field(default_factory=dict)  #: simulated rank -> when it began
    worked: int = 0  #: ranks that have moved their part, where ranks do so themselves
    done: float | None = None  #: when
    waiters: list[Callable[[], None]] = field(default_factory=list)  #: what to call when there is news


def simulated(analysis: StepAnalysis, most: int = MOST_RANKS) -> list[int]:
    """The ranks to simulate: all, or, of more than ``most``, one of each stage, of those there that compute most."""
    if analysis.ranks <= most:
        return list(range(analysis.ranks))
    chosen: dict[int, tuple[int, int]] = {}
    for kind in analysis.classes:
        stage = kind.step.coordinates.get(PIPE, 0)
        candidate = (kind.step.flops, min(kind.ranks))
        if stage not in chosen or candidate[0] > chosen[stage][0]:
            chosen[stage] = candidate
    return sorted(rank for _, rank in chosen.values())


def place_of(rank: int, axes: Mapping[str, int]) -> MeshPosition:
    """Where a rank is, row-major on the axes."""
    coordinates = {}
    for axis in reversed(axes):
        rank, coordinates[axis] = divmod(rank, axes[axis])
    return MeshPosition(axes, {axis: coordinates[axis] for axis in axes})


def match(analysis: StepAnalysis, steps: Mapping[int, RankStep]) -> dict[int, list[SimulatedCall]]:
    """For each simulated rank, the meeting of each of its communications, in their order.

    Where a rank stands for others, it meets those that are simulated, and the durations are of the whole group.
    Raises UsageError if ranks that should meet do not call alike.
    """
    everyone = len(steps) == analysis.ranks
    groups = _Groups(analysis.axes)
    meetings: dict[tuple, SimulatedCall] = {}
    of_rank: dict[int, list[SimulatedCall]] = {}
    for rank, step in steps.items():
        place, seen = place_of(rank, analysis.axes), Counter()
        of_rank[rank] = []
        for each in step.communications:
            axes = tuple(filter(None, each.axes.split(",")))
            at = groups.number(place, axes) if everyone else place.coordinates.get(PIPE, 0) * (PIPE not in axes)
            ends = _ends(each)
            kind = "message" if ends else each.operation
            key = (kind, axes, at, *(ends or (each.ranks, "" if each.operation == "barrier" else each.label)))
            seen[key] += 1
            key = (*key, seen[key])
            if key not in meetings:
                meetings[key] = SimulatedCall(
                    kind, _members(groups, place, axes, each), whole_bytes(each), each.priority
                )
            meeting = meetings[key]
            meeting.expected += 1
            meeting.priority = min(meeting.priority, each.priority)
            meeting.size = max(meeting.size, whole_bytes(each))
            of_rank[rank].append(meeting)
    for key, meeting in meetings.items() if everyone else ():
        wanted = 2 if meeting.operation == "message" else key[3]
        if meeting.expected != wanted:
            raise UsageError(
                f"the step would hang: of {wanted} ranks, {meeting.expected} come to {meeting.operation} over "
                f"{','.join(key[1])}"
            )
    return of_rank


def whole_bytes(each: Communication) -> int:
    """S: bytes of the whole array that a collective is about; of a message, its own."""
    if each.operation in ("all_gather", "broadcast", "receive", "scatter"):
        return max(each.received, each.payload)
    if each.operation == "all_to_all":
        return each.payload * each.ranks
    return each.payload


def _ends(each: Communication) -> tuple | None:
    """Of a message: sender, receiver and channel; None for collectives."""
    if each.operation == "send":
        return each.place, each.peer, each.channel
    if each.operation == "receive":
        return each.peer, each.place, each.channel
    return None


def _members(groups: _Groups, place: MeshPosition, axes: tuple[str, ...], each: Communication) -> tuple[int, ...]:
    members = groups.members(place, axes)
    if ends := _ends(each):
        return members[ends[0]], members[ends[1]]
    return members[: each.ranks] if each.ranks < len(members) else members


class _Groups:
    """Ranks of a mesh by the axes along which they differ."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.axes, self._known = axes, {}

    def number(self, place: MeshPosition, over: Sequence[str]) -> tuple[int, ...]:
        """Which group over these axes a place is in."""
        return tuple(value for axis, value in place.coordinates.items() if axis not in over)

    def members(self, place: MeshPosition, over: tuple[str, ...]) -> tuple[int, ...]:
        """All ranks of that group, in its order."""
        key = over, self.number(place, over)
        if key not in self._known:
            self._known[key] = tuple(peer.index(None) for peer in place.peers(over)) if over else (place.index(None),)
        return self._known[key]


def by_computation(step: RankStep) -> dict[int, tuple[list[int], list[int], list[list[int]]]]:
    """For each computation's number: the communications to begin before it, those of earlier to wait for, and those
    that begin and end there, in runs, as their own numbers.

    A run is begun together: one collective, or messages that follow each other. These are waited for when all are on
    their way, as in a ring, whose ranks all send before they receive.
    """
    found: dict[int, tuple[list[int], list[int], list[list[int]]]] = defaultdict(lambda: ([], [], []))
    for number, each in enumerate(step.communications):
        if each.begins < each.ends:
            found[each.begins][0].append(number)
            found[each.ends][1].append(number)
            continue
        runs = found[each.begins][2]
        if runs and _ends(each) and runs[-1][-1] == number - 1 and _ends(step.communications[number - 1]):
            runs[-1].append(number)
        else:
            runs.append([number])
    return found


def names_of(step: RankStep) -> Iterator[str]:
    """Each communication as a trace names it."""
    for each in step.communications:
        yield f"{each.operation} over {each.axes}" + (f" ({each.label})" if each.label else "")
