"""Which rank of a machine is at which position of a mesh: orders of unequal ranks, compared by simulations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice

import numpy as np

from spmd_engine.planning.dry_run.model_shards import model_shards
from spmd_engine.planning.dry_run.step_analysis import StepAnalysis
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.improve import Budget, Score, improved
from spmd_engine.planning.search.placement import Tasks, annealed, assigned, bytes_between, evolved, first_fit
from spmd_engine.planning.simulator.times import ComputeTimes

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
