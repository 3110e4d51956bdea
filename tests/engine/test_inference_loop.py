"""Serving with a subclass of ShardedEngine: no tape, whole arrays, the end of a stream, and long waits for it."""

import time
from itertools import count

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.comm import pending
from spmd_engine.errors import UsageError
from spmd_engine.runtime.activity import PATIENCE
from spmd_engine.runtime.hang_report import last_begun
from spmd_engine.strategies import DataParallel, SingleDevice, TensorParallel
from spmd_engine.strategies.two_layers import initial_parameters
from support.strangers import Bare, D, F


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


# --- waits that last longer than a timeout


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_overdue(records):
    """Let rank 1, once it waits for a call that rank 0 has not begun, have waited so long that it is to be reported."""

    def waits_for_rank_0():
        wait = records[1].state().wait
        return wait is not None and last_begun(records[0].state(), wait.call) < wait.call.number

    wait_until(waits_for_rank_0)
    records[1]._words[PATIENCE] = 1
    assert records[1].is_overdue


def serve(inputs, sink=lambda mesh: Sink()):
    def program():
        with Mesh(data=2) as mesh:
            engine = DataParallel(D, F, mesh, np.float64)
            engine.load_checkpoint(initial_parameters(D, F, dtype=np.float64))
            engine.inference_loop(inputs(mesh), sink(mesh))

    run_threads(program, 2)


def test_a_wait_for_the_next_input_is_no_hang_and_has_no_timeout(monkeypatch):
    late, looks = [0.0], count()

    def clock():
        next(looks)
        return time.perf_counter() + late[0]

    monkeypatch.setattr(pending, "perf_counter", clock)

    def inputs(mesh):
        yield np.ones((2, D))
        make_overdue(mesh.activity.records)
        assert mesh.activity.explain() == ""
        late[0] = 2 * pending.TIMEOUT
        before = next(looks)
        wait_until(lambda: next(looks) > before + 100)
        yield np.ones((2, D))

    serve(inputs)


def test_a_rank_0_that_stops_within_a_request_is_a_hang():
    seen = []

    class Stops:
        def __init__(self, mesh):
            self.mesh = mesh

        def write(self, array):
            make_overdue(self.mesh.activity.records)
            seen.append(self.mesh.activity.explain())

    serve(lambda mesh: [np.ones((2, D))], Stops)
    assert seen[0].startswith("rank 0 "), seen
