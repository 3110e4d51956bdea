"""Dropout: masks that are the same on every mesh, and none outside training."""

import pickle
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.layers.containers import Dropout
from spmd_engine.sharding import Layout, Shards
from support.layer_harness import BATCH, LENGTH, MESHES, ONE, every_layer, problem_of, single, solve, where_and_when
from support.numerics import frozen, normals


def masks(axes, rate=0.5, sequence_parallel=False, length=LENGTH, label="layer", x=None, **when):
    """Dropout of ones[b s d] on a mesh, gathered."""
    x = np.ones((BATCH, length, 50)) if x is None else x

    def rank():
        mesh = Mesh(**axes)
        layout = Layout.for_mesh(mesh, sequence_parallel=sequence_parallel)
        sh, spec = Shards(mesh, layout, label), layout.spec("b s d", "residual")
        ctx = replace(where_and_when(sh, BATCH, length), **when)
        y, mask = Dropout(rate).forward(sh, {}, frozen(x[spec.block(x.shape, mesh)].copy()), ctx)
        assert (mask is None) == (rate == 0 or not ctx.training)
        return spec.gather(y, mesh)

    return run_threads(rank, ranks=prod(axes.values()))


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_mask_is_the_same_on_every_mesh(axes, sequence_parallel):
    for y in masks(axes, sequence_parallel=sequence_parallel):
        np.testing.assert_array_equal(y, masks(ONE)[0])


def test_dropout_keeps_the_mean():
    (y,) = masks(ONE, rate=0.75)
    assert set(np.unique(y)) == {0.0, 4.0}
    assert abs(y.mean() - 1) < 5 * (3 / y.size) ** 0.5


@pytest.mark.parametrize("other", [{"step": 4}, {"seed": 8}, {"label": "other"}], ids=str)
def test_a_mask_depends_on(other):
    assert abs((masks(ONE)[0] == masks(ONE, **other)[0]).mean() - 0.5) < 0.1


def test_every_sample_and_position_has_a_mask_of_its_own():
    rows = masks(ONE, length=200)[0].reshape(BATCH * 200, -1)
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_a_mask_does_not_depend_on_the_rest_of_the_micro_batch():
    """Neither on its length nor on which samples are in it."""
    (y,) = masks(ONE)
    np.testing.assert_array_equal(masks(ONE, length=4)[0], y[:, :4])
    backwards = masks(ONE, samples=np.array([102, 101, 100]))[0]
    np.testing.assert_array_equal(backwards, y[::-1])


@pytest.mark.parametrize("rate, training", [(0.5, False), (0.0, True)])
def test_no_dropout(rate, training):
    x = normals(BATCH, LENGTH, 50)
    np.testing.assert_array_equal(masks(ONE, rate=rate, training=training, x=x)[0], x)


@pytest.mark.parametrize("name", ["positions with dropout", "residual mlp", "residual attention"])
def test_a_layer_drops_only_in_training(name):
    problem = problem_of(name)
    dropped, whole = single(problem)["y"], single(problem, training=False)["y"]
    layer = pickle.loads(pickle.dumps(problem.layer))
    layer.dropout.rate = 0.0
    without = single(replace(problem, layer=layer))["y"]
    np.testing.assert_array_equal(whole, without)
    assert (dropped != without).mean() > 0.1


@every_layer
def test_forward_alone_gives_the_same(name):
    problem = problem_of(name)
    layer = pickle.loads(pickle.dumps(problem.layer))
    if hasattr(layer, "dropout"):
        layer.dropout.rate = 0.0
    problem = replace(problem, layer=layer)
    for axes in ({"data": 1}, {"data": 2, "model": 2}):
        y = solve(problem, axes, training=False)["y"]
        np.testing.assert_allclose(y, single(problem)["y"], rtol=0, atol=1e-12)
