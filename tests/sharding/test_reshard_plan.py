"""Which moves lead from one sharding to another, without any ranks."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_engine.axes import all_positions
from spmd_engine.sharding import Spec, reshard_plan
from support.resharding import MESHES, numbered, specs

ON = {"data": 2, "model": 2, "expert": 2}


@pytest.mark.parametrize(
    "source, target, moves",
    [
        ("b f", "b f", "nothing to do"),
        ("b/data f/model", "b/data f/model", "nothing to do"),
        ("b f", "b/data f", "slice b by data"),
        ("b/data f", "b/data,model f/expert", "slice b by model, f by expert"),
        ("b/data f", "b f", "all_gather b over data"),
        ("b/data,model f", "b/data f", "all_gather b over model"),
        ("b/data,model f", "b f", "all_gather b over data,model"),
        ("b/data f/model", "b f", "all_gather f over model, then all_gather b over data"),
        ("b/data f", "b f/data", "all_to_all b -> f over data"),
        ("b/data,model f", "b f/data,model", "all_to_all b -> f over data,model"),
        ("b/data f/model", "b f/model,data", "all_to_all b -> f over data"),
        ("b/data f", "b f/model", "slice f by model, then all_gather b over data"),
        ("b/data f", "b f/model,data", "slice f by model, then all_to_all b -> f over data"),
        ("b/data,model f", "b f/model", "all_to_all b -> f over model, then all_gather b over data"),
        # What collectives in a row would send twice, or cannot do.
        ("b/data f/model", "b/model f/data", "exchange over data,model"),
        ("b/data f/model", "b f/data,model", "exchange over data,model"),
        ("b/data,model f", "b f/model,data", "exchange over data,model"),
        ("b/data,model f", "b/model,data f", "exchange over data,model"),
        ("b/data,model f", "b/model f", "exchange over data,model"),
        ("b/data f", "b/model f", "exchange over data"),  # along model everyone has the same
        ("b/data f", "b/model,data f", "exchange over data"),
        ("b/data f", "b f/data,model", "exchange over data"),
        ("b/data f/model s/expert", "b/data f/expert s/model", "exchange over model,expert"),
        ("b/data,model s f", "b s/model f/data", "exchange over data,model"),
        ("b/data s/model f v", "b s f/data v/model", "exchange over data,model"),
    ],
)
def test_plans(source, target, moves):
    plan = reshard_plan(source, target, ON)
    assert str(plan) == moves
    assert reshard_plan(Spec.parse(source), Spec.parse(target), ON) == plan


def test_axes_of_one_rank_cut_nothing():
    assert str(reshard_plan("b/data,model f", "b/model f/data", {"data": 1, "model": 2})) == "nothing to do"
    assert str(reshard_plan("b/data,model f", "b f/model,data", {"data": 1, "model": 2})) == (
        "all_to_all b -> f over model"
    )


def elements(spec, shape, place):
    """The numbers of the elements that a rank has."""
    return set(numbered(shape)[spec.block(shape, place)].ravel().tolist())


@settings(max_examples=150)
@given(specs(), specs(), st.tuples(*[st.integers(1, 3)] * 3), st.tuples(*[st.integers(0, 5)] * 3))
def test_no_plan_sends_more_than_what_ranks_lack(source, target, sizes, shape):
    """Every way has to bring each rank what its new block has and its old one had not; none brings more."""
    axes = dict(zip("xyz", sizes))
    plan = reshard_plan(source, target, axes)
    lacking = sum(len(elements(target, shape, p) - elements(source, shape, p)) for p in all_positions(axes))
    assert sum(plan.sent(shape, np.int8, place.coordinates) for place in all_positions(axes)) == lacking


@given(specs(), specs(), st.tuples(*[st.integers(1, 3)] * 3))
def test_the_moves_of_a_plan_lead_from_source_to_target(source, target, sizes):
    axes = dict(zip("xyz", sizes))
    plan = reshard_plan(source, target, axes)
    specs = [move.source for move in plan.moves] + [move.target for move in plan.moves[-1:]]
    assert [move.target for move in plan.moves[:-1]] == specs[1:-1]
    shape = (5, 4, 7)
    for place in all_positions(axes):
        ends = (specs[0], specs[-1]) if specs else (source, source)
        assert [end.block(shape, place) for end in ends] == [s.block(shape, place) for s in (source, target)]


def test_what_a_plan_saves():
    """Gathering all and slicing again would always do; it sends more wherever blocks move."""
    shape, whole = (6, 6, 6), "b s f"
    for axes, names in MESHES:
        for source, target in permutations(names, 2):
            plans = reshard_plan(source, target, axes), reshard_plan(source, whole, axes)
            direct, gathered = (
                sum(p.sent(shape, float, place.coordinates) for place in all_positions(axes)) for p in plans
            )
            assert direct < gathered or (direct == gathered and (target == whole or gathered == 0)), (source, target)
