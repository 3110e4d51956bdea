"""Plans for unequal nodes: work by speed, state by memory, and each rank within its own memory."""

import re
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import GPT_SIZES, gpt
from spmd_engine.planning.machine.machine import Curve, Link, Machine, NodeKind
from spmd_engine.planning.plan_result import Request
from spmd_engine.planning.planner import find_plan, fixed_plan
from spmd_engine.planning.search.cost_model import CostModel
from spmd_engine.planning.search.estimate import best_division
from spmd_engine.planning.search.search import Limits
from spmd_engine.planning.search.search_space import Candidate
from spmd_engine.planning.search.shares import state_shares

pytestmark = pytest.mark.usefixtures("few_evaluations")
SMALL = gpt(replace(GPT_SIZES["gpt-nano"], layers=3), "gpt-nano")
MIB = 1 << 20


def node(name, speed, memory):
    inside = Link(1e-5, 5e9)
    return NodeKind(name, 1, 1, {"float32": Curve.flat(speed)}, memory, Curve.flat(speed / 4), inside)


def machine(quick, slow):
    """Two nodes of a rank each, by (FLOP/s, bytes)."""
    return Machine("heterogeneous", (node("quick", *quick), node("slow", *slow)), Link(5e-5, 2e9))


def request_for(of, **changes):
    """Ranks stay as the machine lists them: their orders have tests of their own."""
    return Request(
        SMALL,
        of,
        [2],
        [16],
        **{"fixed": {"zero": 1, "micro_batches": 1, "recompute": "none"}, "placement": "order", **changes},
    )


@pytest.fixture(scope="module")
def planned_by_speed():
    """Of nodes with speeds 3 to 1, and room for everything."""
    return find_plan(request_for(machine((12e10, 1e9), (4e10, 1e9)), axes=["data", "pipe"]))


def test_work_goes_by_speed(planned_by_speed):
    alike = find_plan(request_for(machine((8e10, 1e9), (8e10, 1e9)), axes=["data"]))
    assert alike.plan.candidate.shares is None
    result = planned_by_speed
    assert result.plan.candidate.mesh == {"data": 2} and result.plan.candidate.shares == "data=3:1"
    slower = re.match(r"shares data=3:1, not even: that would take \+([\d.]+)% time", result.reasons[0])
    assert 80 < float(slower[1]) <= 100  # an even split waits half of the time for the slow one
    file = result.plan_file("gpt-nano")
    assert file.composition.shares == "data=3:1" and file.composition.state_shares is None


def test_heads_and_widths_go_by_speed():
    quick, slow = (12e10, 1e9), (4e10, 1e9)
    fixed = {"mesh": {"model": 2}, "micro_batches": 1, "sequence_parallel": False, "recompute": "none"}
    result = find_plan(request_for(machine(quick, slow), fixed=fixed))
    assert result.plan.candidate.shares == "model=3:1"  # 5 of 6 heads, 3/4 of the hidden rows
    slower = re.match(r"shares model=3:1, not even: that would take \+([\d.]+)% time", result.reasons[0])
    assert 60 < float(slower[1]) < 100  # half of the work at a third of the speed, against 5/6 at full speed: 80%


def test_given_shares_are_kept():
    """A mesh that they do not fit is no candidate; those along the others may be found."""
    given = ParallelConfig(shares="model=2:1")
    result = find_plan(request_for(machine((8e10, 1e9), (8e10, 1e9)), base=given, axes=["data", "model"]))
    assert result.plan.candidate.mesh == {"model": 2} and result.composition.shares == "model=2:1"
    with pytest.raises(UsageError, match="cannot be distributed over 2 ranks"):
        find_plan(request_for(machine((8e10, 1e9), (8e10, 1e9)), base=ParallelConfig(shares="model=2:1:1")))


def test_state_goes_by_memory_and_each_rank_has_room(planned_by_speed):
    roomy = planned_by_speed.evaluation
    rooms = [int(1.1 * peak) for peak in roomy.analysis.peak_bytes_by_rank()]
    rooms[1] = roomy.analysis.peak_bytes_by_rank()[1] - MIB  # too little for half of the state
    result = find_plan(request_for(machine((12e10, rooms[0]), (4e10, rooms[1])), axes=["data"]))
    candidate = result.plan.candidate
    first, second = map(int, candidate.state_shares.removeprefix("data=").split(":"))
    assert first > second
    peaks = result.evaluation.analysis.peak_bytes_by_rank()
    assert peaks[0] <= rooms[0] and peaks[1] <= rooms[1]


def test_a_given_composition_must_fit_each_ranks_own_memory():
    fixed = {"mesh": {"data": 2}, "zero": 1}
    equal = fixed_plan(request_for(machine((8e10, 1e9), (8e10, 1e9)), fixed=fixed))
    peaks = equal.evaluation.analysis.peak_bytes_by_rank()
    too_small = machine((8e10, 4 * peaks[0]), (4e10, 0.9 * peaks[1]))
    assert fixed_plan(request_for(too_small, fixed=fixed)).conflict.constraints == ["memory", "mesh"]
    enough = machine((8e10, 4 * peaks[0]), (4e10, 1.1 * peaks[1]))
    assert fixed_plan(request_for(enough, fixed=fixed)).conflict is None
    limited = request_for(enough, fixed=fixed, limits=Limits(memory=0.9 * max(peaks)))
    assert fixed_plan(limited).conflict is not None


