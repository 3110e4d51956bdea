"""Plans with uneven stages or a helper rank, where a node is too small for its part of any even mesh."""

import json
import re

import pytest

from spmd_engine.axes import count_ranks, parse_axes
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.errors import UsageError
from spmd_engine.models import GPTSize, gpt
from spmd_engine.planning import analyze, plan
from spmd_engine.planning.machine.machine import Curve, Link, Machine, NodeKind
from spmd_engine.planning.plan_result import Request
from spmd_engine.planning.planner import find_plan
from spmd_engine.planning.search.search_space import SearchSpace, meshes

pytestmark = pytest.mark.usefixtures("few_evaluations")
MIB = 1 << 20
#: Its two tables are 8 MiB each with their state, and two heads cannot be on three ranks.
MODEL = gpt(GPTSize(layers=1, width=32, heads=2, context=16, vocabulary=16000, tied=False))


def machine(*nodes):
    """Nodes by (name, ranks, bytes of a rank)."""
    curve, inside = Curve.flat(4e10), Link(1e-5, 5e9)
    kinds = [
        NodeKind(name, 1, ranks, {"float32": curve}, memory * ranks, Curve.flat(1e10), inside, cores=float(ranks))
        for name, ranks, memory in nodes
    ]
    return Machine("unequal", tuple(kinds), Link(5e-5, 2e9))


def request_for(small, **changes):
    nodes = machine(("big", 1, 40 * MIB), ("small", 2, small * MIB))
    return Request(MODEL, nodes, [3], [8], **{"axes": ["pipe", "data", "model"], **changes})


def test_a_stage_is_split_further_for_the_node_that_is_too_small():
    result = find_plan(request_for(8, fallback=["split"]))
    mesh = parse_axes("pipe=2,model=1|2")
    assert result.plan.candidate.mesh == mesh == result.composition.mesh
    peaks = result.evaluation.analysis.peak_bytes_by_rank()
    assert all(peak <= limit * MIB for peak, limit in zip(peaks, (40, 8, 8), strict=True))
    assert "--mesh 'pipe=2,model=1|2'" in result.command and "mpiexec -n 3 " in result.command
    forced, cost = result.reasons
    assert re.match(
        r"uneven stages: nothing fits without; rank \d, on node 1 \(small\), has 8.00 MiB and would", forced
    )
    assert re.match(r"without limits of memory .* would take [\d.]+ ms: the limits cost [\d.]+ ms of a step", cost)
    again = analyze(MODEL, mesh, result.composition, batch_size=8, micro_batches=result.micro_batches)
    assert again.bytes_sent == result.evaluation.bytes_sent
    assert json.loads(json.dumps(again.as_json()))["axes"] == {"pipe": 2, "model": [1, 2]}
    assert result.plan_file("gpt-nano").ranks == 3


def test_a_conflict_names_the_fallback_that_would_help():
    result = find_plan(request_for(8, fallback=[]))
    assert result.plan is None and result.why_not.endswith("Its memory would suffice with --fallback split")
    with pytest.raises(UsageError, match="fallback 'spilt': choose split, offload, assign, or none"):
        request_for(8, fallback=["spilt"])


def test_a_given_mesh_may_be_uneven():
    options = {"machine": machine(("big", 1, 40 * MIB), ("small", 2, 8 * MIB)), "batch_size": 8}
    result = plan(MODEL, mesh={"pipe": 2, "model": (1, 2)}, **options)
    assert result.composition.mesh == parse_axes("pipe=2,model=1|2") and result.evaluation.analysis.ranks == 3


def test_where_an_even_mesh_fits_stages_are_even():
    assert set(find_plan(request_for(40)).plan.candidate.mesh.values()) == {3}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((1, 2), {"pipe=2,model=1|2"}),
        ((2, 1), {"pipe=2,model=2|1"}),
        ((2, 4), {"pipe=2,model=2|4", "pipe=2,data=2,model=1|2", "pipe=3,model=1|1|4", "pipe=5,model=2|1|1|1|1",
                  "pipe=4,model=1|1|2|2"}),
        ((2, 2), set()),  # parts of equal nodes are equal
    ],
)  # fmt: skip
def test_stages_are_nodes_or_equal_parts_of_them(nodes, expected):
    model = gpt(GPTSize(layers=4, width=16, heads=4, context=16, vocabulary=13))
    space = SearchSpace(model, [sum(nodes)], [8], max(nodes), nodes=nodes)
    found = list(meshes(space))
    assert {
        ParallelConfig(mesh=axes).mesh == axes and ",".join(f"{a}={n}" for a, n in axes.items()) for axes in found
    } == expected
    assert all(count_ranks(axes) == sum(nodes) for axes in found)


def request_with_a_node_that_is_too_small(fallback):
    """It cannot hold the activations of a sample."""
    model = gpt(GPTSize(layers=1, width=32, heads=2, context=1024, vocabulary=13))
    nodes = machine(("small", 1, 2 * MIB), ("big", 1, 100 * MIB))
    return Request(model, nodes, [2], [4], fallback=fallback, axes=["data"])


def test_a_helper_rank_relieves_a_node_that_cannot_hold_the_activations_of_a_sample():
    request = request_with_a_node_that_is_too_small(["assign"])
    result = find_plan(request)
    assert result.plan.candidate.mesh == {"data": 1} and result.plan.candidate.ranks == 2
    assert result.composition.assign == "block0:rank1,norm:rank1,head:rank1"
    peaks = result.evaluation.analysis.peak_bytes_by_rank()
    assert all(peak <= limit * MIB for peak, limit in zip(peaks, (2, 100), strict=True))
    assert result.command.startswith("mpiexec -n 2 ") and f"--assign {result.composition.assign}" in result.command
    forced, cost = result.reasons
    assert re.match(r"a helper rank: nothing fits without; rank 0, on node 0 \(small\), has 2.00 MiB and would", forced)
    assert re.match(r"without limits of memory data=2.* the limits cost [\d.]+ ms of a step", cost)
    chosen = {"micro_batches": result.micro_batches, "recompute": result.composition.recompute}
    options_of_plan = {"mesh": {"data": 1}, "ranks": 1, "batch_size": 4, "base": result.composition, "fixed": chosen}
    given = plan(request.model, machine=request.machine, **options_of_plan)
    assert given.evaluation.seconds == result.evaluation.seconds and given.conflict is None
    file = result.plan_file("gpt-nano")
    assert file.ranks == 2 and file.composition.assign == result.composition.assign


@pytest.mark.soak
def test_a_conflict_names_the_helper_rank_that_would_help():
    refused = find_plan(request_with_a_node_that_is_too_small([]))
    assert refused.why_not.endswith("Its memory would suffice with --fallback assign")


def test_no_rank_helps_where_its_own_memory_does_not_suffice():
    model = gpt(GPTSize(layers=3, width=32, heads=2, context=1024, vocabulary=13))
    nodes = machine(("small", 1, 5 * MIB // 2), ("big", 1, 3 * MIB))
    assert find_plan(Request(model, nodes, [2], [4], fallback=["assign"], axes=["data"])).plan is None
