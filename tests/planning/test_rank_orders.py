"""Which rank of a machine of unequal nodes is at which position of a mesh: what is found against all assignments."""

from dataclasses import replace
from functools import cache
from math import factorial

import numpy as np
import pytest

from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import MeshError, UsageError
from spmd_engine.models import GPT_SIZES, gpt
from spmd_engine.planning.dry_run.analyze import analyze
from spmd_engine.planning.machine.machine import Curve, Link, Machine, NodeKind, Topology
from spmd_engine.planning.plan_result import PlanFile, Request
from spmd_engine.planning.planner import find_plan
from spmd_engine.planning.search import placement, plan_search
from spmd_engine.planning.search.improve import Budget
from spmd_engine.planning.search.placement import RankOrders, Tasks, annealed, best_orders, evolved, proposed_orders
from spmd_engine.planning.simulator.simulation import simulate

SMALL = gpt(replace(GPT_SIZES["gpt-nano"], layers=3), "gpt-nano")
WITHIN = 1.02
FEW = 1  #: machines that every run of the tests draws
SEEDS = [pytest.param(seed, marks=[pytest.mark.soak] * (seed >= FEW)) for seed in range(50)]

# --- eight tasks on unequal nodes, by cost


def drawn_tasks(seed):
    """Eight tasks on eight nodes, or two a node: a pipeline's, or with random messages."""
    rng = np.random.default_rng(seed)
    nodes, most = [(8, 1), (4, 2), (5, 2)][seed % 3]
    way = 10 ** rng.uniform(-3, -1, (nodes, nodes))
    way = (way + way.T) / 2
    np.fill_diagonal(way, 0.0)
    sent = rng.random((8, 8)) * (rng.random((8, 8)) < 0.4)
    if seed % 2:
        sent = np.diag(rng.random(7), 1) * 3 + np.diag(rng.random(7), -1) * 3
    np.fill_diagonal(sent, 0.0)
    work = rng.uniform(0.6, 3, 8)[:, None] / 10 ** rng.uniform(0, 1, nodes)
    return Tasks(work, rng.random(8), sent, np.full(nodes, rng.uniform(1.6, 2.5)), way, most=most)


@cache
def all_places(nodes, most):
    """Every placement of eight tasks with at most so many a node: int[placements, 8]."""
    places = np.zeros((1, 0), int)
    for _ in range(8):
        counts = (places[:, :, None] == np.arange(nodes)).sum(axis=1)
        row, node = np.nonzero(counts < most)
        places = np.concatenate([places[row], node[:, None]], axis=1)
    return places


def least_cost(tasks):
    places, best = all_places(tasks.nodes, tasks.most), np.inf
    for part in np.array_split(places, len(places) // 10_000 + 1):
        moved = (tasks.sent * tasks.seconds_a_byte[part[:, :, None], part[:, None, :]]).sum(axis=2)
        busy, held = np.zeros((2, len(part), tasks.nodes))
        for task, nodes in enumerate(part.T):
            busy[np.arange(len(part)), nodes] += tasks.work[task, nodes] + moved[:, task]
            held[np.arange(len(part)), nodes] += tasks.size[task]
        fits = (held <= tasks.room).all(axis=1)
        best = min(best, busy.max(axis=1)[fits].min(initial=np.inf))
    return best


@pytest.mark.parametrize("seed", SEEDS)
def test_annealing_is_within_two_percent_of_the_best_of_all_placements(seed):
    tasks = drawn_tasks(seed)
    found = annealed(tasks)
    assert tasks.fits(found) and tasks.cost(found) <= WITHIN * least_cost(tasks)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(0, 50, 5))
def test_a_genetic_search_is_within_two_percent_of_the_best_of_all_placements(seed):
    tasks = drawn_tasks(seed)
    found = evolved(tasks)
    assert tasks.fits(found) and tasks.cost(found) <= WITHIN * least_cost(tasks)


# --- six ranks of unequal nodes, by simulation

COMPOSITIONS = [
    (ParallelConfig(mesh={"pipe": 6}, schedule="1f1b"), 6),
    (ParallelConfig(mesh={"data": 2, "pipe": 3}, schedule="1f1b"), 3),
    (ParallelConfig(mesh={"pipe": 3, "model": 2}, schedule="1f1b"), 3),
    (ParallelConfig(mesh={"data": 3, "model": 2}, zero=3), 1),
]


