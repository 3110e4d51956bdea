"""The search: it finds the best of all candidates, compared with brute force; and why nothing fits."""

from dataclasses import replace
from itertools import combinations
from math import inf

import numpy as np
import pytest

from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.schedules import named
from spmd_engine.engine.schedules.schedule import makespan, peak_activations, timeline
from spmd_engine.errors import UsageError
from spmd_engine.models.names import build_model
from spmd_engine.planning import analyze, plan
from spmd_engine.planning.machine.machine import read_machine
from spmd_engine.planning.plan_result import Request
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.estimate import Slots, best_division
from spmd_engine.planning.search.improve import Budget
from spmd_engine.planning.search.search import (
    GOALS,
    Constraints,
    Limits,
    conflict_of,
    objective,
    objective_bound,
    pareto,
    search,
)
from spmd_engine.planning.search.search_space import Candidate, SearchSpace, across_nodes, candidates


@pytest.fixture(scope="module")
def costs_and_space():
    """Costs of gpt-nano on four A100 of a node, and its search space."""
    model = build_model("gpt-nano")
    return CostModel(model, read_machine("a100").with_ranks(8)), SearchSpace(model, [4], [8], 8)


@pytest.fixture(scope="module")
def estimates(costs_and_space):
    """All candidates with their bounds and estimates, by brute force."""
    costs, space = costs_and_space
    estimators = [(each, costs.estimator(each)) for each in candidates(space)]
    return [(each, found.bound(), found.estimate()) for each, found in estimators if found is not None]


@pytest.mark.parametrize("goal", GOALS)
def test_the_search_finds_the_best_of_all_candidates(costs_and_space, estimates, goal):
    costs, space = costs_and_space
    found = search(costs, space, Limits(), goal, Budget(10_000))
    assert found.gap == 0
    assert objective(goal, found.best[0]) == min(objective(goal, estimate) for _, _, estimate in estimates)


def test_within_a_limit_of_memory_too(costs_and_space, estimates):
    costs, space = costs_and_space
    memory = float(np.median([estimate.memory for _, _, estimate in estimates]))
    found = search(costs, space, Limits(memory=memory), "latency", Budget(10_000))
    fitting = [estimate for _, _, estimate in estimates if estimate.memory <= memory]
    assert found.best[0].memory <= memory
    assert found.best[0].seconds <= min(estimate.seconds for estimate in fitting)


@pytest.mark.parametrize("goal", GOALS)
def test_no_estimate_is_better_than_its_bound(estimates, goal):
    for candidate, bound, estimate in estimates:
        first = objective_bound(goal, candidate, bound)[0]
        assert first <= objective(goal, estimate)[0] + 1e-9 * abs(first), candidate


@pytest.mark.parametrize(
    ("name", "machine", "ranks"),
    [
        ("llama-nano", "a100", 2),
        pytest.param("llama-nano", "a100", 4, marks=pytest.mark.soak),
        ("gpt-moe-nano", "h100", 2),
        ("convnet", "a100", 2),
        pytest.param("mlp", "cpu", 4, marks=pytest.mark.soak),
        pytest.param("resnet-nano", "cpu", 4, marks=pytest.mark.soak),
        pytest.param("convnet", "a100", 4, marks=pytest.mark.soak),
        pytest.param("gpt-moe-nano", "h100", 4, marks=pytest.mark.soak),
        pytest.param("gpt2", "a100", 4, marks=pytest.mark.soak),
    ],
)
def test_the_first_bound_is_below_the_second(name, machine, ranks):
    model = build_model(name)
    costs = CostModel(model, read_machine(machine).with_ranks(8))
    looked = 0
    for candidate in candidates(SearchSpace(model, [ranks], [8], 8)):
        if costs.shards_layers(candidate) and (second := costs.estimator(candidate)) is not None:
            before, after = costs.estimator(candidate, first=True).bound(), second.bound()
            assert before[0] <= after[0] * (1 + 1e-9), candidate
            assert before[1] <= after[1] * (1 + 1e-9), candidate
            looked += 1
    assert looked > 0


@pytest.mark.parametrize("seconds", [9.5, inf], ids=["time", "evaluations"])
def test_the_search_ends_when_its_budget_is_spent(costs_and_space, estimates, seconds):
    """Each reading of the clock takes a second, or there are ten evaluations."""
    costs, space = costs_and_space
    clock = iter(range(1 << 20))
    budget = Budget(10 if seconds == inf else inf, seconds, lambda: next(clock))
    found = search(costs, space, Limits(), "latency", budget, keep=3)
    assert not found.complete and found.estimated < 10 and budget.stopped == (seconds < inf)
    assert found.bound <= min(estimate.seconds for _, _, estimate in estimates) <= found.best[0].seconds


def test_no_plan_beats_one_of_the_front_in_both(estimates):
    front = pareto([estimate for _, _, estimate in estimates])
    for each in front:
        assert not any(other.seconds < each.seconds and other.memory < each.memory for _, _, other in estimates), (
            each.candidate
        )


def test_the_smallest_conflict_is_found_if_nothing_fits(costs_and_space, estimates):
    costs, space = costs_and_space
    smallest = min(estimate.memory for _, _, estimate in estimates)
    request, limits = Request(costs.model, costs.machine, [4], [8]), Limits(memory=0.9 * smallest)
    conflict = conflict_of(Constraints(costs, request, space, limits, Budget(10_000)))
    assert conflict.constraints[0] == "memory"
    plans = {name: plan for name, (_, plan) in conflict.relaxations.items()}
    assert plans.pop("memory").memory == pytest.approx(smallest)
    others = plans.values()
    assert others, "more ranks, or a smaller batch, must help"
    assert all(each.memory <= 0.9 * smallest for each in others)


