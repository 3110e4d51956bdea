"""The pages of strategies/ compute what a single device computes."""

from functools import partial
from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.engine import SGD, AdamW
from spmd_engine.engine.batch import batch_of
from spmd_engine.errors import UsageError
from spmd_engine.strategies import (
    STRATEGIES,
    AttentionHeads,
    ChannelSplit,
    ExpertParallel,
    Pipeline,
    SingleDevice,
    VerticalCNN,
    default_axes,
    strategy_named,
)
from spmd_engine.training import Trainer
from support.numerics import assert_gradient
from support.pages import (
    CASES,
    HEADS,
    B,
    D,
    F,
    assert_trained_alike,
    build,
    case_id,
    data,
    in_time,
    one_rank,
    single,
    train,
    trained_alone,
)
from support.pairwise import in_turn


def ways_to_train():
    """Cases with one micro-batch, and with several; of those that are in time, each in one of the two ways in turn."""
    for number, (name, axes) in enumerate(case for case in CASES if not in_time(case[1])):
        for turn, way in enumerate([(AdamW, 1), (SGD, 3)]):
            yield pytest.param(name, axes, *way, marks=[pytest.mark.soak] if number % 2 != turn else [])
    for name, axes in CASES:
        for way in [(AdamW, 1), (SGD, 3)] if in_time(axes) else ():
            yield pytest.param(name, axes, *way, marks=in_time(axes))


@pytest.mark.parametrize(("name", "axes", "optimizer", "micro_batches"), list(ways_to_train()), ids=case_id)
def test_training_equals_the_single_device(name, axes, optimizer, micro_batches):
    """Losses, every gradient and the parameters."""
    for result in run_threads(lambda: train(name, axes, optimizer, micro_batches), prod(axes.values())):
        assert_trained_alike(result, trained_alone(name, optimizer, micro_batches))


data_of_two = partial(data, samples=2)


@in_turn(2, name=list(STRATEGIES))
def test_micro_batches_without_samples_change_nothing(name):
    """Two samples in three micro-batches: of one, no rank has any; of the others, many have none."""
    axes = dict(
        zip(STRATEGIES[name].axes or ("data",), (3,) if len(STRATEGIES[name].axes) < 2 else (2, 1, 1), strict=False)
    )
    for result in run_threads(lambda: train(name, axes, SGD, 3, steps=1, of=data_of_two), prod(axes.values())):
        assert_trained_alike(result, trained_alone(name, SGD, 3, steps=1, of=data_of_two))


def test_the_cases_are_those_of_every_world():
    for name in STRATEGIES:
        assert {prod(axes.values()) for each, axes in CASES if each == name} == {1, 2, 3, 4, 6, 8}


# --- the single ranks, by formulas of their own


def mlp(x, w):
    return np.maximum(x @ w["layer_0/weights"], 0) @ w["layer_1/weights"]


def stack(x, w):
    for w0, w1 in zip(w["layers/w0"], w["layers/w1"], strict=True):
        x = x + np.maximum(x @ w0, 0) @ w1
    return x


