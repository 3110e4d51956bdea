"""Places tasks on nodes: stages, shards or experts that compute, hold bytes, and send bytes to each other.

Without communication between tasks the problem is an assignment, which is solved exactly. Otherwise it is a quadratic
assignment, solved approximately by annealing or a genetic search.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import combinations, islice
from math import exp, inf
from random import Random

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.importing import library
from spmd_engine.planning.dry_run.model_shards import ModelShard, model_shards
from spmd_engine.planning.dry_run.step_analysis import StepAnalysis
from spmd_engine.planning.machine.machine import Machine, NodeCapabilities
from spmd_engine.planning.search.improve import Budget, Score, improved
from spmd_engine.planning.simulator.times import ComputeTimes

Places = tuple[int, ...]  #: the node of each task
RESTARTS, TURNS = 16, 1000  #: annealings from other starts, and the changes that each tries


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


def assigned(cost: np.ndarray) -> Places:
    """Tasks on nodes, one per node, with the least sum of ``cost[task, node]``: exact (Kuhn, 1955; SciPy's).

    Raises UsageError where SciPy is missing, or tasks are more than nodes.
    """
    optimize = library("scipy.optimize", "an assignment needs SciPy", "planning")
    if cost.shape[0] > cost.shape[1]:
        raise UsageError(f"{cost.shape[0]} tasks on {cost.shape[1]} nodes, one per node: there are too few nodes")
    return tuple(int(node) for node in optimize.linear_sum_assignment(cost)[1])


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


def annealed(tasks: Tasks) -> Places:
    """Simulated annealing (Kirkpatrick et al., 1983): a group moves, or two groups are exchanged; the best of
    ``RESTARTS``. Raises UsageError if no initial placement that fits was found.
    """
    random = Random(0)
    return min((_anneal(tasks, random) for _ in range(RESTARTS)), key=tasks.cost)


def _anneal(tasks: Tasks, random: Random) -> Places:
    current = _require_fitting(first_fit(tasks, random), tasks)
    groups, cost = _groups(tasks), tasks.cost(current)
    best, least = current, cost
    temperature = 0.3 * cost
    cooling = 1e-4 ** (1 / TURNS)
    for _ in range(TURNS):
        temperature *= cooling
        candidate = _change_at_random(tasks, groups, current, random)
        if not tasks.fits(candidate):
            continue
        candidate_cost = tasks.cost(candidate)
        if candidate_cost <= cost or random.random() < exp((cost - candidate_cost) / max(temperature, 1e-30)):
            current, cost = candidate, candidate_cost
            if cost < least:
                best, least = current, cost
    return _descend(tasks, groups, best)


def _change_at_random(tasks: Tasks, groups: Sequence[tuple[int, ...]], current: Places, random: Random) -> Places:
    group = random.choice(groups)
    if random.random() < 0.5 or len(groups) < 2:
        return _moved(current, {group: random.randrange(tasks.nodes)})
    other = random.choice(groups)
    return _moved(current, {group: current[other[0]], other: current[group[0]]})


def _moved(current: Places, to: Mapping[tuple[int, ...], int]) -> Places:
    """The placement with groups of tasks on other nodes."""
    at = list(current)
    for group, node in to.items():
        for t in group:
            at[t] = node
    return tuple(at)


def _descend(tasks: Tasks, groups: Sequence[tuple[int, ...]], current: Places) -> Places:
    """The local optimum that moves of single groups reach."""
    near = lambda places: filter(tasks.fits, _list_moves(tasks, groups, places))
    return improved([current], near, lambda places: (tasks.cost(places),), Budget(inf))[0]


def _list_moves(tasks: Tasks, groups: Sequence[tuple[int, ...]], current: Places) -> Iterator[Places]:
    for number, group in enumerate(groups):
        for node in range(tasks.nodes):
            yield _moved(current, {group: node})
        for other in groups[number + 1 :]:
            mine, theirs = current[group[0]], current[other[0]]
            if mine != theirs:
                yield _moved(current, {group: theirs, other: mine})


def evolved(tasks: Tasks, *, generations: int = 1000, population: int = 100) -> Places:
    """A genetic search: a child takes the node of each group from either parent, then mutates; the best half survives.

    Raises UsageError if no initial placement that fits was found.
    """
    random = Random(0)
    groups = _groups(tasks)
    survivors = [_require_fitting(first_fit(tasks, random), tasks) for _ in range(population)]
    for _ in range(generations):
        survivors = sorted(set(survivors), key=tasks.cost)[: population // 2]
        children = []
        while len(survivors) + len(children) < population:
            parent, other_parent = random.choice(survivors), random.choice(survivors)
            mutated = _moved(parent, {group: other_parent[group[0]] for group in groups if random.random() < 0.5})
            for _ in range(random.randrange(3)):
                mutated = _change_at_random(tasks, groups, mutated, random)
            children.append(mutated if tasks.fits(mutated) else parent)
        survivors += children
    return _descend(tasks, groups, min(survivors, key=tasks.cost))


def _require_fitting(places: Places | None, tasks: Tasks) -> Places:
    if places is None:
        need, room = float(tasks.size.sum()), float(tasks.room.sum())
        raise UsageError(
            f"no placement of {tasks.count} tasks on {tasks.nodes} nodes was found that keeps all constraints: "
            f"they need {need:g} bytes of {room:g}"
        )
    return places


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


# --- Which rank of a machine is at which position of a mesh: orders of unequal ranks, compared by simulations


Order = tuple[int, ...]  #: the rank of the machine at each position of the mesh

PLACEMENTS = ("auto", "order", "greedy", "assign", "anneal", "genetic")
MOST_TRIED = 120  #: orders that are all tried; of more, those near to good ones
DRAWN_STARTS = 2  #: orders drawn at random, near to which others are tried


class RankOrders:
    """The different orders of a machine's ranks on a mesh: equal nodes, and ranks of a node, are interchangeable."""

    def __init__(self, machine: Machine, axes: Mapping[str, int]) -> None:
        self.machine, self.axes = machine, axes
        self._nodes: dict[int, list[int]] = defaultdict(list)  # the ranks of each node
        self._alike: dict[int, list[int]] = {}  # the interchangeable nodes, for each of them
        by_kind: dict[int, list[int]] = defaultdict(list)
        for rank, (number, node) in enumerate(machine.places):
            unit = rank if machine.pairs else number
            self._nodes[unit].append(rank)
            key = id(node) if machine.topology.kind == "flat" and not machine.pairs else -1 - len(self._alike)
            if unit not in self._alike:
                by_kind[key].append(unit)
                self._alike[unit] = by_kind[key]

    @property
    def matter(self) -> bool:
        """Whether some order may be better than the machine's own, beyond what an order of mesh axes can do."""
        return self.machine.heterogeneous or bool(self.machine.pairs) or self.machine.topology.kind != "flat"

    def canonical(self, order: Sequence[int]) -> Order:
        """The first of the orders that equal ranks make equal to this one."""
        node_of = {rank: number for number, ranks in self._nodes.items() for rank in ranks}
        return next(self._from([node_of[rank] for rank in order]))

    def all(self) -> Iterator[Order]:
        """All different orders."""
        return self._from([None] * self.machine.ranks)

    def few(self) -> list[Order]:
        """All different orders if there are at most MOST_TRIED, else none."""
        listed = list(islice(self.all(), MOST_TRIED + 1))
        return listed if len(listed) <= MOST_TRIED else []

    def _from(self, wanted: Sequence[int | None]) -> Iterator[Order]:
        """Orders whose positions have ranks of these nodes, or of nodes equal to them; None: of any."""
        renamed: dict[int, int] = {}  # nodes, to the first equal ones that are not used yet
        used: dict[int, int] = dict.fromkeys(self._nodes, 0)
        order: list[int] = []

        def place(position: int) -> Iterator[Order]:
            if position == len(wanted):
                yield tuple(order)
                return
            node = wanted[position]
            if node is not None and node not in renamed:
                renamed[node] = next(other for other in self._alike[node] if other not in renamed.values())
            tried: set[int] = set()
            for number in [renamed[node]] if node is not None else self._nodes:
                unused = id(self._alike[number])
                if used[number] == len(self._nodes[number]) or (not used[number] and unused in tried):
                    continue
                if not used[number]:
                    tried.add(unused)
                order.append(self._nodes[number][used[number]])
                used[number] += 1
                yield from place(position + 1)
                used[number] -= 1
                order.pop()

        return place(0)

    def near(self, order: Order) -> Iterator[Order]:
        """Orders in which two ranks have changed places, or two slices of the mesh along an axis."""
        for a, b in combinations(range(len(order)), 2):
            changed = list(order)
            changed[a], changed[b] = order[b], order[a]
            yield self.canonical(changed)
        ranks = np.array(order).reshape(list(self.axes.values()))
        for axis, size in enumerate(ranks.shape):
            for a, b in combinations(range(size), 2):
                indices = np.arange(size)
                indices[[a, b]] = b, a
                yield self.canonical(ranks.take(indices, axis).reshape(-1).tolist())

    def drawn(self) -> list[Order]:
        """DRAWN_STARTS orders, drawn at random."""
        random = np.random.default_rng(0)
        return [self.canonical(random.permutation(self.machine.ranks).tolist()) for _ in range(DRAWN_STARTS)]


def best_orders(orders: RankOrders, score: Score, starts: Sequence[Order], budget: Budget) -> list[Order]:
    """The orders that were scored, the best first: all if they are few, else those near to the ``starts`` or to drawn
    ones."""
    if few := orders.few():
        return improved([*starts, *few], lambda order: (), score, budget)
    return improved([*starts, *orders.drawn()], orders.near, score, budget, descents=len(starts) + DRAWN_STARTS)


def proposed_orders(placement: str, analysis: StepAnalysis, orders: RankOrders, room: Sequence[float]) -> list[Order]:
    """The orders that a placement proposes by the costs of single ranks; the machine's own is always one of them.

    ``room`` are the bytes that each rank of the machine may hold. Raises UsageError for "assign" without SciPy.
    """
    order, machine = tuple(range(analysis.ranks)), orders.machine
    if placement == "order":
        return [order]
    tasks = tasks_on_ranks(analysis, machine, room)
    if first_fit(tasks) is None:  # no rank has room for some part: memory is left to the score
        tasks = tasks_on_ranks(analysis, machine, [float("inf")] * machine.ranks)
    if placement in ("auto", "anneal", "genetic") and (few := orders.few()):
        return [order, min(filter(tasks.fits, few), key=tasks.cost, default=order)]
    methods = {"greedy": first_fit, "assign": _assign_by_mean, "anneal": annealed, "genetic": evolved}
    chosen = ["greedy", "anneal"] if placement == "auto" else [placement]
    return [order, *(tuple(places) for name in chosen if (places := methods[name](tasks)) is not None)]


def _assign_by_mean(tasks: Tasks) -> Order:
    """The assignment with the least sum of work and of sending over a mean link, where each rank has room."""
    to_others = tasks.seconds_a_byte.sum(axis=1) / max(tasks.nodes - 1, 1)
    cost = tasks.work + tasks.sent.sum(axis=1)[:, None] * to_others
    return assigned(np.where(tasks.size[:, None] <= tasks.room, cost, 1e6 * cost.max()))


def tasks_on_ranks(analysis: StepAnalysis, machine: Machine, room: Sequence[float]) -> Tasks:
    """The positions of a mesh as tasks, and the ranks of a machine as nodes with room for one task each."""
    ranks, compute = range(analysis.ranks), ComputeTimes(machine)
    shards = model_shards(analysis)

    def work(position: int, rank: int) -> float:
        return sum(compute.seconds(rank, analysis.of_rank(position).computations)[0]) * machine.node(rank).contention

    return Tasks(
        np.array([[work(position, rank) for rank in ranks] for position in ranks]),
        np.array(analysis.peak_bytes_by_rank(), float),
        bytes_between(shards, [shard.rank for shard in shards]),
        np.array(room, float),
        np.array([[0.0 if a == b else 1 / machine.link(a, b).bandwidth for b in ranks] for a in ranks]),
        most=1,
    )
