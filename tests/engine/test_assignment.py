"""What each rank of a mesh has: stages of layers, their parameters, and the axes along which these are in parts."""

from collections import Counter
from itertools import combinations, pairwise
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_engine import Mesh, run_threads
from spmd_engine.axes import all_positions, parse_axes
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.state.assignment import ZeroConfig, assign, divide, overlaps, parse_division, parse_overlap
from spmd_engine.errors import UsageError
from spmd_engine.models import deep_mlp, gpt
from spmd_engine.sharding import Layout
from spmd_engine.sharding.groups import Sum
from support import tiny

GPT = gpt(tiny.SIZE)
UNTIED = gpt(tiny.GPTSize(**{**tiny.SIZE.__dict__, "tied": False}))

# --- how parameters are stored


@pytest.mark.parametrize(
    "zero, axes, stage",
    [
        (None, {"data": 4}, 0),
        (None, {"data": 2, "shard": 2}, 3),
        (None, {"context": 4}, 0),
        (0, {"data": 2, "shard": 2}, 0),
        *[(zero, {"data": 4}, zero) for zero in (0, 1, 2, 3)],
    ],
)
def test_the_stage_of_zero(zero, axes, stage):
    assert ZeroConfig(zero).stage(axes) == stage


@pytest.mark.parametrize("zero", [4, -1, "3"])
def test_other_stages_there_are_not(zero):
    with pytest.raises(UsageError, match=f"zero stage {zero}: it is 1, 2 or 3, or 0 for none"):
        ZeroConfig(zero).stage({"data": 2})


@pytest.mark.parametrize(
    "zero, summed, cut",
    [
        (None, "data", ""),
        (None, "data context", ""),
        (None, "shard", "shard"),
        (None, "data shard", "shard"),
        (None, "replicate shard context", "shard context"),
        (None, "context data shard", "context shard"),
        (0, "data shard", ""),
        *[(zero, "data", "data") for zero in (1, 2, 3)],
        *[(zero, "replicate data shard context", "data shard context") for zero in (1, 2, 3)],
        *[(zero, "replicate", "") for zero in (1, 2, 3)],
        (3, "data model", "data model"),  # a norm's, where sequence parallelism cuts its input over model
        (3, "", ""),
    ],
)
def test_the_axes_along_which_state_is_in_parts(zero, summed, cut):
    axes = dict.fromkeys(summed.split(), 2)
    assert ZeroConfig(zero).sharded_axes(tuple(summed.split()), axes) == tuple(cut.split())


# --- stages: which layers run where


def model_of(*costs):
    layers = [(f"layer{i}", SimpleNamespace(cost=lambda length, cost=cost: cost)) for i, cost in enumerate(costs)]
    return SimpleNamespace(name="model", layers=layers, context=1)


@pytest.mark.parametrize("layers, chunks", [(8, 1), (8, 3), (8, 8), (20, 7), (1, 1)])
def test_even_stages_differ_by_one_layer_at_most(layers, chunks):
    ranges = divide(model_of(*range(layers)), chunks, "even")
    lengths = [len(each) for each in ranges]
    assert [layer for each in ranges for layer in each] == list(range(layers)) and len(ranges) == chunks
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


def costliest(costs, starts):
    return max(sum(costs[a:b]) for a, b in pairwise([*starts, len(costs)]))


@given(st.lists(st.integers(0, 9) | st.floats(0, 1e6), min_size=1, max_size=8), st.data())
def test_no_other_stages_have_a_cheaper_costliest_one(costs, data):
    chunks = data.draw(st.integers(1, len(costs)))
    ranges = divide(model_of(*costs), chunks, "cost")
    assert [layer for each in ranges for layer in each] == list(range(len(costs)))
    assert len(ranges) == chunks and all(ranges)
    best = min(costliest(costs, (0, *rest)) for rest in combinations(range(1, len(costs)), chunks - 1))
    assert costliest(costs, [each.start for each in ranges]) <= best * (1 + 1e-9)


