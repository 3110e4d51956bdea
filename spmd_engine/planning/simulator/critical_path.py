"""The computations on which the end of a step waits: the longest chain of them through all ranks, by FLOPs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_engine.planning.dry_run.step_analysis import Communication, RankStep, StepAnalysis

Node = tuple[int, int]  # class of ranks, number of the computation


@dataclass(frozen=True)
class CriticalPath:
    """A chain of computations, each of which waits for the one before, on its own rank or on another."""

    flops: int  #: of the chain: no number of ranks makes a step take less than these, one after the other
    nodes: Sequence[Node]

    @property
    def classes(self) -> list[int]:
        """The classes of ranks that it passes through, in order."""
        passed = [number for number, _ in self.nodes]
        return [each for place, each in enumerate(passed) if not place or passed[place - 1] != each]


def critical_path(analysis: StepAnalysis) -> CriticalPath:
    """The longest chain. What is sent takes no time here, but is waited for."""
    steps = [each.step for each in analysis.classes]
    done: list[list[int]] = [[] for _ in steps]  # FLOPs before the end of each computation
    after: dict[Node, Node | None] = {}  # what each computation waited for
    begun: dict[Any, dict[int, tuple[int, Node | None]]] = defaultdict(dict)
    keys = [list(_keys(step)) for step in steps]
    parties: dict[Any, set[int]] = defaultdict(set)
    for number, each in enumerate(keys):
        for key, call in each:
            parties[key].update([number] if call.peer is not None else call.classes)
    left = set(range(len(steps)))
    while left:
        moved = False
        for number in sorted(left):
            moved |= _advance(number, steps[number], keys[number], done[number], after, begun, parties)
            if len(done[number]) == len(steps[number].computations):
                left.discard(number)
        if not moved and left:
            break  # what they wait for is not there to be seen: the path goes as far as it can be followed
    ends = [(flops[-1], number) for number, flops in enumerate(done) if flops]
    if not ends:
        return CriticalPath(0, ())
    flops, number = max(ends)
    nodes, node = [], (number, len(done[number]) - 1)
    while node is not None:
        nodes.append(node)
        node = after[node]
    return CriticalPath(flops, nodes[::-1])


def _advance(number, step, keys, done, after, begun, parties) -> bool:
    """Take one class of ranks as far as it goes without waiting; whether it moved."""
    moved = False
    while len(done) < len(step.computations):
        place = len(done)
        last = (done[-1], (number, place - 1)) if done else (0, None)
        for key, each in keys:
            if each.begins <= place:
                begun[key].setdefault(number, last)
        waits = [key for key, each in keys if each.ends == place and each.operation != "send"]
        if any(set(begun[key]) < parties[key] for key in waits):
            return moved
        flops, node = max([last, *(each for key in waits for each in begun[key].values())], key=lambda x: x[0])
        done.append(flops + step.computations[place].flops)
        after[number, place] = node
        moved = True
    last = (done[-1], (number, len(done) - 1)) if done else (0, None)
    for key, _ in keys:
        begun[key].setdefault(number, last)
    return moved


def _keys(step: RankStep) -> Iterator[tuple[Any, Communication]]:
    """What tells each communication from others, the same for all that take part in it."""
    counts: dict[Any, int] = defaultdict(int)
    for each in step.communications:
        if each.peer is not None:
            ends = (each.place, each.peer) if each.operation == "send" else (each.peer, each.place)
            key: Any = ("message", each.axes, ends, each.channel, each.classes)
        else:
            key = (each.where, each.classes)
        counts[key] += 1
        yield (key, counts[key]), each
