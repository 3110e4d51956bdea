"""The pages of strategies/ and the layered engine are two implementations of the same; so are any two pages."""

from functools import partial
from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import load_checkpoint, save_checkpoint
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.layers import Attention, Linear, Skip
from spmd_engine.losses import mean_squared_error
from spmd_engine.models.mlp import two_layers
from spmd_engine.models.model import Model
from spmd_engine.strategies import STRATEGIES, AttentionHeads, Pipeline, default_axes
from spmd_engine.training import Trainer
from support.pages import HEADS, LAYERS, D, F, S, build, case_id, data, one_rank, single
from support.pairwise import in_turn

STEPS = 3  # the loss of the last depends on the state with which the second one is made


def trainer_of(engine, strategy, first_step=0):
    """Two micro-batches a step of the strategy's data; to an engine of x[b d], positions of x[b s d] are samples."""

    def batch(step):
        inputs, targets = data(strategy, step)
        if getattr(engine, "sample", "b d") == "b d":
            inputs, targets = inputs.reshape(-1, D), targets.reshape(-1, D)
        return batch_of(inputs, targets, engine, 2, step)

    return Trainer(engine, AdamW(), batch, lambda step: 0.05, grad_clip=0.5, first_step=first_step)


# --- pages among themselves

PAIRS = [
    ("data-parallel", "tensor-parallel"),
    ("tensor-parallel", "sharded-optimizer"),
    ("sharded-optimizer", "fully-sharded"),
    ("fully-sharded", "two-dimensional"),
    ("two-dimensional", "sharded-gradients"),
    ("sharded-gradients", "replicate-shard"),
    ("replicate-shard", "column-parallel"),
    ("column-parallel", "single-device"),
    ("single-device", "sequence-parallel"),
    ("sequence-parallel", "data-parallel"),
    ("attention-heads", "ring-attention"),
    ("ring-attention", "attention-heads"),
    ("expert-parallel", "expert-parallel"),
    ("pipeline", "hybrid"),
    ("hybrid", "pipeline"),
    ("channel-split", "spatial"),
    ("spatial", "hybrid-cnn"),
    ("hybrid-cnn", "channel-split"),
    ("vertical-cnn", "vertical-cnn"),
]


def test_every_strategy_saves_and_loads():
    assert [sorted(column) for column in zip(*PAIRS, strict=True)] == [sorted(STRATEGIES)] * 2


@in_turn(3, **{"saving, loading": PAIRS})
def test_a_checkpoint_of_one_goes_on_as_another(saving, loading, tmp_path):
    """Parameters and optimizer state, on another number of ranks; the steps are those of one that never stopped."""
    saving, loading = STRATEGIES[saving], STRATEGIES[loading]
    samples = max(saving, loading, key=lambda strategy: len(strategy.sample))
    plain, _ = single(saving)
    with one_rank(plain) as mesh:
        expected = [report.loss for report in trainer_of(build(plain, mesh), samples).run(STEPS)]

    def program(strategy, ranks, first, last):
        with Mesh(**(default_axes(strategy, ranks) or {"data": ranks})) as mesh:
            engine = build(strategy, mesh)
            trainer = trainer_of(engine, samples, first)
            if first:
                for parameter in engine.parameters.values():
                    parameter[...] = np.nan
                assert load_checkpoint(tmp_path, engine, trainer.optimizer) == {"step": first}
            losses = [report.loss for report in trainer.run(last)]
            save_checkpoint(tmp_path, engine, trainer.optimizer, step=last)
            return losses

    losses = (
        run_threads(partial(program, saving, 4, 0, 1), 4)[0] + run_threads(partial(program, loading, 3, 1, STEPS), 3)[0]
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-10)


# --- pages and layers


