"""Dense layers on one device, against the formulas in plain NumPy; and what is refused."""

import numpy as np
import pytest

from spmd_engine.errors import NotationError, UsageError
from spmd_engine.layers import Linear, Skip
from support.dense import BATCH, ONE, OUTPUTS, Problem, assert_same, linear, on_mesh, problem_of, skip, tree
from support.numerics import assert_gradient, normals

# --- one device


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_one_device_computes_the_formulas(activation, bias):
    problem = problem_of(linear(activation=activation, bias=bias))
    x, dy, w = problem.x, problem.dy, problem.p["weights"]
    z = x @ w + (problem.p["bias"] if bias else 0.0)
    dz = dy * (z > 0) if activation else dy
    expected = {"y": np.maximum(z, 0) if activation else z, "dweights": x.T @ dz, "dx": dz @ w.T}
    (results,) = on_mesh(problem, ONE)
    assert_same(results, expected | ({"dbias": dz.sum(axis=0)} if bias else {}))


@pytest.mark.parametrize("layer", [linear(activation="gelu"), linear(), skip()], ids=["gelu", "relu", "skip"])
def test_backward_by_finite_differences(layer):
    problem = problem_of(layer)
    (results,) = on_mesh(problem, ONE)

    def loss(x=problem.x, **changed):
        (y,) = on_mesh(Problem(layer, x, problem.dy, problem.p | changed), ONE, lambda local: local.forward(False)[0])
        return (y * problem.dy).sum()

    assert_gradient(lambda x: loss(x=x), problem.x, results["dx"])
    for name, array in problem.p.items():
        assert abs(results[f"d{name}"]).max() > 1e-3
        assert_gradient(lambda w, name=name: loss(**{name: w}), array, results[f"d{name}"])


def test_what_is_skipped_is_added():
    problem = problem_of(skip())
    up, down = (tree(problem.p)[name] for name in ("up", "down"))
    alone = Problem(problem.layer.up, problem.x, normals(BATCH, OUTPUTS), up)
    (z,) = on_mesh(alone, ONE, lambda local: local.forward()[0])
    expected = problem.x + z @ down["weights"] + down["bias"]
    np.testing.assert_allclose(on_mesh(problem, ONE)[0]["y"], expected, atol=1e-13)


# --- what is refused


@pytest.mark.parametrize("letters", ["dd", "bd", "db", "sd", "ds", ("d1", "f"), ("", "f")], ids=str)
def test_letters_that_cannot_be_told_apart_are_refused(letters):
    with pytest.raises(UsageError, match="take two different letters"):
        Linear((letters[0], 3), (letters[1], 4))


def test_unknown_activations_are_refused():
    with pytest.raises(UsageError, match="unknown activation 'swish'; there are: gelu, .*, relu-squared, or None"):
        linear(activation="swish")


@pytest.mark.parametrize(
    "layers",
    [
        (Linear(("d", 3), ("f", 4)), Linear(("f", 4), ("d", 2))),
        (Linear(("d", 3), ("f", 4)), Linear(("g", 4), ("d", 3))),
        (Linear(("d", 3), ("f", 4), gather_output=True), Linear(("f", 4), ("d", 3))),
        (Linear(("d", 3), ("f", 4), slice_input=True), Linear(("f", 4), ("d", 3))),
    ],
    ids=["size", "letter", "gathered between", "sliced at the beginning"],
)
def test_layers_that_do_not_fit_are_not_skipped(layers):
    with pytest.raises(UsageError, match="Skip: output"):
        Skip(*layers)


@pytest.mark.parametrize("layer", [linear(), skip()], ids=["linear", "skip"])
def test_two_letters_on_one_axis_and_a_cut_sequence_are_refused(layer):
    with pytest.raises(NotationError, match="only diagonal blocks would be left"):
        on_mesh(problem_of(layer), ({"model": 1}, {"d": "model", "f": "model"}))
    with pytest.raises(NotationError, match='s is sharded over mesh axis "model" inside'):
        on_mesh(problem_of(layer), ({"model": 1}, {"s": "model"}))


def test_initial_deviations():
    def deviation(**options):
        return Linear(("d", 50), ("f", 4), **options).parameters["weights"].std

    assert deviation() == pytest.approx(50**-0.5)
    assert deviation(activation="relu") == pytest.approx((2 / 50) ** 0.5)
    assert deviation(std=0.3) == 0.3
