"""What is refused of a subclass of ShardedEngine."""

import numpy as np
import pytest

from spmd_engine import Mesh, run
from spmd_engine.engine import SGD
from spmd_engine.engine.batch import batch_of
from spmd_engine.errors import UsageError
from strangers import Bare


class Careless(Bare):
    """A stranger's mistakes, one at a time."""

    wrong: dict = {}

    @property
    def parameters(self):
        return {"w": self.w}

    def backward(self, grads):
        return self.wrong or super().backward(grads)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"w": np.ones((2, 3))}, r"w: gradient of shape \(2, 3\), parameter of \(3, 2\)"),
        ({"v": np.ones((3, 2))}, "differ in names: v, w"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(wrong, message):
    engine = Careless()
    engine.wrong = wrong
    engine.step(batch_of(np.ones((4, 3)), np.ones((4, 2)), engine))
    with pytest.raises(UsageError, match=message):
        SGD().update(engine, engine.gradients, step=1, rate=0.1)


def test_a_batch_cut_in_inputs_alone_is_refused():
    engine = Careless()
    engine.input_sharding = "b/data d"
    with pytest.raises(UsageError, match="say by output_sharding"):
        engine.step(batch_of(np.ones((4, 3)), np.ones((4, 2)), engine))


def test_parameters_must_be_contiguous():
    engine = Careless()
    engine.w = np.zeros((3, 2), order="F")
    engine.step(batch_of(np.ones((4, 3)), np.ones((4, 2)), engine))
    with pytest.raises(UsageError, match="not contiguous"):
        SGD().update(engine, engine.gradients, step=1, rate=0.1)


@pytest.mark.parametrize(
    ("shardings", "cut"), [({}, "whole"), ({"w": "d f/model"}, 'cut as "d f/model"')], ids=["whole", "cut"]
)
def test_a_forgotten_all_reduce_is_found_in_the_first_step(shardings, cut):
    class Forgetful(Careless):
        input_sharding = output_sharding = "b/data d"

        def backward(self, grads):
            return {"w": self.tape.pop().T @ grads}

    Forgetful.shardings = shardings
    x = np.random.default_rng(0).standard_normal((4, 3))

    def program():
        with Mesh(data=2, model=2) as mesh:
            engine = Forgetful()
            engine.mesh = mesh
            engine.step(batch_of(x, x[:, :2], engine))

    said = f"the gradient of 'w' differs between ranks of data, along which it is {cut}: is an all_reduce over data mi"
    with pytest.raises(UsageError, match=said):
        run(program, 4)