@cache
def analyzed(number):
    composition, micro_batches = COMPOSITIONS[number]
    return analyze(SMALL, composition.mesh, composition, batch_size=12, micro_batches=micro_batches, sequence=16)


def node(name, ranks, speed, memory=1e10):
    return NodeKind(name, 1, ranks, {"float32": Curve.flat(speed)}, memory, Curve.flat(speed / 4), Link(1e-5, 5e9))


def drawn_machine(seed):
    """Six ranks on nodes of one or two, with speeds, links of pairs, and topologies that differ."""
    rng = np.random.default_rng(seed)
    ranks = [(2, 2, 2), (1,) * 6, (2, 2, 1, 1), (1,) * 6][seed % 4]
    nodes = tuple(node(f"node{number}", n, 10 ** rng.uniform(9.7, 11)) for number, n in enumerate(ranks))
    slow = {(a, b): Link(1e-4, 10 ** rng.uniform(7, 9)) for b in range(6) for a in range(b) if rng.random() < 0.4}
    topology = Topology("ring" if seed % 5 == 0 else "flat")
    return Machine(
        f"drawn{seed}", nodes, Link(5e-5, 10 ** rng.uniform(7.5, 9.5)), slow if seed % 3 == 0 else {}, topology
    )


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.soak] * (seed != 4)) for seed in range(50)])
def test_orders_near_to_proposed_ones_are_within_two_percent_of_the_best_of_all(seed, monkeypatch):
    monkeypatch.setattr(placement, "MOST_TRIED", 0)
    machine, analysis = drawn_machine(seed), analyzed(seed // 4 % 4)
    orders, seconds = RankOrders(machine, analysis.axes), {}

    def score(order):
        if order not in seconds:
            seconds[order] = simulate(analysis, machine.placed(order)).seconds
        return (seconds[order],)

    proposed = proposed_orders("auto", analysis, orders, [node.memory for _, node in machine.places])
    found, *_ = best_orders(orders, score, proposed, Budget(np.inf))
    tried = len(seconds)
    assert score(found)[0] <= WITHIN * min(score(order)[0] for order in orders.all())
    assert tried < 300


def test_equal_nodes_and_ranks_of_a_node_are_interchangeable():
    alike = replace(node("alike", 2, 1e10), count=2)
    machine = Machine("m", (node("quick", 2, 9e10), alike), Link(1e-4, 1e9))
    orders = RankOrders(machine, {"data": 6})
    every = list(orders.all())
    # 6! orders of ranks, by 2! of each node's ranks, and 2! of the equal nodes
    assert len(every) == len(set(every)) == factorial(6) // 2**3 // 2
    assert {orders.canonical(order) for order in every} == set(every)
    assert orders.canonical((5, 1, 0, 2, 4, 3)) == (2, 0, 1, 4, 3, 5)
    linked = replace(machine, pairs={(0, 5): Link(1e-3, 1e6)})
    assert len(list(RankOrders(linked, {"data": 6}).all())) == factorial(6)


def test_orders_near_to_another_exchange_two_ranks_or_two_slices_of_the_mesh():
    nodes = tuple(node(f"node{number}", 1, 1e10 * (1 + number)) for number in range(4))
    orders = RankOrders(Machine("unequal", nodes, Link(1e-4, 1e9)), {"pipe": 2, "data": 2})
    two_ranks = {(1, 0, 2, 3), (2, 1, 0, 3), (3, 1, 2, 0), (0, 2, 1, 3), (0, 3, 2, 1), (0, 1, 3, 2)}
    assert set(orders.near((0, 1, 2, 3))) == two_ranks | {(2, 3, 0, 1), (1, 0, 3, 2)}


def test_a_machine_in_another_order_is_the_same_machine():
    machine = replace(drawn_machine(2), pairs={(0, 5): Link(1e-3, 1e6)})
    order = (3, 5, 0, 1, 4, 2)
    placed = machine.placed(order)
    assert [placed.node(position) for position in range(6)] == [machine.node(rank) for rank in order]
    assert placed.link(1, 2) == machine.link(0, 5) and placed.link(0, 5) == machine.link(2, 3)
    analysis = analyzed(0)
    swapped = simulate(analysis, placed)
    assert simulate(analysis, machine.placed(range(6))).seconds == simulate(analysis, machine).seconds
    assert swapped.seconds == simulate(analysis, placed.with_ranks(6)).seconds != simulate(analysis, machine).seconds


# --- in plans


def request_for(machine, **changes):
    fixed = {"mesh": None, "micro_batches": 4, "schedule": "1f1b", "recompute": "none"}
    fixed |= changes.pop("fixed", {})
    return Request(SMALL, machine, [3], [4], axes=["pipe"], fixed=fixed, sequence=32, **changes)


def searched(machine, **changes):
    request = request_for(machine, **changes)
    return find_plan(replace(request, fixed={name: value for name, value in request.fixed.items() if value}))


def test_a_plan_has_the_order_and_the_stages_of_the_best_of_all_orders(tmp_path, monkeypatch):
    """The link between the first two nodes is slow, so they are not neighbours in the pipeline."""
    monkeypatch.setattr(plan_search, "EVALUATIONS", 4000)
    nodes = node("slow", 1, 1e10), node("quick", 1, 6e10), node("mean", 1, 3e10)
    machine = Machine("three", nodes, Link(5e-5, 1e9), {(0, 1): Link(1e-2, 1e7)})
    listed, found = searched(machine, placement="order"), searched(machine)
    assert listed.plan.candidate.order is None and set(found.plan.candidate.order[::2]) == {0, 1}
    assert found.evaluation.seconds < 0.9 * listed.evaluation.seconds
    assert found.reasons[0].startswith("rank order ") and "not as the machine lists them" in found.reasons[0]
    given = [
        searched(machine, base=ParallelConfig(rank_order=",".join(map(str, order)))) for order in [(0, 2, 1), (1, 2, 0)]
    ]
    assert found.evaluation.seconds <= min(plan.evaluation.seconds for plan in given) * 1.002
    file = found.plan_file("gpt-nano")
    file.write(tmp_path / "plan.json")
    assert PlanFile.read(tmp_path / "plan.json").composition.order == found.plan.candidate.order
    assert f"--rank-order {file.composition.rank_order}" in found.command


def test_the_rank_with_little_memory_gets_a_stage_that_needs_less(monkeypatch):
    monkeypatch.setattr(plan_search, "EVALUATIONS", 1500)
    roomy = searched(Machine("equal", (node("a", 3, 1e10),), Link(5e-5, 1e9)))
    peaks = roomy.evaluation.analysis.peak_bytes_by_rank()
    needy = peaks.index(max(peaks))
    nodes = tuple(node(f"n{rank}", 1, 1e10, 2 * max(peaks)) for rank in range(3))
    nodes = (*nodes[:needy], replace(nodes[needy], memory=(max(peaks) + min(peaks)) / 2), *nodes[needy + 1 :])
    stages = {"stages": roomy.plan.candidate.stages}
    found = searched(Machine("unequal", nodes, Link(5e-5, 1e9)), fixed=stages)
    order, held = found.plan.candidate.order, found.evaluation.analysis.peak_bytes_by_rank()
    assert order[needy] != needy and all(held[place] <= nodes[rank].memory for place, rank in enumerate(order))
    assert searched(Machine("unequal", nodes, Link(5e-5, 1e9)), fixed=stages, placement="order").plan is None


def test_an_order_must_have_each_rank_once():
    with pytest.raises(UsageError, match="--rank-order 0,x: write the numbers of ranks"):
        ParallelConfig(rank_order="0,x")
    with pytest.raises(UsageError, match="--rank-order 0,2 with --mesh data=2: the ranks are 0 to 1"):
        ParallelConfig(rank_order="0,2").check({"data": 2})
    composition, (notice,) = ParallelConfig(rank_order="1,0").fitted({"data": 3}, None)
    assert composition.rank_order is None and "continues without --rank-order 1,0" in notice
    with pytest.raises(UsageError, match="placement 'luck': choose auto, order"):
        request_for(drawn_machine(0), placement="luck")
    assert issubclass(MeshError, UsageError)


def test_the_goal_communication_sends_least(monkeypatch):
    monkeypatch.setattr(plan_search, "EVALUATIONS", 1500)
    machine = Machine("pair", (node("a", 1, 1e10), node("b", 1, 1e10)), Link(5e-5, 1e8))
    fixed = {"recompute": "none", "micro_batches": 2}
    quickest, least = (
        find_plan(Request(SMALL, machine, [2], [4], goal=goal, fixed=fixed, axes=["data", "pipe"], sequence=32))
        for goal in ("latency", "communication")
    )
    assert least.evaluation.bytes_sent < quickest.evaluation.bytes_sent
    assert all(plan.sent >= least.plan.sent for plan in least.search.best)
