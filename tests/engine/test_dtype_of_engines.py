"""An engine computes in the dtype of its job, whatever floats it is given; one without a job keeps what it is given."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

from spmd_engine import Mesh, batch_of, run_threads
from spmd_engine.arrays.backend import CPU
from spmd_engine.engine import AdamW, LayeredEngine, as_distributed, making_on
from spmd_engine.engine.distributed import check_dtype, make_engine
from spmd_engine.errors import UsageError
from spmd_engine.layers import Linear as LinearLayer
from spmd_engine.models import deep_mlp
from spmd_engine.training import Trainer
from support.linear_engine import Drawn, Linear

X = np.random.default_rng(1).standard_normal((6, 3))
Y = X[:, :2].copy()


class ByHand(Linear):
    def __init__(self):
        self.parameters = {"w": np.zeros((3, 2))}


class Outputs(list):
    write = list.append


def dtypes(engine):
    """Of all that a step, an update and an answer make of float64 samples."""
    optimizer, outputs = AdamW(), Outputs()
    trainer = Trainer(engine, optimizer, lambda step: batch_of(X, Y, engine, step=step), rate=lambda step: 0.1)
    trainer.step()
    engine.inference_loop([X], outputs)
    state = [array for kind in optimizer.state.values() for array in kind.values()]
    arrays = [*engine.parameters.values(), *engine.gradients.values(), *state, *outputs, engine.gather("w")]
    return {array.dtype.name for array in arrays}


@pytest.mark.parametrize("offered", [{}, {"dtype": np.dtype(np.float32)}, {"dtype": np.float64}], ids=str)
def test_an_engine_computes_in_the_dtype_that_its_job_gives_it(offered):
    with Mesh() as mesh:
        found = dtypes(make_engine(Drawn, mesh, **offered))
    assert found == {np.dtype(offered.get("dtype", np.float64)).name}


def test_an_engine_for_one_device_keeps_its_dtype_when_it_is_distributed():
    class Alone(Drawn):
        input_sharding = output_sharding = "b d"

        def backward(self, dy):
            return {"w": self.tape.pop().T @ dy}

    with Mesh() as mesh:
        assert dtypes(as_distributed(make_engine(Alone, mesh, dtype=np.float32), mesh)) == {"float32"}


def test_block_converts_floats_alone():
    given = [np.ones(2), np.ones(2, np.float16), np.ones(2, bfloat16), np.arange(2), np.ones(2, bool), np.ones(2) * 1j]
    with Mesh(), making_on(CPU, np.float32):
        engine = Drawn()
    assert [engine.block("other", x).dtype.name for x in given] == ["float32"] * 3 + ["int64", "bool", "complex128"]
    assert engine.block("w", np.ones((3, 2)), owned=True).dtype == np.float64  # state: its place has a dtype


def test_layers_compute_in_the_dtype_of_their_engine():
    outputs = Outputs()
    with Mesh() as mesh:
        engine = LayeredEngine(deep_mlp(2, 3), mesh)
        engine.step(batch_of(X, X, engine))
        assert engine.forward(X).dtype == np.float32
        engine.inference_loop([X], outputs)
    assert outputs[0].dtype == np.float32


def test_layers_that_a_job_s_code_distributes_are_of_the_job_s_dtype():
    def make(mesh):
        return as_distributed([LinearLayer(("d", 3), ("f", 2))], mesh)

    with Mesh() as mesh:
        assert make(mesh).dtype == np.float32
        assert make_engine(make, mesh, dtype=np.float64).dtype == np.float64


def test_a_job_refuses_floats_of_another_dtype_on_all_ranks():
    def program():
        with Mesh() as mesh:
            engine = make_engine(ByHand, mesh, dtype=np.float32)
            if mesh.rank == 0:
                engine.parameters = {"w": np.zeros((3, 2), np.float32)}
            with pytest.raises(UsageError, match="rank 1 of 2: mine.py:ByHand: w is float64, not float32: make param"):
                check_dtype("mine.py:ByHand", engine, np.float32)

    run_threads(program, 2)