@pytest.mark.parametrize(
    ("quick", "slow", "heterogeneous"), [((1e9, 1e9), (1e9, 1e9), False), ((1e9, 2e9), (1e9, 1e9), True)]
)
def test_nodes_with_different_names_may_be_equal(quick, slow, heterogeneous):
    assert machine(quick, slow).heterogeneous is heterogeneous


def searched(of, *candidates):
    costs = CostModel(SMALL, of.with_ranks(candidates[0].ranks))
    estimators = [costs.estimator(each) for each in candidates]
    assert all(each.bound()[0] <= each.estimate().seconds * (1 + 1e-9) for each in estimators)
    return [each.estimate() for each in estimators]


def test_estimates_account_for_slower_nodes():
    """Of samples and heads it has as many as suit its speed; its stage has less to do."""
    candidates = [
        Candidate((("data", 2),), 16, 1),
        Candidate((("model", 2),), 16, 1),
        Candidate((("pipe", 2),), 16, 4, schedule="1f1b"),
    ]
    fast = machine((12e10, 1e9), (12e10, 1e9))
    alike, heterogeneous = searched(fast, *candidates), searched(machine((12e10, 1e9), (4e10, 1e9)), *candidates)
    work = [[each.seconds - each.parts["gradients and gathers"] - each.parts["update"] for each in some]
            for some in (alike, heterogeneous)]  # fmt: skip
    assert work[1][0] == pytest.approx(1.5 * work[0][0], rel=0.01)  # 3/4 of the samples on the quick one
    inside = alike[1].parts["communication inside layers"]
    assert work[1][1] == pytest.approx(1.5 * (work[0][1] - inside) + 1.5 * inside, rel=0.01)  # 3/4 of heads and widths
    assert alike[2].candidate.stages[1] < heterogeneous[2].candidate.stages[1]
    assert work[1][2] < 2.2 * work[0][2]


def test_estimates_account_for_given_shares():
    """Of equal ranks, the one with two thirds of the samples, or of the heads and widths, works a third longer."""
    fast = machine((12e10, 1e9), (12e10, 1e9)).with_ranks(2)
    for axis in "data", "model":
        even, given = (
            CostModel(SMALL, fast, base=ParallelConfig(shares=shares))
            .estimator(Candidate(((axis, 2),), 12, 1))
            .estimate()
            for shares in (None, f"{axis}=2:1")
        )
        assert given.work - even.work == pytest.approx((even.work - even.parts["update"]) / 3, rel=1e-6)


def test_a_slow_stage_gets_fewer_layers():
    fixed = {"mesh": {"pipe": 2}, "micro_batches": 4, "schedule": "1f1b", "recompute": "none"}
    planned = find_plan(request_for(machine((12e10, 1e9), (4e10, 1e9)), fixed=fixed))
    assert planned.plan.candidate.stages[1] > len(SMALL.layers) / 2
    working = planned.evaluation.prediction.working
    assert max(working.values()) < 2.2 * min(working.values())  # 3 times, had both as many layers


@pytest.mark.parametrize("slowdowns", [(), (1.0, 3.0), (2.0, 1.0, 0.5)])
def test_divisions_for_unequal_stages_are_optimal(slowdowns):
    rng = np.random.default_rng(len(slowdowns))
    work, count = rng.random(9).tolist(), len(slowdowns) or 3

    def slowest(starts):
        parts = pairwise([*starts, len(work)])
        return max(pace * sum(work[a:b]) for pace, (a, b) in zip(slowdowns or (1.0,) * count, parts, strict=True))

    every = ((0, *starts) for starts in combinations(range(1, len(work)), count - 1))
    assert slowest(best_division(work, count, slowdowns=slowdowns)) == pytest.approx(min(map(slowest, every)))


def test_memory_of_unequal_ranks_is_shown_as_shares_of_their_own():
    fixed = {"mesh": {"data": 2}, "zero": 0, "micro_batches": 1}
    result = fixed_plan(request_for(machine((8e10, 40 * MIB), (8e10, 4 * MIB)), fixed=fixed))
    limit = "memory at most 100% of each rank's (4.00 MiB to 40.00 MiB) and mesh data=2 cannot be kept together"
    assert limit in result.why_not and re.search(r"it needs [\d.]+ MiB of its 4.00 MiB on rank 1$", result.why_not)
    assert result.limits.shown("memory", 33 * MIB) == "150%"  # of the mean, in which searches count


def test_shares_of_state_follow_the_memory_that_the_rest_of_a_step_leaves():
    candidate = Candidate((("data", 2),), batch_size=2, micro_batches=1, zero=1)
    before = {"optimizer state": 40, "gradients": 20}  # zero 1 shards only the first
    analysis = SimpleNamespace(
        peak_bytes_by_rank=lambda: [100, 100], of_rank=lambda rank: SimpleNamespace(before=before)
    )
    evaluation = SimpleNamespace(analysis=analysis)
    assert state_shares(SMALL, candidate, evaluation, [156, 92]) == "data=3:1"  # 96 and 32 bytes are free
    assert state_shares(SMALL, candidate, evaluation, [100, 50]) == "data=1:0"  # none is free
    assert state_shares(SMALL, candidate, evaluation, [100, 102]) is None  # nearly equal
    assert state_shares(SMALL, replace(candidate, zero=0), evaluation, [156, 92]) is None