def test_costs_are_those_of_the_model_s_context():
    seen = []
    model = model_of(1, 1)
    model.layers[0][1].cost = lambda length: seen.append(length) or 1
    model.context = 77
    divide(model, 2, "cost")
    assert seen == [77]


def test_the_head_s_cost_moves_layers_to_the_first_stage():
    """Two blocks of a narrow model are cheaper than one and a large vocabulary."""
    size = tiny.GPTSize(layers=4, width=8, heads=2, context=4, vocabulary=500)
    first, last = divide(gpt(size), 2, "cost")
    assert list(map(len, divide(gpt(size), 2, "even"))) == [6, 6] and (len(first), len(last)) == (11, 1)


def test_stages_may_be_said():
    assert divide(model_of(*range(9)), 3, (0, 3, 7)) == [range(0, 3), range(3, 7), range(7, 9)]
    assert divide(model_of(*range(2)), 1, [0]) == [range(0, 2)]


@pytest.mark.parametrize("starts", [(0, 3), (0, 3, 7, 8), (1, 3, 7), (0, 3, 3), (0, 7, 3), (0, 3, 9), (0, -1, 3), ()])
def test_stages_that_cannot_be_are_refused(starts):
    said = ",".join(map(str, starts))
    with pytest.raises(UsageError, match=f"stages {said}: 3 ascending numbers are needed, .* below 9, .* of model"):
        divide(model_of(*range(9)), 3, starts)


@pytest.mark.parametrize("division", ["even", "cost", (0, 1, 2, 3)])
def test_more_chunks_than_layers_are_refused(division):
    with pytest.raises(UsageError, match=r"model has 3 layers \(.*\), too few for 4 stages; take fewer stages"):
        divide(model_of(1, 1, 1), 4, division)


@pytest.mark.parametrize(
    "text, division", [("even", "even"), ("cost", "cost"), ("0,3,7", (0, 3, 7)), ("0, 12", (0, 12)), ("0", (0,))]
)
def test_divisions_are_read(text, division):
    assert parse_division(text) == division


@pytest.mark.parametrize("text", ["", "evenly", "0,3,", "0;3", "0,1.5"])
def test_what_is_no_division_is_refused(text):
    with pytest.raises(UsageError, match=f"cannot read stages '{text}': write even, cost, or the first layer"):
        parse_division(text)


# --- the plan of each rank

CUBE = {"data": 2, "pipe": 3, "model": 2}


def plans(model, axes, *, sequence_parallel=False, itemsize=8, **options):
    """Each place of a mesh that does not exist, and its plan."""
    places = all_positions(axes)
    layouts = [Layout.for_mesh(place, sequence_parallel=sequence_parallel) for place in places]
    return [(place, assign(model, place, layout, itemsize, **options)) for place, layout in zip(places, layouts)]


@pytest.mark.parametrize("stages", ["even", "cost", (0, 1, 5)])
def test_every_layer_is_on_one_stage_and_finds_its_parameters_there(stages):
    for place, plan in plans(GPT, CUBE, stages=stages):
        assert [layer for chunk in plan.chunks for layer in chunk] == list(range(len(GPT.layers)))
        assert list(plan.mine) == [place.coordinates["pipe"]]
        assert list(plan.uses) == list(plan.chunks[place.coordinates["pipe"]])
        held = Counter(m.name for m in plan.members)
        assert set(held.values()) == {1}
        for layer, names in plan.uses.items():
            assert list(names) == list(GPT.layers[layer][1].parameters) and set(names.values()) <= set(held)
        assert set(held) == {full for names in plan.uses.values() for full in names.values()}


def test_chunks_are_dealt_over_stages_in_turn():
    for place, plan in plans(GPT, {"pipe": 2}, chunks_per_stage=4):
        stage = place.coordinates["pipe"]
        assert list(plan.mine) == [stage, stage + 2, stage + 4, stage + 6] and len(plan.chunks) == 8
        assert list(plan.uses) == list(plan.mine)  # of eight layers, one a chunk


