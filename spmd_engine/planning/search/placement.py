"""Which node has which task: stages, shards or experts, that compute, hold bytes, and send bytes to each other.

Where no two tasks talk, costs separate and the placement is an assignment, which is solved exactly. Otherwise it is a
quadratic assignment, for which annealing and a genetic search are good, and trying all is exact where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import product
from math import exp
from random import Random

import numpy as np

from spmd_engine.errors import UsageError

Places = tuple[int, ...]  #: the node of each task
MOST_TRIED = 2_000_000  #: placements that ``exact`` tries


@dataclass(frozen=True)
class Tasks:
    """What is to be placed, and on what.

    ``work[t, n]`` seconds of task t on node n; ``size[t]`` bytes; ``sent[t, u]`` bytes from task t to u each step;
    ``room[n]`` bytes of a node; ``seconds_a_byte[n, m]`` of the way from node n to m, 0 on the diagonal.
    """

    work: np.ndarray
    size: np.ndarray
    sent: np.ndarray
    room: np.ndarray
    seconds_a_byte: np.ndarray
    most: int | None = None  #: tasks a node may have
    pinned: Mapping[int, int] = field(default_factory=dict)  #: task -> its node
    together: Sequence[Sequence[int]] = ()  #: tasks that must be on one node
    apart: Sequence[Sequence[int]] = ()  #: tasks that must be on nodes of their own

    def __post_init__(self) -> None:
        tasks, nodes = self.work.shape
        shapes = {
            "size": (self.size.shape, (tasks,)),
            "sent": (self.sent.shape, (tasks, tasks)),
            "room": (self.room.shape, (nodes,)),
            "seconds_a_byte": (self.seconds_a_byte.shape, (nodes, nodes)),
        }
        for name, (found, wanted) in shapes.items():
            if found != wanted:
                raise UsageError(f"tasks: {name} has shape {found}, it must have {wanted}")
        for task, node in self.pinned.items():
            if not (0 <= task < tasks and 0 <= node < nodes):
                raise UsageError(f"tasks: task {task} is pinned to node {node}; there are {tasks} tasks, {nodes} nodes")

    @property
    def count(self) -> int:
        return self.work.shape[0]

    @property
    def nodes(self) -> int:
        return self.work.shape[1]

    def fits(self, places: Places) -> bool:
        """Whether a placement keeps to all constraints."""
        at = np.asarray(places)
        if any(at[task] != node for task, node in self.pinned.items()):
            return False
        if any(len(set(at[list(group)])) > 1 for group in self.together):
            return False
        if any(len(set(at[list(group)])) < len(group) for group in self.apart):
            return False
        if self.most is not None and np.bincount(at, minlength=self.nodes).max() > self.most:
            return False
        return bool((np.bincount(at, self.size, self.nodes) <= self.room).all())

    def cost(self, places: Places) -> float:
        """Seconds of a step: of the node that works and sends longest."""
        at = np.asarray(places)
        seconds = np.bincount(at, self.work[np.arange(self.count), at], self.nodes)
        moved = self.sent * self.seconds_a_byte[at[:, None], at[None, :]]
        return float((seconds + np.bincount(at, moved.sum(axis=1), self.nodes)).max())


def exact(tasks: Tasks) -> Places:
    """The best placement, by trying all; raises UsageError if they are too many, or none fits."""
    if tasks.nodes**tasks.count > MOST_TRIED:
        raise UsageError(f"{tasks.nodes} nodes to the power of {tasks.count} tasks are too many to try")
    fitting = (places for places in product(range(tasks.nodes), repeat=tasks.count) if tasks.fits(places))
    best = min(fitting, key=tasks.cost, default=None)
    return _there(best, tasks)


def assigned(cost: np.ndarray) -> Places:
    """Tasks to nodes, one a node, with the least sum of ``cost[task, node]``: exact (Kuhn, 1955; SciPy's).

    Raises UsageError where SciPy is missing, or tasks are more than nodes.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise UsageError("an assignment needs SciPy: pip install 'spmd_engine[planning]'") from None
    if cost.shape[0] > cost.shape[1]:
        raise UsageError(f"{cost.shape[0]} tasks on {cost.shape[1]} nodes, one a node: there are too few")
    return tuple(int(node) for node in linear_sum_assignment(cost)[1])


def first_fit(tasks: Tasks, random: Random | None = None) -> Places | None:
    """Some placement that fits, groups that are kept together and large tasks first; None if none was found."""
    random = random or Random(0)
    groups = _groups(tasks)
    for _ in range(200):
        order = sorted(groups, key=lambda group: (-sum(tasks.size[t] for t in group), random.random()))
        at = [-1] * tasks.count
        if _fill(tasks, order, at, random):
            return tuple(at)
    return None


def _groups(tasks: Tasks) -> list[tuple[int, ...]]:
    """Tasks that are placed as one."""
    of = list(range(tasks.count))
    for group in tasks.together:
        least = min(of[task] for task in group)
        joined = {of[task] for task in group}
        of = [least if number in joined else number for number in of]
    return [tuple(t for t in range(tasks.count) if of[t] == number) for number in sorted(set(of))]


def _fill(tasks: Tasks, order: Sequence[tuple[int, ...]], at: list[int], random: Random) -> bool:
    room, counts = tasks.room.astype(float), [0] * tasks.nodes
    busy = [0.0] * tasks.nodes
    for group in order:
        size = float(sum(tasks.size[t] for t in group))
        pins = {tasks.pinned[t] for t in group if t in tasks.pinned}
        taken = {
            at[o] for each in tasks.apart for t in group if t in each for o in each if o not in group and at[o] >= 0
        }
        nodes = [
            n
            for n in (pins if pins else range(tasks.nodes))
            if size <= room[n] and n not in taken and (tasks.most is None or counts[n] + len(group) <= tasks.most)
        ]
        if len(pins) > 1 or not nodes:
            return False
        node = min(nodes, key=lambda n: (busy[n] + sum(tasks.work[t, n] for t in group)) * random.uniform(0.9, 1.1))
        for t in group:
            at[t] = node
        room[node] -= size
        counts[node] += len(group)
        busy[node] += sum(tasks.work[t, node] for t in group)
    return True


def annealed(tasks: Tasks, *, turns: int = 20_000, seed: int = 0) -> Places:
    """Simulated annealing (Kirkpatrick et al., 1983): a group moves, or two change places; worse is taken ever less.

    Raises UsageError if nothing that fits was found to begin with.
    """
    random = Random(seed)
    now = _there(first_fit(tasks, random), tasks)
    groups, cost = _groups(tasks), tasks.cost(now)
    best, least = now, cost
    heat = 0.3 * cost
    cool = (1e-4) ** (1 / max(turns, 1))
    for _ in range(turns):
        heat *= cool
        there = _neighbour(tasks, groups, now, random)
        if not tasks.fits(there):
            continue
        found = tasks.cost(there)
        if found <= cost or random.random() < exp((cost - found) / max(heat, 1e-30)):
            now, cost = there, found
            if cost < least:
                best, least = now, cost
    return _descended(tasks, groups, best)


def _neighbour(tasks: Tasks, groups: Sequence[tuple[int, ...]], now: Places, random: Random) -> Places:
    at = list(now)
    group = random.choice(groups)
    if random.random() < 0.5 or len(groups) < 2:
        node = random.randrange(tasks.nodes)
        for t in group:
            at[t] = node
    else:
        other = random.choice(groups)
        mine, theirs = at[group[0]], at[other[0]]
        for t in group:
            at[t] = theirs
        for t in other:
            at[t] = mine
    return tuple(at)


def _descended(tasks: Tasks, groups: Sequence[tuple[int, ...]], now: Places) -> Places:
    """The best that moving one group after the other comes to."""
    cost, better = tasks.cost(now), True
    while better:
        better = False
        for there in _moves(tasks, groups, now):
            if tasks.fits(there) and (found := tasks.cost(there)) < cost * (1 - 1e-12):
                now, cost, better = there, found, True
                break
    return now


def _moves(tasks: Tasks, groups: Sequence[tuple[int, ...]], now: Places) -> Iterator[Places]:
    for number, group in enumerate(groups):
        for node in range(tasks.nodes):
            yield tuple(node if t in group else at for t, at in enumerate(now))
        for other in groups[number + 1 :]:
            mine, theirs = now[group[0]], now[other[0]]
            if mine != theirs:
                yield tuple(theirs if t in group else mine if t in other else at for t, at in enumerate(now))


def evolved(tasks: Tasks, *, generations: int = 150, population: int = 40, seed: int = 0) -> Places:
    """A genetic search: of two parents each group takes its node from either, then one may move; the best half lives.

    Raises UsageError if nothing that fits was found to begin with.
    """
    random = Random(seed)
    groups = _groups(tasks)
    living = [_there(first_fit(tasks, random), tasks) for _ in range(population)]
    price: Callable[[Places], float] = tasks.cost
    for _ in range(generations):
        living = sorted(set(living), key=price)[: population // 2]
        children = []
        while len(living) + len(children) < population:
            one, other = random.choice(living), random.choice(living)
            child = list(one)
            for group in groups:
                if random.random() < 0.5:
                    for t in group:
                        child[t] = other[t]
            there = tuple(child)
            for _ in range(random.randrange(3)):
                there = _neighbour(tasks, groups, there, random)
            children.append(there if tasks.fits(there) else one)
        living += children
    return _descended(tasks, groups, min(living, key=price))


def _there(places: Places | None, tasks: Tasks) -> Places:
    if places is None:
        need, room = float(tasks.size.sum()), float(tasks.room.sum())
        raise UsageError(
            f"no placement of {tasks.count} tasks on {tasks.nodes} nodes was found that keeps to all constraints: "
            f"they need {need:g} bytes of {room:g}"
        )
    return places


def stage_places(machine_speeds: Sequence[float], work: Sequence[float]) -> tuple[Places, float]:
    """Stages of a pipeline on nodes of unlike speeds, one a node, that neighbours do not matter for: the seconds of
    the slowest are least. The quickest nodes have the most work; exact, by exchange."""
    if len(work) > len(machine_speeds):
        raise UsageError(f"{len(work)} stages on {len(machine_speeds)} nodes, one a node: there are too few")
    by_speed = sorted(range(len(machine_speeds)), key=lambda n: -machine_speeds[n])
    by_work = sorted(range(len(work)), key=lambda s: -work[s])
    at = [0] * len(work)
    for stage, node in zip(by_work, by_speed, strict=False):
        at[stage] = node
    slowest = max((work[s] / machine_speeds[at[s]] for s in range(len(work))), default=0.0)
    return tuple(at), slowest


def shares(speeds: Sequence[float], whole: int) -> tuple[int, ...]:
    """Weights by speed, as layouts take them (``"b/data:3:1"``): of ``whole`` parts, so many for each rank that the
    last of them is done soonest. So what is rounded up is rather a quick one's: a part takes longest on a slow one.

    >>> shares([0.8, 0.4], 12), shares([8, 1], 16)
    ((8, 4), (15, 1))
    """
    total = sum(speeds)
    if not total or min(speeds) < 0:
        raise UsageError(f"speeds {tuple(speeds)}: they must not be below 0, nor all 0")
    parts = [int(whole * speed / total) for speed in speeds]
    done = [((parts[rank] + 1) / speed, rank) for rank, speed in enumerate(speeds) if speed]  # with one part more
    heapify(done)
    for _ in range(whole - sum(parts)):
        _, rank = done[0]
        parts[rank] += 1
        heapreplace(done, ((parts[rank] + 1) / speeds[rank], rank))
    return tuple(parts)