def attention(x, w):
    """Position by position, with a sum of exponentials written out."""
    q, k, v = (np.einsum("bsd,dhk->bshk", x, w[f"attention/{name}"]) for name in ("query", "key", "value"))
    y = np.empty_like(x)
    for s in range(x.shape[1]):
        scores = np.einsum("bhk,bthk->bth", q[:, s], k[:, : s + 1]) / np.sqrt(D // HEADS)
        weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        mixed = np.einsum("bth,bthk->bhk", weights, v[:, : s + 1])
        y[:, s] = np.einsum("bhk,hkd->bd", mixed, w["attention/output"])
    return y


def conv(x, w):
    """Output by output, of images with a border of zeros."""
    _, height, width, _ = x.shape
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows = [[np.einsum("bijc,ijcf->bf", x[:, h : h + 3, k : k + 3], w) for k in range(width)] for h in range(height)]
    return np.stack([np.stack(row, 1) for row in rows], 1)


def two_convolutions(x, w):
    return conv(np.maximum(conv(x, w["conv_0/weights"]), 0), w["conv_1/weights"])


def stack_of_convolutions(x, w):
    for w0, w1 in zip(w["layers/w0"], w["layers/w1"], strict=True):
        x = x + conv(np.maximum(conv(x, w0), 0), w1)
    return x


def experts(x, w):
    """Sample by sample."""
    y = np.empty_like(x)
    for b, sample in enumerate(x):
        p = np.exp(sample @ w["router"]) / np.exp(sample @ w["router"]).sum()
        e = p.argmax()
        y[b] = p[e] * np.maximum(sample @ w["experts/w0"][e], 0) @ w["experts/w1"][e]
    return y


FORMULAS = [
    *((SingleDevice, mlp), (Pipeline, stack), (AttentionHeads, attention)),
    (ExpertParallel, experts),
    *((ChannelSplit, two_convolutions), (VerticalCNN, stack_of_convolutions)),
]


@pytest.mark.parametrize(("strategy", "formula"), FORMULAS)
def test_the_single_ranks_are_right(strategy, formula):
    """Forward by a formula of the test's own, backward by finite differences of it."""
    x, dy = data(strategy, 0)
    with one_rank(strategy) as mesh:
        engine = build(strategy, mesh)
        weights = {name: engine.gather(name) for name in engine.names}
        np.testing.assert_allclose(engine.forward(x), formula(x, weights), atol=1e-13)
        gradients = engine.backward(dy)
    assert_gradient(lambda x: np.vdot(dy, formula(x, weights)), x, engine.input_gradient, step=1e-6, tolerance=1e-7)
    for name, weight in weights.items():
        value = lambda w, name=name: np.vdot(dy, formula(x, {**weights, name: w}))
        assert_gradient(value, weight, gradients[name], step=1e-6, tolerance=1e-7)


@in_turn(2, name=list(STRATEGIES), ranks=[3, 4])
def test_the_input_gradient_is_right(name, ranks):
    strategy = STRATEGIES[name]
    plain, samples_of = single(strategy)
    x, dy = data(strategy, 0)
    with one_rank(plain) as mesh:
        reference = build(plain, mesh)
        expected = reference.forward(samples_of(x)).reshape(x.shape)
        reference.backward(samples_of(dy))

    def program():
        with Mesh(**default_axes(strategy, ranks)) as mesh:
            engine = build(strategy, mesh)
            part = engine.batch_span(B)
            inputs, gradient = engine.cut_rows(x[part], dy[part])
            y = engine.forward(inputs)
            assert (y is None) == (mesh.coordinates.get("pipe", 0) < mesh.axes.get("pipe", 1) - 1)
            if y is not None:
                np.testing.assert_allclose(engine.join_outputs(y), expected, atol=1e-13)
            engine.backward(gradient if y is not None else None)
            if mesh.coordinates.get("pipe", 0):
                assert engine.input_gradient is None
            else:
                # inputs' gradients are cut as the inputs are, and those as the outputs
                whole = engine.join_outputs(engine.input_gradient).reshape(-1, D)
                np.testing.assert_allclose(whole, reference.input_gradient.reshape(-1, D), atol=1e-13)

    run_threads(program, ranks)


# --- end to end


def epoch(strategy, step, dtype):
    """Three batches, again and again, of a mapping that can be learnt."""
    x, noise = data(strategy, step % 3, dtype, samples=12)
    return x, np.roll(x, 1, axis=-1) + noise / 10


#: Pages of two kinds; the others compute in float32 what these do.
IN_FLOAT32 = {"fully-sharded", "ring-attention"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_FLOAT32 else pytest.mark.soak) for name in STRATEGIES]
)
def test_a_page_learns_in_float32_as_one_device_does(name):
    how = {"steps": 30, "dtype": np.float32, "of": epoch, "rate": 0.2}
    expected = trained_alone(name, SGD, 1, **how)
    for result in run_threads(partial(train, name, default_axes(STRATEGIES[name], 4), SGD, 1, **how), 4):
        assert_trained_alike(result, expected, tolerance=1e-5)
    assert expected[0][-1] < 0.8 * expected[0][2]  # of the same batch