def test_groups_do_not_reach_over_chunks():
    for _, plan in plans(GPT, {"pipe": 2}, chunks_per_stage=2):
        layers = [(chunk, layer) for chunk in plan.mine for layer in plan.chunks[chunk]]
        chunk_of = {full: chunk for chunk, layer in layers for full in plan.uses[layer].values()}
        for group in plan.groups:
            assert len({chunk_of[m.name] for m in group.members}) == 1


@pytest.mark.parametrize(
    ("text", "overlap", "held"),
    [
        (None, 0, ((3, 3), (6, 6))),
        ("2", 2, ((1, 5), (4, 8))),
        ("4", 4, ((0, 7), (2, 8))),
        ("1:4,6:8", ((1, 4), (6, 8)), ((1, 4), (6, 8))),
    ],
    ids=str,
)
def test_an_overlap_is_around_boundaries_or_given(text, overlap, held):
    assert parse_overlap(text) == overlap
    assert overlaps([range(3), range(3, 6), range(6, 8)], overlap) == held


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a", "cannot read --overlap-layers 'a': write"),
        ("7", "--overlap-layers 7: no boundary has more than 6 layers on a side"),
        ("1:2,3", "cannot read"),
        ("-1", "cannot read"),
        ("4:5,6:7", "4:5: a stage begins with layer 3, which is outside"),
        ("3:9,6:7", "3:9: give a first layer, and an end after it, up to 8"),
        ("3:3,6:7", "3:3: give a first layer"),
        ("1:4", "has 1 ranges for 2 boundaries"),
    ],
)
def test_an_overlap_that_does_not_fit_is_refused_in_a_line(text, why):
    with pytest.raises(UsageError, match=why):
        overlaps([range(3), range(3, 6), range(6, 8)], parse_overlap(text))


def test_interleaved_stages_do_not_overlap():
    with pytest.raises(UsageError, match="several chunks cannot overlap"):
        ParallelConfig(overlap_layers="1", schedule="interleaved").check({"pipe": 2}, GPT)
    assert "no effect" in ParallelConfig(overlap_layers="1").check({"data": 2}, GPT)[0]
    assert not ParallelConfig(overlap_layers="0", schedule="interleaved").check({"pipe": 2}, GPT)
    with pytest.raises(UsageError, match="--overlap-layers 1 with --mesh pipe=2,model=1|2: it needs stages of equal"):
        ParallelConfig(overlap_layers="1").check(parse_axes("pipe=2,model=1|2"), GPT)
    assert ParallelConfig(overlap_layers="1").fitted(parse_axes("pipe=2,model=1|2"), GPT)[0].overlap_layers is None
    fitting, notices = ParallelConfig(overlap_layers="1:4").fitted({"pipe": 3}, GPT)
    assert fitting.overlap_layers is None and "continues without --overlap-layers 1:4" in notices[0]


def test_a_parameter_that_several_stages_hold_stands_alone():
    for place, plan in plans(GPT, CUBE):
        assert plan.holders["embedding/table"] == (0, 2)
        assert {stages for name, stages in plan.holders.items() if name != "embedding/table"} == {(0,), (1,), (2,)}
        tied = [group for group in plan.groups if "embedding/table" in group.spans]
        assert len(tied) == (place.coordinates["pipe"] != 1)
        for group in tied:
            assert len(group.members) == 1 and group.summed == Sum(("data",), (), (0, 2))
        assert all(not group.summed.stages for group in plan.groups if group not in tied)


def test_one_stage_shares_with_nobody():
    assert {m.summed.stages for _, plan in plans(GPT, {"data": 2}) for m in plan.members} == {()}
    assert {m.summed.stages for _, plan in plans(UNTIED, CUBE) for m in plan.members} == {()}


def test_a_tied_parameter_of_two_chunks_of_one_stage_belongs_to_the_first():
    (_, plan) = plans(GPT, {"data": 1}, chunks_per_stage=4)[0]
    assert next(m for m in plan.members if m.name == "embedding/table").unit == 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_summed_over_what_cuts_the_layer_s_activations(sequence_parallel):
    where = {"storage": ZeroConfig(3), "sequence_parallel": sequence_parallel}
    for _, plan in plans(GPT, {"data": 2, "model": 2, "context": 2}, **where):
        sums = {m.name: m.summed for m in plan.members}
        within = Sum(("data", "context"), ("data", "context"))
        stream = Sum(*[("data", "model", "context")] * 2) if sequence_parallel else within
        assert sums["block0/attention/query"] == sums["block1/mlp/w0"] == sums["embedding/table"] == within
        assert sums["block0/attention/norm/scale"] == sums["positions/table"] == sums["block0/mlp/b1"] == stream