@pytest.mark.parametrize(
    ("axes", "storage", "name"),
    [
        ({"data": 3}, ZeroConfig(), "data-parallel"),
        ({"data": 3}, ZeroConfig(zero=1), "sharded-optimizer"),
        ({"data": 3}, ZeroConfig(zero=2), "sharded-gradients"),
        ({"shard": 3}, ZeroConfig(), "fully-sharded"),
        ({"replicate": 2, "shard": 2}, ZeroConfig(), "replicate-shard"),
        ({"model": 4}, ZeroConfig(), "tensor-parallel"),
        ({"row": 2, "col": 2}, ZeroConfig(), "two-dimensional"),
    ],
)
def test_the_layered_engine_trains_as_the_page_does(axes, storage, name):
    strategy = STRATEGIES[name]

    its_axes = dict(zip(strategy.axes, axes.values(), strict=True))

    def program():
        with Mesh(**axes) as mesh, Mesh(**its_axes) as its_mesh:
            page = build(strategy, its_mesh)
            engine = LayeredEngine(two_layers(D, F), mesh, dtype=np.float64, storage=storage)
            engine.load_checkpoint({each: page.gather(each) for each in page.names})
            losses = [[report.loss for report in trainer_of(each, strategy).run(STEPS)] for each in (page, engine)]
            np.testing.assert_allclose(*losses, rtol=1e-12)
            for each in page.names:
                np.testing.assert_allclose(engine.gather(each), page.gather(each), atol=1e-12)

    run_threads(program, prod(axes.values()))


@pytest.mark.parametrize("axes", [{"data": 1}, {"model": 2}, {"context": 3}], ids=case_id)
def test_attention_is_that_of_the_layers(axes):
    """One forward and backward; the layer's biases are 0 and stay out of it."""
    layers = (("attention", Attention(D, HEADS)),)
    model = Model("attention", layers, "b s d", "b s d", "b s d", mean_squared_error, context=S)
    x, dy = data(AttentionHeads, 0)
    with one_rank(AttentionHeads) as mesh:
        page = build(AttentionHeads, mesh)
        expected, gradients = page.forward(x), page.backward(dy)
        biases = {name: np.zeros(shape) for name, (_, shape) in model.parameters() if "bias" in name}
        weights = {**page.parameters, **biases}

    def program():
        with Mesh(**axes) as mesh:
            engine = LayeredEngine(model, mesh, dtype=np.float64)
            engine.load_checkpoint(weights)
            inputs, gradient = engine.cut_rows(x, dy)
            np.testing.assert_allclose(engine.join_outputs(engine.forward(inputs)), expected, atol=1e-13)
            found = engine.backward(gradient)
            for name, each in gradients.items():
                np.testing.assert_allclose(found[name], each[engine.owned_index(name)], atol=1e-13)

    run_threads(program, prod(axes.values()))


@pytest.mark.parametrize("axes", [{"pipe": 3}, {"pipe": 2, "data": 2, "model": 2}], ids=case_id)
def test_the_layered_engine_s_pipeline_trains_as_the_page_does(axes):
    def pair():
        up, down = Linear(("d", D), ("f", F), activation="relu", bias=False), Linear(("f", F), ("d", D), bias=False)
        return Skip(up, down)

    layers = tuple((f"layer_{number}", pair()) for number in range(LAYERS))
    model = Model("stack", layers, "b d", "b d", "b d", mean_squared_error)
    with one_rank(Pipeline) as mesh:
        page = build(Pipeline, mesh)
        names = {"layers/w0": "up", "layers/w1": "down"}
        weights = {
            f"layer_{number}/{names[name]}/weights": each.copy()
            for name, stacked in page.parameters.items()
            for number, each in enumerate(stacked)
        }
        expected = [report.loss for report in trainer_of(page, Pipeline).run(STEPS)]

    def program():
        with Mesh(**axes) as mesh:
            engine = LayeredEngine(model, mesh, dtype=np.float64)
            engine.load_checkpoint(weights)
            losses = [report.loss for report in trainer_of(engine, Pipeline).run(STEPS)]
            np.testing.assert_allclose(losses, expected, rtol=1e-12)

    run_threads(program, prod(axes.values()))
