"""Strategies composed: on several nodes, in processes of their own, and in other models than GPT."""

from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.schedules import named
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.models import deep_mlp, layout_for, mlp, two_layers
from support.combinations import ATTENTION, BLOCK, PARALLEL, Case, assert_as_one_device, assert_same, train


@pytest.mark.parametrize(
    "nodes, case",
    [
        (2, Case("data=2,pipe=2", zero=3, group_threshold=1500, schedule="zero-bubble")),
        pytest.param(
            2, Case("pipe=2,context=2", zero=1, context_method="ulysses", recompute=BLOCK), marks=pytest.mark.soak
        ),
        pytest.param(4, Case("replicate=2,shard=2", group_threshold=3000), marks=pytest.mark.soak),
        (4, Case("context=2,model=2", zero=2, context_method="ring", **PARALLEL)),
    ],
    ids=str,
)
def test_on_several_nodes(nodes, case):
    """Ranks of different nodes share no memory."""

    def launch(program, ranks):
        return run_threads(program, ranks, nodes=[f"node{rank * nodes // ranks}" for rank in range(ranks)])

    assert_as_one_device(case, launch)


def alone(program, ranks):
    """As one of the ranks of the MPI job there is."""
    return [program()]


@pytest.mark.mpi(ranks=4)
@pytest.mark.parametrize(
    "case",
    [
        Case("data=2,pipe=2", zero=3, schedule="zero-bubble", group_threshold=1500, micro_batches=5),
        pytest.param(Case("pipe=2,data=2", zero=2, schedule="interleaved", recompute=BLOCK), marks=pytest.mark.soak),
        Case("context=2,model=2", zero=3, context_method="ring", zigzag=True, recompute=ATTENTION, **PARALLEL),
        pytest.param(Case("replicate=2,shard=2", group_threshold=0, micro_batches=3), marks=pytest.mark.soak),
        Case("data=2,model=2", shares="data=2:1,model=3:1", zero=3, **PARALLEL),
    ],
    ids=str,
)
def test_four_processes(case):
    assert_as_one_device(case, alone)


@pytest.mark.soak  # the command line trains on this mesh, in test_cli
@pytest.mark.mpi(ranks=8)
def test_eight_processes():
    case = Case("pipe=2,context=2,model=2", zero=3, context_method="ring", recompute=BLOCK, **PARALLEL)
    assert_as_one_device(case, alone)


DENSE = {"mlp": mlp((9, 7, 10, 5)), "two layers": two_layers(6, 7), "deep": deep_mlp(12, 5)}


def train_dense(name, axes, **options):
    model = DENSE[name]
    rng = np.random.default_rng(3)
    x = rng.standard_normal((11, model.layers[0][1].sizes["d"]))
    y = rng.integers(0, 5, len(x)) if name == "mlp" else x[::-1].copy()

    def program():
        with Mesh(**axes) as mesh:
            engine = LayeredEngine(model, mesh, layout_for(model, mesh), dtype=np.float64, **options)
            return train(engine, lambda step: batch_of(x, y, engine, 3, step))

    return run_threads(program, prod(axes.values()))


@pytest.mark.parametrize(
    "name, mesh, options",
    [
        ("mlp", "row=2,col=2,data=2", {"storage": ZeroConfig(3, 500)}),
        ("mlp", "pipe=3,row=2", {"schedule": named("zero-bubble")}),
        ("mlp", "shard=2,col=3", {}),
        ("two layers", "pipe=2,model=2", {"storage": ZeroConfig(1)}),
        ("two layers", "row=3,data=2", {"storage": ZeroConfig(2)}),
        (
            "deep",
            "pipe=3,data=2",
            {"storage": ZeroConfig(3, 500), "recompute": BLOCK, "schedule": named("interleaved")},
        ),
        ("deep", "data=3", {"storage": ZeroConfig(3, 1000), "recompute": BLOCK}),
        ("deep", "replicate=2,pipe=2", {"stages": "cost", "schedule": named("gpipe")}),
    ],
)
def test_dense_models(name, mesh, options):
    assert_same(train_dense(name, Case(mesh).axes, **options), train_dense(name, {"data": 1})[0])
