"""Every strategy, alone and composed with others, trains as one device does.

The same few clipped steps of a small GPT with dropout, in float64; batches, sequences, heads, words and layers do
not divide by the numbers of ranks.
"""

from functools import cache, partial
from math import prod

import numpy as np
import pytest

import tiny
from spmd_engine import Mesh, run
from spmd_engine.engine import SGD, AdamW, LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.plan import Storage
from spmd_engine.engine.recompute import Recompute
from spmd_engine.engine.schedules import named
from spmd_engine.models import deep_mlp, layout_for, mlp, two_layers
from spmd_engine.training import Trainer

#: What changes what is computed; all else is where and when.
COMPUTED = {"dropout", "tied", "micro_batches", "steps", "optimizer", "layers"}


class Case:
    """A mesh, and how the small GPT is trained on it."""

    def __init__(self, mesh, *, context_method=None, schedule=None, chunks=None, **options):
        self.axes = {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}
        self.said = {"schedule": schedule, "chunks": chunks, "method": context_method, **options}
        self.options = {"dropout": 0.1, **options}
        if context_method:
            self.options["model_options"] = (("context_method", context_method),)
        if schedule:
            self.options["schedule"] = named(schedule, chunks)

    def __str__(self):
        said = {**self.said, "recompute": getattr(self.said.get("recompute"), "value", None)}
        if "optimizer" in said:
            said["optimizer"] = "SGD"
        words = (f"{key}={value}" for key, value in said.items() if value is not None)
        return " ".join((tiny.mesh_id(self.axes), *words)).replace("=True", "")


def train(engine, batches, *, optimizer=AdamW, steps=tiny.STEPS):
    """Losses and norms of clipped steps; final gradients and parameters that are here, each with where it lies."""
    trainer = Trainer(engine, optimizer(), batches, lambda step: 0.05, grad_clip=0.3)
    reports = list(trainer.run(steps))
    gradients = engine.named(engine.gradients)
    return (
        [[report.loss, report.grad_norm] for report in reports],
        {name: (engine.owned_index(name), gradient.copy()) for name, gradient in gradients.items()},
        {name: (engine.index(name), parameter.copy()) for name, parameter in engine.parameters.items()},
    )


def assert_same(results, expected):
    """Every rank's part is one device's, replicas included, and nothing is missing."""
    for numbers, *_ in results:
        np.testing.assert_allclose(numbers, expected[0], rtol=1e-9)
    for kind in (1, 2):
        for name, (_, whole) in expected[kind].items():
            covered = np.zeros(whole.shape, bool)
            for index, part in (result[kind][name] for result in results if name in result[kind]):
                np.testing.assert_allclose(part, whole[index], rtol=0, atol=1e-8, err_msg=name)
                covered[index] = True
            assert covered.all() or len(results) == 1, name  # of an MPI job, each process sees its own part


def train_gpt(axes, *, launch=run, micro_batches=2, optimizer=AdamW, steps=tiny.STEPS, **options):
    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, **options)
            return train(engine, lambda step: tiny.batch(engine, step, micro_batches), optimizer=optimizer, steps=steps)

    return launch(program, prod(axes.values()))


@cache
def one_device(**options):
    return train_gpt({"data": 1}, **options)[0]


def assert_as_one_device(case, launch=run):
    expected = one_device(**{key: value for key, value in case.options.items() if key in COMPUTED})
    assert_same(train_gpt(case.axes, launch=launch, **case.options), expected)


def holds(cases):
    """Tests that cases train as one device does."""

    @pytest.mark.parametrize("case", cases, ids=str)
    def test(case):
        assert_as_one_device(case)

    return test


BLOCK, ATTENTION = Recompute.BLOCK, Recompute.ATTENTION
PARALLEL = {"sequence_parallel": True}
MOMENTUM = partial(SGD, momentum=0.9, weight_decay=0.1)

