"""Serving with a subclass of ShardedEngine: no tape, whole arrays, and the end of a stream."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.errors import UsageError
from spmd_engine.strategies import DataParallel, SingleDevice, TensorParallel
from spmd_engine.strategies.two_layers import initial_parameters
from strangers import Bare, D, F


def test_inference_mode_keeps_no_tape():
    engine = SingleDevice(D, F)
    with engine.inference():
        for _ in range(3):
            engine.forward(np.ones((2, D), np.float32))
        assert not engine.is_training
    assert engine.is_training and len(engine.tape) == 0
    with pytest.raises(UsageError, match="backward without a forward"):
        engine.backward(np.ones((2, D), np.float32))


class Sink:
    def __init__(self):
        self.arrays = []

    def write(self, array):
        self.arrays.append(array)


PAGES = [(SingleDevice, "data"), (DataParallel, "data"), (TensorParallel, "model")]


@pytest.mark.parametrize(("strategy", "axis"), PAGES)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_inference_loop_serves_whole_arrays(strategy, axis, ranks):
    inputs = [np.random.default_rng(n).standard_normal((n, D)) for n in (5, 1, 8)]
    whole = initial_parameters(D, F, dtype=np.float64)
    w0, w1 = whole.values()

    def program():
        with Mesh(**{axis: ranks}) as mesh:
            engine = strategy(D, F, mesh, np.float64)
            engine.load_checkpoint(whole)
            sink = Sink()
            engine.inference_loop(iter(inputs) if mesh.rank == 0 else None, sink if mesh.rank == 0 else None)
            assert len(engine.tape) == 0
            return sink.arrays

    outputs = run_threads(program, ranks)
    assert [len(arrays) for arrays in outputs] == [3] + [0] * (ranks - 1)
    for x, y in zip(inputs, outputs[0], strict=True):
        np.testing.assert_allclose(y, np.maximum(x @ w0, 0) @ w1, atol=1e-12)


def test_an_input_stream_that_fails_ends_the_loop_on_every_rank():
    def broken():
        yield np.ones((2, D))
        raise OSError("the disk is gone")

    def program():
        engine = DataParallel(D, F, dtype=np.float64)
        engine.inference_loop(broken(), Sink())

    with pytest.raises(OSError, match="the disk is gone"):
        run_threads(program, 3)


class LastRankOnly(Bare):
    """Its output is on the last rank alone, as in a pipeline."""

    def forward(self, x):
        y = super().forward(x)
        return y if self.device_id == self.num_devices - 1 else None


def test_an_output_that_another_rank_has_reaches_the_stream():
    def program():
        engine, sink = LastRankOnly(), Sink()
        engine.load_checkpoint({"w": np.ones((3, 2))})
        engine.inference_loop([np.ones((1, 3)), np.zeros((1, 3))], sink)
        return [a.tolist() for a in sink.arrays]

    assert run_threads(program, 3)[0] == [[[3.0, 3.0]], [[0.0, 0.0]]]