def test_axes_of_one_rank_are_not_summed_over():
    (_, plan) = plans(GPT, {"data": 1, "model": 1}, storage=ZeroConfig(3), sequence_parallel=True)[0]
    assert {m.summed for m in plan.members} == {Sum()}


MESHES = [CUBE, {"data": 3, "model": 5}, {"pipe": 2, "context": 2, "model": 3}]


@pytest.mark.parametrize("axes", MESHES, ids=tiny.mesh_id)
def test_ranks_together_have_every_element_as_often_as_it_is_replicated(axes):
    elements, total = Counter(), prod(axes.values())
    for _, plan in plans(GPT, axes):
        elements.update({m.name: m.size for m in plan.members})
        holders = plan.holders
    layout = Layout.for_mesh(all_positions(axes)[0])
    for name, (parameter, shape) in GPT.parameters():
        copies = total // prod(axes[axis] for axis in layout.spec(parameter.dims).axes) // axes.get("pipe", 1)
        assert elements[name] == prod(shape) * copies * len(holders[name]), name


def groups_of(plan):
    """Everything by which ranks must agree on groups."""
    return [(group.name, group.summed, list(group.spans)) for group in plan.groups]


@pytest.mark.parametrize("threshold", [0, 700, 3000, 1 << 20])
def test_ranks_of_a_stage_have_the_same_groups(threshold):
    """Of 6 heads on 4 ranks, and 13 words on 4, blocks differ."""
    by_stage = {}
    for place, plan in plans(GPT, {"data": 2, "pipe": 2, "model": 4}, storage=ZeroConfig(1, threshold)):
        by_stage.setdefault(place.coordinates["pipe"], []).append(groups_of(plan))
    for stage in by_stage.values():
        assert all(groups == stage[0] for groups in stage)


def test_a_mesh_that_exists_has_the_plan_of_its_places():
    options = {"storage": ZeroConfig(2, 2000), "stages": "cost"}

    def program():
        with Mesh(**CUBE) as mesh:
            plan = assign(GPT, mesh, Layout.for_mesh(mesh), 8, **options)
            return plan.chunks, plan.mine, plan.uses, plan.holders, groups_of(plan)

    expected = [(p.chunks, p.mine, p.uses, p.holders, groups_of(p)) for _, p in plans(GPT, CUBE, **options)]
    assert run_threads(program, 12) == expected


@pytest.mark.parametrize("width", [16, 64, 96])
def test_a_thousand_layers_are_few_groups(width):
    model = deep_mlp(1000, width)
    assert sum(len(layer.parameters) // 2 for _, layer in model.layers) == 1000
    place = all_positions({"data": 4})[0]
    plan = assign(model, place, Layout.for_mesh(place), 4, storage=ZeroConfig(3))
    assert 1 <= len(plan.groups) <= 50
    assert len(list(plan.members)) == 2000


def test_options_of_groups_reach_them():
    def sizes(**options):
        return [group.size * 8 for group in plans(UNTIED, {"data": 2}, storage=ZeroConfig(3, **options))[0][1].groups]

    assert len(sizes()) == 1
    assert len(sizes(threshold=0)) == len(list(UNTIED.parameters()))
    assert max(sizes(cap=5000)) <= max(5000, max(8 * np.prod(shape) for _, (_, shape) in UNTIED.parameters()))
    assert len(sizes(cap=5000)) > 3


def test_too_few_layers_are_refused():
    said = r"gpt has 8 layers \(embedding, .*block0/.*, \.\.\., head\), too few for 5 stages of 2 chunks"
    with pytest.raises(UsageError, match=said):
        plans(GPT, {"pipe": 5}, chunks_per_stage=2)