test_data_parallel = holds(
    [
        Case("data=2"),
        Case("data=3", micro_batches=5),  # of two samples a micro-batch: somebody has none
        Case("data=3", dropout=0.0, tied=False),
    ]
)
test_sharded_state = holds(
    [
        Case("data=2", zero=1),
        Case("data=3", zero=1, group_threshold=0),
        Case("data=4", zero=2, micro_batches=3, tied=False),
        Case("data=2", zero=2, micro_batches=1),
        Case("data=2", zero=3, micro_batches=3),
        Case("data=3", zero=3, group_threshold=1500, optimizer=MOMENTUM),
        Case("data=4", zero=3, group_threshold=1500, tied=False),
        Case("data=6", zero=3, group_threshold=3000, micro_batches=5),
    ]
)
test_replicas_of_shards = holds(
    [
        Case("shard=4"),
        Case("shard=3", group_threshold=1500),
        Case("replicate=2,shard=2", micro_batches=3),
        Case("data=2,shard=2", group_threshold=1500),
        Case("data=2,shard=2", zero=2, micro_batches=3),
        Case("replicate=2,shard=2", zero=1),
        Case("shard=2,replicate=3", tied=False),
    ]
)
test_tensor_parallel = holds(
    [
        Case("model=2"),
        Case("model=4", tied=False),
        Case("model=3", **PARALLEL),
        Case("model=4", recompute=BLOCK, **PARALLEL),
    ]
)
test_context_parallel = holds(
    [
        *[Case("context=2", context_method=method) for method in ("gather", "ring", "ulysses")],
        *[Case("context=3", context_method=method, balanced=True) for method in ("gather", "ring", "ulysses")],
        Case("context=4", context_method="ring", micro_batches=3),
        Case("context=4", context_method="ulysses", zero=3, recompute=ATTENTION),
    ]
)
test_recomputation = holds(
    [
        *[Case("data=1", recompute=recompute) for recompute in (BLOCK, ATTENTION)],
        *[Case("data=2", zero=3, group_threshold=1500, recompute=recompute) for recompute in (BLOCK, ATTENTION)],
        Case("model=2", recompute=ATTENTION, **PARALLEL),
    ]
)

PIPELINES = [("naive", None), ("gpipe", None), ("1f1b", None), ("interleaved", None), ("interleaved", 3)]
PIPELINES += [("zero-bubble", None), ("zero-bubble-h2", None)]
CHUNKS = {2: (0, 3), 3: (0, 1, 6), 4: (0, 1, 5, 7), 6: (0, 1, 2, 3, 5, 7)}


def division(number, chunks):
    """Even, by cost or said, in turn."""
    return ("even", "cost", CHUNKS[chunks])[number % 3]


test_pipelines = holds(
    [
        *[
            Case("pipe=2", schedule=name, chunks=v, micro_batches=m, stages=division(i + m, 2 * named(name, v).chunks))
            for i, (name, v) in enumerate(PIPELINES)
            for m in (1, 2, 3, 5)
        ],
        *[Case("pipe=3", schedule=name, micro_batches=m) for name, _ in PIPELINES[1:4] for m in (2, 5)],
        Case("pipe=4", schedule="zero-bubble", micro_batches=5, stages=CHUNKS[4]),
        Case("pipe=4", schedule="interleaved", tied=False),
        Case("pipe=2", tied=False, dropout=0.0, recompute=BLOCK),
        Case("pipe=3", recompute=ATTENTION, micro_batches=3),
        Case("data=1", schedule="interleaved", chunks=3),  # all chunks on the only stage
    ]
)
test_pipelines_of_parts = holds(
    [
        *[
            Case("pipe=2,data=2", zero=zero, schedule=name, chunks=v, micro_batches=3)
            for zero in (1, 2, 3)
            for name, v in PIPELINES
        ],
        Case("pipe=2,shard=2", group_threshold=1500, schedule="zero-bubble", recompute=BLOCK),
        Case("data=3,pipe=2", zero=3, schedule="gpipe", micro_batches=5, tied=False),
    ]
)
test_two_ways_together = holds(
    [
        Case("data=2,model=2", zero=1, **PARALLEL),
        Case("data=3,model=2", zero=2, micro_batches=3, **PARALLEL),
        Case("data=2,model=2", zero=3, group_threshold=1500, recompute=BLOCK, **PARALLEL),
        Case("shard=2,model=2", tied=False),
        Case("data=2,context=2", zero=3, context_method="ring", balanced=True),
        Case("context=2,shard=2", context_method="ulysses"),
        Case("context=3,data=2", zero=1, balanced=True, micro_batches=5),
        Case("context=2,model=2", context_method="ring", balanced=True, **PARALLEL),
        Case("model=3,context=2", context_method="ulysses", zero=2),
        *[Case("pipe=2,context=2", context_method=m, zero=z) for m, z in [("gather", 1), ("ring", 3), ("ulysses", 2)]],
        Case("context=2,pipe=2", context_method="ring", balanced=True, schedule="zero-bubble", recompute=ATTENTION),
        Case("pipe=2,model=2", schedule="interleaved", micro_batches=5, **PARALLEL),
        Case("model=3,pipe=2", schedule="zero-bubble-h2", recompute=BLOCK, stages="cost", **PARALLEL),
    ]
)
test_three_ways_together = holds(
    [
        Case("data=8", zero=3, group_threshold=3000),
        Case("replicate=2,shard=4"),
        Case("pipe=8", schedule="zero-bubble", micro_batches=4),
        Case("pipe=4,data=2", schedule="interleaved"),
        Case("context=4,data=2", context_method="ring"),
        Case("context=4,data=2", context_method="ulysses", balanced=True),
        Case("model=4,data=2", zero=2, **PARALLEL),
        Case("pipe=2,data=2,model=2", schedule="1f1b"),
        Case("pipe=2,data=2,model=2", schedule="1f1b", zero=1, recompute=BLOCK, **PARALLEL),
        Case("model=2,pipe=2,data=2", schedule="zero-bubble", zero=3, micro_batches=3, **PARALLEL),
        Case("pipe=2,context=2,model=2", zero=3, recompute=BLOCK, context_method="ring"),
        Case("data=2,context=2,model=2", zero=3, balanced=True, tied=False, **PARALLEL),
        Case("replicate=2,shard=2,pipe=2", schedule="interleaved", recompute=ATTENTION),
    ]
)
test_ten_steps = holds(
    [
        Case("data=3", zero=3, group_threshold=1500, steps=10),
        Case("pipe=2,data=2", zero=1, schedule="zero-bubble", micro_batches=3, steps=10),
    ]
)


