"""Batches and parameters cut by weights: ``"b/data:3:1"`` gives a fast rank three times as much as a slow one."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.checkpoints import Checkpoint, save_checkpoint
from spmd_engine.engine import SGD, ShardedEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.errors import UsageError
from support.numerics import normals

X, Y, W = normals(9, 5), normals(9, 3, seed=1), normals(5, 3, seed=2)


class Weighted(ShardedEngine):
    """y[b f] = x[b d] w[d f], the batch cut 3:1 and w's rows stored 1:4: gathered to be used, its gradient cut."""

    input_sharding = output_sharding = "b/data:3:1 d"
    shardings = {"w": "d/data:1:4 f"}

    def load_checkpoint(self, params):
        self.parameters = {"w": self.block("w", params["w"]).copy()}

    def forward(self, x):
        self.tape.push(x)
        return x @ self.sharding("w").gather(self.parameters["w"], self.mesh)

    def backward(self, dy):
        dw = self.all_reduce(self.tape.pop().T @ dy, over="data")
        return {"w": dw[self.index("w")]}


class Outputs(list):
    write = list.append


def trained(micro_batches):
    """Losses, the parameter, its gradient, and what the engine answers; and how many rows each rank had."""

    def program():
        with Mesh(data=2) as mesh:
            engine = Weighted()
            engine.mesh = mesh
            engine.load_checkpoint({"w": W})
            batch = batch_of(X, Y, engine, micro_batches)
            losses = []
            for step in (1, 2):
                losses.append(engine.step(batch))
                SGD().update(engine, engine.gradients, step=step, rate=0.5)
            answers = Outputs()
            engine.inference_loop([X[:6], X[:1]], answers)
            gradient = engine.gather_owned("w", engine.gradients)
            return losses, engine.gather("w"), gradient, answers, [len(m.inputs) for m in batch.micro_batches]

    return run_threads(program, 2)


@pytest.mark.parametrize("micro_batches, rows", [(1, [[7], [2]]), (2, [[4, 3], [1, 1]])])
def test_a_weighted_batch_trains_as_an_even_one(micro_batches, rows):
    w, losses = W.copy(), []
    for _ in range(2):
        error = X @ w - Y
        losses.append((error**2).mean())
        gradient = X.T @ (2 * error / error.size)
        w = w - 0.5 * gradient
    results = trained(micro_batches)
    assert [result[-1] for result in results] == rows
    for found, parameter, grad, _, _ in results:
        np.testing.assert_allclose(found, losses, rtol=1e-12)
        np.testing.assert_allclose(parameter, w, rtol=1e-12)
        np.testing.assert_allclose(grad, gradient, rtol=1e-10)
    for answer, x in zip(results[0][3], (X[:6], X[:1]), strict=True):
        np.testing.assert_allclose(answer, x @ w, rtol=1e-12)


def test_a_checkpoint_is_whole_and_can_be_loaded_by_weights(tmp_path):
    def program():
        with Mesh(data=2) as mesh:
            engine = Weighted()
            engine.mesh = mesh
            engine.load_checkpoint({"w": W})
            save_checkpoint(tmp_path, engine)
            engine.load_checkpoint(Checkpoint(tmp_path))
            assert engine.parameters["w"].shape == (4 * mesh.rank or 1, 3)
            return engine.gather("w")

    for whole in run_threads(program, 2):
        np.testing.assert_array_equal(whole, W)


def test_inputs_and_targets_are_cut_alike():
    class Crooked(Weighted):
        output_sharding = "b/data d"

    def program():
        with Mesh(data=2) as mesh:
            engine = Crooked()
            engine.mesh = mesh
            engine.load_checkpoint({"w": W})
            with pytest.raises(UsageError, match='inputs are "b/data:3:1 d", targets "b/data d"'):
                engine.step(batch_of(X, Y, engine))

    run_threads(program, 2)