@in_turn(3, name=list(STRATEGIES))
def test_a_page_serves_and_evaluates_as_one_device_does(name):
    strategy = STRATEGIES[name]
    plain, samples_of = single(strategy)
    (x, y), (other, _) = data(strategy, 0), data(strategy, 1, samples=4)
    with one_rank(plain) as mesh:
        reference = build(plain, mesh)
        loss = reference.evaluate(batch_of(samples_of(x), samples_of(y), reference, 3))
        outputs = [reference.forward(samples_of(each)).reshape(each.shape) for each in (x, other)]

    class Sink(list):
        write = list.append

    def program():
        with Mesh(**default_axes(strategy, 3)) as mesh:
            engine, sink = build(strategy, mesh), Sink()
            engine.inference_loop([x, other], sink)
            assert len(engine.tape) == 0
            return engine.evaluate(batch_of(x, y, engine, 3)), sink

    results = run_threads(program, 3)
    np.testing.assert_allclose([each for each, _ in results], loss, rtol=1e-13)
    for served, expected in zip(results[0][1], outputs, strict=True):
        np.testing.assert_allclose(served, expected, atol=1e-13)


@in_turn(4, name=list(STRATEGIES))
@pytest.mark.mpi(ranks=3)
def test_under_mpi(name):
    result = train(name, default_axes(STRATEGIES[name], world().size), AdamW, 3)
    assert_trained_alike(result, trained_alone(name, AdamW, 3))


@pytest.mark.parametrize("name", ["pipeline", "ring-attention"])
@pytest.mark.mpi(ranks=3)
def test_neighbours_that_send_to_each_other_do_not_wait_for_each_other(name):
    """With messages of megabytes, which MPI does not take before somebody receives them."""
    strategy = STRATEGIES[name]
    shape = {"b d": (8192, 64), "b s d": (4, 512, 256)}[strategy.sample]  # few scores of attention
    x = np.random.default_rng(0).standard_normal(shape)
    with Mesh(**default_axes(strategy, world().size)) as mesh:
        engine = strategy(shape[-1], 8, mesh)
        engine.initialize()
        trainer = Trainer(engine, SGD(), lambda step: batch_of(x, x, engine, 4, step), lambda step: 0.1)
        first, second = trainer.run(2)
        assert second.loss < first.loss


# --- what they are called and what they refuse


def test_default_meshes_fit_the_ranks_and_are_near_square():
    for name, strategy in STRATEGIES.items():
        assert strategy_named(name) is strategy
        for ranks in range(1, 17):
            axes = default_axes(strategy, ranks)
            sizes = list(axes.values())
            assert tuple(axes) == strategy.axes and sizes == sorted(sizes)
            assert prod(sizes) == (ranks if axes else 1)
    assert default_axes(STRATEGIES["replicate-shard"], 8) == {"replicate": 2, "shard": 4}
    assert default_axes(STRATEGIES["two-dimensional"], 16) == {"row": 4, "col": 4}
    assert default_axes(STRATEGIES["hybrid"], 8) == {"pipe": 2, "data": 2, "model": 2}
    with pytest.raises(UsageError, match="a mesh of 0 ranks"):
        default_axes(STRATEGIES["hybrid"], 0)
    with pytest.raises(UsageError, match=r"unknown strategy 'zero'; there are: single-device, data-parallel"):
        strategy_named("zero")


@in_turn(4, 1, name=list(STRATEGIES))
def test_starting_values_are_functions_of_the_seed_alone(name):
    strategy = STRATEGIES[name]

    def program():
        with Mesh(**default_axes(strategy, world().size)) as mesh:
            engine = build(strategy, mesh)
            return {each: engine.gather(each) for each in engine.names}

    (alone,), (together, *_) = run_threads(program, 1), run_threads(program, 3)
    for each, value in alone.items():
        assert np.array_equal(value, together[each])
        inputs = value.shape[-2] * (9 if "conv" in each or value.ndim == 5 else 1)
        if each.startswith("attention"):
            inputs = D
        assert 0.7 < value.std() * inputs**0.5 < 1.3


def test_weights_and_sizes_that_do_not_fit():
    engine = SingleDevice(D, F)
    with pytest.raises(UsageError, match=r"no 'layer_0/weights'; there are: w"):
        engine.load_checkpoint({"w": np.ones((D, F))})
    with pytest.raises(UsageError, match=r"layer_0/weights: the checkpoint has shape \(7, 6\), the model \(6, 7\)"):
        engine.load_checkpoint({"layer_0/weights": np.ones((F, D)), "layer_1/weights": np.ones((F, D))})
    with pytest.raises(UsageError, match="4 heads must divide model_dim, which is 6"):
        AttentionHeads(D, 4)