@pytest.mark.parametrize(
    "nodes, case",
    [
        (2, Case("data=2,pipe=2", zero=3, group_threshold=1500, schedule="zero-bubble")),
        (2, Case("pipe=2,context=2", zero=1, context_method="ulysses", recompute=BLOCK)),
        (4, Case("replicate=2,shard=2", group_threshold=3000)),
        (4, Case("context=2,model=2", zero=2, context_method="ring", **PARALLEL)),
    ],
    ids=str,
)
def test_on_several_nodes(nodes, case):
    """Ranks of different nodes share no memory."""

    def launch(program, ranks):
        return run(program, ranks, nodes=[f"node{rank * nodes // ranks}" for rank in range(ranks)])

    assert_as_one_device(case, launch)


def alone(program, ranks):
    """As one of the ranks of the MPI job there is."""
    return [program()]


@pytest.mark.mpi(ranks=4)
@pytest.mark.parametrize(
    "case",
    [
        Case("data=2,pipe=2", zero=3, schedule="zero-bubble", group_threshold=1500, micro_batches=5),
        Case("pipe=2,data=2", zero=2, schedule="interleaved", recompute=BLOCK),
        Case("context=2,model=2", zero=3, context_method="ring", balanced=True, recompute=ATTENTION, **PARALLEL),
        Case("replicate=2,shard=2", group_threshold=0, micro_batches=3),
    ],
    ids=str,
)
def test_four_processes(case):
    assert_as_one_device(case, alone)


@pytest.mark.mpi(ranks=8)
def test_eight_processes():
    case = Case("pipe=2,context=2,model=2", zero=3, context_method="ring", recompute=BLOCK, **PARALLEL)
    assert_as_one_device(case, alone)


# --- models of dense layers: rows and columns of weights, and depth

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

    return run(program, prod(axes.values()))


@pytest.mark.parametrize(
    "name, mesh, options",
    [
        ("mlp", "row=2,col=2,data=2", {"storage": Storage(3, 500)}),
        ("mlp", "pipe=3,row=2", {"schedule": named("zero-bubble")}),
        ("mlp", "shard=2,col=3", {}),
        ("two layers", "pipe=2,model=2", {"storage": Storage(1)}),
        ("two layers", "row=3,data=2", {"storage": Storage(2)}),
        ("deep", "pipe=3,data=2", {"storage": Storage(3, 500), "recompute": BLOCK, "schedule": named("interleaved")}),
        ("deep", "data=3", {"storage": Storage(3, 1000), "recompute": BLOCK}),
        ("deep", "replicate=2,pipe=2", {"stages": "cost", "schedule": named("gpipe")}),
    ],
)
def test_dense_models(name, mesh, options):
    assert_same(train_dense(name, Case(mesh).axes, **options), train_dense(name, {"data": 1})[0])