def slowest(work, starts):
    """Seconds of the slowest part."""
    return max(sum(work[first:end]) for first, end in zip(starts, [*starts[1:], len(work)], strict=True))


def test_division_into_stages_is_exact_and_keeps_to_memory():
    rng = np.random.default_rng(3)
    for layers, chunks in ((5, 2), (7, 3), (9, 4)):
        work, memory = rng.random(layers), rng.random(layers)
        held = np.array([0.0, *np.cumsum(memory)])
        limit = 1.4 * memory.sum() / chunks + memory.max() / 2
        fits = held[None, :] - held[:, None] <= limit
        divisions = [(0, *starts) for starts in combinations(range(1, layers), chunks - 1)]
        possible = []
        for division in divisions:
            parts = zip(division, (*division[1:], layers), strict=True)
            possible += [division] * all(fits[start, end] for start, end in parts)
        found = best_division(work.tolist(), chunks, fits=lambda k, fits=fits: fits)
        if not possible:
            assert found is None
            continue
        assert found in possible
        assert slowest(work, found) == pytest.approx(min(slowest(work, division) for division in possible))


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", None), ("gpipe", None), ("interleaved", 2), ("zero-bubble", None)]
)
def test_the_time_of_a_schedule_equals_its_timeline(name, chunks):
    schedule, stages, m = named(name, chunks), 3, 6
    slots, drawn = Slots(schedule, stages, m), timeline(schedule, stages, m)
    each = 1 / schedule.chunks
    assert slots.seconds([(each, each, each)] * slots.chunks, 0.0) == pytest.approx(makespan(drawn))
    held = [slots.most_held(stage, dict.fromkeys(range(slots.chunks), each)) for stage in range(stages)]
    assert held == pytest.approx(peak_activations(drawn))


@pytest.mark.parametrize(
    ("axes", "zero", "overlap"), [({"pipe": 3}, 0, 2), ({"pipe": 2, "data": 2}, 2, 3), ({"pipe": 4}, 0, 7)], ids=str
)
def test_overlapping_stages_send_and_hold_what_the_dry_run_says(axes, zero, overlap):
    """Layers of three stages, too; seconds are those of the messages."""
    model = build_model("gpt-nano")
    costs = CostModel(model, read_machine("a100").with_ranks(4))
    how = {"zero": zero, "schedule": "1f1b", "micro_batches": 2, "batch_size": 4}
    plain, ours = (
        costs.estimator(Candidate(tuple(axes.items()), **how, overlap=each)).estimate() for each in (0, overlap)
    )
    composition = ours.candidate.composition(ParallelConfig(overlap_layers=str(overlap)))
    dry, before = (
        analyze(model, axes, each, batch_size=4, micro_batches=2)
        for each in (composition, composition.changed(overlap_layers=None))
    )
    assert ours.sent - plain.sent == pytest.approx(dry.bytes_sent - before.bytes_sent, rel=0.02)
    assert ours.sent > plain.sent and ours.seconds > plain.seconds
    step = next(each.step for each in dry.classes if each.step.coordinates["pipe"] == ours.stage)
    for kind in ("parameters", "gradients", "optimizer state"):
        assert ours.holds[kind] == pytest.approx(step.before[kind], rel=0.02)


def test_overlapping_stages_have_one_chunk():
    model, base = build_model("gpt-nano"), ParallelConfig(overlap_layers="1")
    found = list(candidates(SearchSpace(model, [4], [8], 8, base=base)))
    assert {each.schedule for each in found if each.pipe > 1} == {"1f1b", "zero-bubble", "gpipe"}
    assert all(each.overlap == (each.composition(base).overlap_layers == "1") == (each.pipe > 1) for each in found)
    with pytest.raises(UsageError, match=r"--overlap-layers 8:12 has ranges: give --mesh, or a number"):
        plan(model, ranks=2, machine="a100", base=ParallelConfig(overlap_layers="8:12"))


def test_hybrid_sharding_stays_inside_a_node():
    """Hybrid sharding: with replicas on nodes of four ranks, a node shares the parts; without ZeRO, nothing."""
    model = build_model("gpt-nano")
    space = SearchSpace(model, [8], [16], 4, axes=("data", "model", "replicate", "shard"))
    found = [each for each in candidates(space) if "shard" in each.mesh]
    assert {tuple(each.mesh.items()) for each in found} == {
        (("replicate", 2), ("shard", 4)),
        (("replicate", 2), ("shard", 2), ("model", 2)),
    }
    assert {each.zero for each in found} == {1, 2, 3}
    assert not [each for each in candidates(replace(space, zero=0)) if "shard" in each.mesh]
    assert not [each for each in candidates(replace(space, axes=("data", "model"))) if "shard" in each.mesh]


@pytest.mark.parametrize(
    ("axes", "node_ranks", "inside", "across"),
    [
        ({"pipe": 2, "data": 2, "model": 4}, 4, ["model"], ["pipe", "data"]),
        ({"pipe": 2, "data": 2, "model": 3}, 4, [], ["pipe", "data", "model"]),
        ({"data": 16}, 8, [], ["data"]),
        ({"data": 2, "pipe": 4, "model": 2}, 8, ["pipe", "model"], ["data"]),
        ({"data": 8}, 8, ["data"], []),
    ],
)
def test_which_axes_cross_nodes(axes, node_ranks, inside, across):
    assert across_nodes(axes, node_ranks) == (inside, across)
