"""Pages of strategies/ and engines of one's own in 16-bit floats: masters, loss scaling, checkpoints, and bounds."""

from functools import cache, partial
from math import prod

import numpy as np
import pytest
from ml_dtypes import bfloat16

from spmd_engine import Mesh, batch_of, run_threads
from spmd_engine.arrays.precision import emulated
from spmd_engine.checkpoints import load_checkpoint, save_checkpoint
from spmd_engine.engine import SGD, AdamW, as_distributed
from spmd_engine.engine.distributed import check_dtype, make_engine
from spmd_engine.engine.optimizers import MASTER
from spmd_engine.errors import UsageError
from spmd_engine.strategies import STRATEGIES
from spmd_engine.training import Trainer
from support import pages
from support.linear_engine import Linear
from support.pairwise import in_turn

SAME_ROUNDINGS = {"single-device", "pipeline", "vertical-cnn"}  # what they sum is on one rank


@cache
def trained(name, ranks, dtype):
    axes = pages.meshes(STRATEGIES[name])[ranks] if ranks is not None else {}
    run = partial(pages.train, name, axes, SGD, 2, dtype=dtype, alone=ranks is None)
    with emulated():
        return run_threads(run, prod(axes.values()))[0]


@in_turn(3, name=list(STRATEGIES))
def test_a_page_is_as_near_to_one_device_as_that_to_exact_values(name):
    """On 4 ranks, each rounds its part of a sum before the sum: at most twice as many roundings as on one."""
    half = np.dtype(bfloat16)
    found, alone, exact = trained(name, 3, half), trained(name, None, half), trained(name, None, np.float64)
    if name in SAME_ROUNDINGS:
        pages.assert_trained_alike(found, alone, tolerance=1e-12)
    for x, right, true in zip(found, alone, exact, strict=True):
        x, right, true = ([*each.values()] if isinstance(each, dict) else [np.array(each)] for each in (x, right, true))
        x, right, true = ([np.asarray(one, np.float64) for one in each] for each in (x, right, true))
        distance = max(np.abs(a - b).max() for a, b in zip(right, true, strict=True))
        assert distance > 0
        assert max(np.abs(a - b).max() for a, b in zip(x, right, strict=True)) <= 3 * distance


def linear(dtype, rate=1e-6, w=1.0, mesh=None):
    """A trainer of an engine that knows of no dtype, whose updates are below the roundings of its parameter."""
    engine = make_engine(Linear, mesh or Mesh(), dtype=dtype)
    engine.load_checkpoint({"w": np.full((3, 2), w, np.float32)})
    x, y = np.random.default_rng(0).standard_normal((2, 8, 3))
    return Trainer(engine, AdamW(), lambda step: batch_of(x, y[:, :2], engine, 2, step), lambda step: rate)


def test_small_updates_of_masters_add_up():
    def program():
        trainer = linear(bfloat16, rate=1e-4)
        reports = list(trainer.run(100))
        w, masters = trainer.engine.parameters["w"], trainer.optimizer.state[MASTER]["w"]
        np.testing.assert_array_equal(w, masters.astype(bfloat16))
        return reports[-1].loss, w.dtype, masters, trainer.optimizer.state["mean"]["w"].dtype

    (loss, dtype, masters, of_state), _ = run_threads(program, 2)
    assert (dtype, masters.dtype, of_state) == (bfloat16, np.float32, np.float32)
    assert np.all(np.abs(masters - 1) > 5e-3)  # updates of 1e-4: half of the distance of bfloat16 at 1 is 2e-3
    expected = run_threads(lambda: list(linear(np.float32, rate=1e-4).run(100))[-1].loss, 2)[0]
    assert loss == pytest.approx(expected, rel=0.02)


def test_float16_scales_the_loss_and_takes_it_back():
    """The first step's gradients overflow; then the scale is lower."""

    def program(dtype):
        trainer = linear(dtype, rate=1e-9)
        reports = list(trainer.run(3))
        return [report.loss_scale for report in reports], [report.skipped for report in reports], reports[-1]

    (scales, skipped, report), (_, _, expected) = (
        run_threads(program, 2, args=[dtype])[0] for dtype in (np.float16, np.float32)
    )
    assert scales == [2.0**16, 2.0**15, 2.0**15]
    assert skipped == ["gradients overflow float16 at loss scale 65536", None, None]
    assert (report.loss, report.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=0.01)


@pytest.mark.parametrize("before, after", [(bfloat16, bfloat16), (np.float32, bfloat16), (bfloat16, np.float32)])
def test_checkpoints_hold_masters(before, after, tmp_path):
    def save():
        trainer = linear(before, rate=1e-4)
        list(trainer.run(3))
        save_checkpoint(tmp_path, trainer.engine, trainer.optimizer, step=3)
        return trainer.optimizer.state.get(MASTER, trainer.engine.parameters)["w"].copy()

    def load():
        trainer = linear(after, w=0.0)
        load_checkpoint(tmp_path, trainer.engine, trainer.optimizer)
        return trainer.engine.parameters["w"], trainer.optimizer.state.get(MASTER, trainer.engine.parameters)["w"]

    saved, (w, master) = run_threads(save, 2)[0], run_threads(load, 3)[0]
    assert w.dtype == after and not np.array_equal(saved, saved.astype(bfloat16))
    np.testing.assert_array_equal(master, saved)
    np.testing.assert_array_equal(w, saved.astype(after))


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_distributed_engine_has_masters(zero):
    def program(dtype):
        alone = make_engine(Alone, Mesh(), dtype=dtype)
        alone.load_checkpoint({"w": np.ones((3, 2))})
        engine = as_distributed(alone, zero=zero)
        x, y = np.random.default_rng(0).standard_normal((2, 8, 3)).astype(dtype)
        batches = lambda step: batch_of(x, y[:, :2], engine, 2, step)
        list(Trainer(engine, AdamW(), batches, lambda step: 1e-4).run(60))
        return np.asarray(alone.parameters["w"], np.float64), engine.gather("w")

    (w, master), _ = run_threads(program, 2, args=[bfloat16])
    np.testing.assert_array_equal(w, master.astype(bfloat16).astype(np.float64))
    np.testing.assert_allclose(master, run_threads(program, 2, args=[np.float32])[0][1], atol=2e-3)
    assert np.all(np.abs(master - 1) > 3e-3)


class Alone(Linear):
    input_sharding = output_sharding = "b d"

    def backward(self, dy):
        return {"w": self.tape.pop().T @ dy}


def test_an_engine_that_makes_other_arrays_is_refused():
    class Fixed(Linear):
        def __init__(self):
            self.parameters = {"w": np.zeros((3, 2), np.float32)}

    with pytest.raises(UsageError, match="Fixed: w is float32, not bfloat16: make parameters by self.block"):
        run_threads(lambda: check_dtype("Fixed", make_engine(Fixed, Mesh(), dtype=bfloat16), bfloat16), 1)
