"""Places tasks on nodes: stages, shards or experts that compute, hold bytes, and send bytes to each other.

With communication between tasks this is a quadratic assignment, which local searches solve approximately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf
from random import Random

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.model_shards import ModelShard
from spmd_engine.planning.machine.machine import NodeCapabilities
from spmd_engine.planning.search.improve import Budget, improved

Places = tuple[int, ...]  #: the node of each task


@dataclass(frozen=True)
class Tasks:
    """The tasks, and the nodes.

    ``work[t, n]`` seconds of task t on node n; ``size[t]`` bytes; ``sent[t, u]`` bytes from task t to u per step;
    ``room[n]`` bytes of a node; ``seconds_a_byte[n, m]`` of the link from node n to m, 0 on the diagonal.
    """

    work: np.ndarray
    size: np.ndarray
    sent: np.ndarray
    room: np.ndarray
    seconds_a_byte: np.ndarray
    most: int | np.ndarray | None = None  #: most tasks per node, or of each: int[n]
    together: Sequence[Sequence[int]] = ()  #: tasks that must be on one node

    @property
    def count(self) -> int:
        return self.work.shape[0]

    @property
    def nodes(self) -> int:
        return self.work.shape[1]

    def fits(self, places: Places) -> bool:
        """Whether a placement keeps all constraints."""
        at = np.asarray(places)
        if any(len(set(at[list(group)])) > 1 for group in self.together):
            return False
        if self.most is not None and (np.bincount(at, minlength=self.nodes) > self.most).any():
            return False
        return bool((np.bincount(at, self.size, self.nodes) <= self.room).all())

    def cost(self, places: Places) -> float:
        """Seconds of a step: those of the slowest node."""
        at = np.asarray(places)
        seconds = np.bincount(at, self.work[np.arange(self.count), at], self.nodes)
        moved = self.sent * self.seconds_a_byte[at[:, None], at[None, :]]
        return float((seconds + np.bincount(at, moved.sum(axis=1), self.nodes)).max())


def tasks_of(shards: Sequence[ModelShard], nodes: Sequence[NodeCapabilities]) -> Tasks:
    """Shards as tasks on nodes, at their share of its bandwidth; those of one rank stay together."""
    by_rank: dict[int, list[int]] = {}
    for task, shard in enumerate(shards):
        by_rank.setdefault(shard.rank, []).append(task)
    seconds_a_byte = np.array([[(a is not b) * a.ranks / a.bandwidth for b in nodes] for a in nodes])
    return Tasks(
        np.array([[shard.flops * node.ranks / node.compute for node in nodes] for shard in shards]),
        np.array([shard.bytes + shard.activations for shard in shards]),
        bytes_between(shards, range(len(shards))),
        np.array([node.memory for node in nodes]),
        seconds_a_byte,
        most=np.array([node.ranks for node in nodes]) * max(map(len, by_rank.values())),
        together=list(by_rank.values()),
    )


def bytes_between(shards: Sequence[ModelShard], tasks: Sequence[int]) -> np.ndarray:
    """Bytes from the task of each shard to those of others: float64[tasks, tasks]. A shard sends its bytes to all other
    shards of a call in equal parts."""
    task_of = {shard.id: task for shard, task in zip(shards, tasks, strict=True)}
    sent = np.zeros((max(tasks) + 1, max(tasks) + 1))
    for shard, task in zip(shards, tasks, strict=True):
        for point in shard.communication:
            for other in point.shards:
                sent[task, task_of[other]] += point.bytes / len(point.shards)
    return sent


def first_fit(tasks: Tasks, random: Random | None = None) -> Places | None:
    """A placement that fits, by placing groups in descending size; None if none was found."""
    random = random or Random(0)
    groups = _groups(tasks)
    for _ in range(200):
        order = sorted(groups, key=lambda group: (-sum(tasks.size[t] for t in group), random.random()))
        at = [-1] * tasks.count
        if _fill(tasks, order, at, random):
            return tuple(at)
    return None


def _groups(tasks: Tasks) -> list[tuple[int, ...]]:
    """Sets of tasks that are placed together."""
    group_of = list(range(tasks.count))
    for group in tasks.together:
        least = min(group_of[task] for task in group)
        joined = {group_of[task] for task in group}
        group_of = [least if number in joined else number for number in group_of]
    return [tuple(t for t in range(tasks.count) if group_of[t] == number) for number in sorted(set(group_of))]


def _fill(tasks: Tasks, order: Sequence[tuple[int, ...]], at: list[int], random: Random) -> bool:
    room, counts = tasks.room.astype(float), [0] * tasks.nodes
    busy = [0.0] * tasks.nodes
    most = np.broadcast_to(tasks.count if tasks.most is None else tasks.most, tasks.nodes)
    for group in order:
        size = float(sum(tasks.size[t] for t in group))
        nodes = [n for n in range(tasks.nodes) if size <= room[n] and counts[n] + len(group) <= most[n]]
        if not nodes:
            return False
        node = min(nodes, key=lambda n: (busy[n] + sum(tasks.work[t, n] for t in group)) * random.uniform(0.9, 1.1))
        for t in group:
            at[t] = node
        room[node] -= size
        counts[node] += len(group)
        busy[node] += sum(tasks.work[t, node] for t in group)
    return True


def best_placement(tasks: Tasks, *, starts: int = 8, seed: int = 0) -> Places:
    """The best of local searches from ``starts`` placements, in each of which groups have been moved at random: a
    group moves, or two groups are exchanged, as long as the slowest node gets faster.

    Raises UsageError if no placement that fits was found.
    """
    random, groups, drawn = Random(seed), _groups(tasks), []
    for _ in range(starts):
        if (places := first_fit(tasks, random)) is None:
            raise UsageError(
                f"no placement of {tasks.count} tasks on {tasks.nodes} nodes was found that keeps all constraints: "
                f"they need {tasks.size.sum():g} bytes of {tasks.room.sum():g}"
            )
        for one, other in (random.choices(groups, k=2) for _ in range(3 * len(groups))):
            exchanged = {one: places[other[0]], other: places[one[0]]}
            changed = _moved(places, random.choice([exchanged, {one: random.randrange(tasks.nodes)}]))
            places = changed if tasks.fits(changed) else places
        drawn.append(places)
    near = lambda places: filter(tasks.fits, _list_moves(tasks, groups, places))
    return improved(drawn, near, lambda places: (tasks.cost(places),), Budget(inf), descents=starts)[0]


def _moved(current: Places, to: Mapping[tuple[int, ...], int]) -> Places:
    """The placement with groups of tasks on other nodes."""
    at = list(current)
    for group, node in to.items():
        for t in group:
            at[t] = node
    return tuple(at)


def _list_moves(tasks: Tasks, groups: Sequence[tuple[int, ...]], current: Places) -> Iterator[Places]:
    for number, group in enumerate(groups):
        for node in range(tasks.nodes):
            yield _moved(current, {group: node})
        for other in groups[number + 1 :]:
            mine, theirs = current[group[0]], current[other[0]]
            if mine != theirs:
                yield _moved(current, {group: theirs, other: mine})


def shares(speeds: Sequence[float], whole: int) -> tuple[int, ...]:
    """Weights by speed, as layouts take them (``"b/data:3:1"``): ``whole`` parts, divided such that the last rank
    ends soonest. Parts that are left after rounding down go to fast ranks.

    >>> shares([0.8, 0.4], 12), shares([8, 1], 16)
    ((8, 4), (15, 1))
    """
    total = sum(speeds)
    if not total or min(speeds) < 0:
        raise UsageError(f"speeds {tuple(speeds)}: they must be at least 0, and one above 0")
    parts = [int(whole * speed / total) for speed in speeds]
    ends = [((parts[rank] + 1) / speed, rank) for rank, speed in enumerate(speeds) if speed]  # with one part more
    heapify(ends)
    for _ in range(whole - sum(parts)):
        _, rank = ends[0]
        parts[rank] += 1
        heapreplace(ends, ((parts[rank] + 1) / speeds[rank], rank))
    return tuple(parts)
