"""The pages of strategies/ compute what the single device computes, and send what their docstrings say."""

from functools import cache, partial

import numpy as np
import pytest

from spmd_engine import Mesh, run, world
from spmd_engine.engine import SGD, AdamW
from spmd_engine.engine.batch import batch_of
from spmd_engine.strategies import DataParallel, SingleDevice, TensorParallel
from spmd_engine.strategies.two_layers import initial_parameters
from spmd_engine.training import Trainer

D, F, B, STEPS = 6, 11, 9, 10
STRATEGIES = {SingleDevice: "data", DataParallel: "data", TensorParallel: "model"}
WORLDS = [1, 2, 3, 4, 8]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.__name__)


def data(step, dtype=np.float64):
    rng = np.random.default_rng(step)
    return rng.standard_normal((B, D)).astype(dtype), rng.standard_normal((B, D)).astype(dtype)


def build(strategy, mesh, dtype=np.float64):
    engine = strategy(D, F, mesh, dtype)
    engine.load_checkpoint(initial_parameters(D, F, dtype=dtype))
    return engine


def train(strategy, optimizer, micro_batches=1, dtype=np.float64):
    with Mesh(**{STRATEGIES[strategy]: world().size}) as mesh:
        engine = build(strategy, mesh, dtype)
        trainer = Trainer(
            engine,
            optimizer(),
            lambda step: batch_of(*data(step, dtype), engine, micro_batches, step),
            lambda step: 0.05,
            grad_clip=0.5,
        )
        losses = [report.loss for report in trainer.run(STEPS)]
        return losses, {name: engine.gather(name) for name in engine.parameters}




single = cache(lambda optimizer, micro_batches: run(partial(train, SingleDevice, optimizer, micro_batches), 1)[0])


@every_strategy
@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("optimizer", [AdamW, SGD])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_training_equals_the_single_device(strategy, ranks, optimizer, micro_batches):
    expected_losses, expected = single(optimizer, micro_batches)
    for losses, parameters in run(partial(train, strategy, optimizer, micro_batches), ranks):
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)
        for name, parameter in parameters.items():
            np.testing.assert_allclose(parameter, expected[name], atol=1e-10, err_msg=name)


@every_strategy
def test_the_input_gradient_is_right(strategy):
    x, dy = data(0)
    with Mesh(data=1) as mesh:
        reference = build(SingleDevice, mesh)
        reference.forward(x)
        reference.backward(dy)
        step = 1e-6 * np.random.default_rng(1).standard_normal(x.shape)
        change = np.vdot(dy, reference.forward(x + step) - reference.forward(x - step)) / 2
        np.testing.assert_allclose(np.vdot(reference.input_gradient, step), change, rtol=1e-7)

    def program():
        with Mesh(**{STRATEGIES[strategy]: 3}) as mesh:
            engine = build(strategy, mesh)
            part = engine.batch_span(B)
            engine.forward(x[part])
            engine.backward(dy[part])
            np.testing.assert_allclose(engine.input_gradient, reference.input_gradient[part], atol=1e-13)

    run(program, 3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_of_a_step(ranks):
    """DataParallel: 2 S (n-1) of all ranks together; TensorParallel: 4 b d (n-1) · itemsize."""

    def program(strategy):
        with Mesh(**{STRATEGIES[strategy]: ranks}) as mesh:
            engine = build(strategy, mesh)
            micro = batch_of(*data(0), engine).micro_batches[0]
            mesh.ledger.clear()
            engine.backward(engine.forward(micro.inputs))
            total = mesh.ledger.total("all_reduce")
            assert total.calls == mesh.ledger.total().calls == 2
            return total.sent

    parameters = 2 * D * F * 8
    assert sum(run(partial(program, DataParallel), ranks)) == 2 * parameters * (ranks - 1)
    assert sum(run(partial(program, TensorParallel), ranks)) == 4 * B * D * 8 * (ranks - 1)


@every_strategy
@pytest.mark.mpi(ranks=3)
def test_under_mpi(strategy):
    losses, parameters = train(strategy, AdamW)
    expected_losses, expected = single(AdamW, 1)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)
    for name, parameter in parameters.items():
        np.testing.assert_allclose(parameter, expected[name], atol=1e-10)
