"""Every layer: its backward against finite differences, its shards against the whole, on virtual ranks."""

import pickle
from dataclasses import replace
from functools import cache
from inspect import isclass
from math import prod
from pathlib import Path

import numpy as np
import pytest

import spmd_engine.layers
from spmd_engine import Mesh, run_threads
from spmd_engine.comm.pending import wait_for
from spmd_engine.errors import NotationError, UsageError
from spmd_engine.layers import Attention, AttentionConfig, Embedding, GradientSums, Layer, Rotary, RotaryOptions
from spmd_engine.layers.declarations import Parameter
from support.layer_harness import (
    LAYERS,
    MESHES,
    WIDTH,
    Problem,
    assert_same,
    cut,
    every_layer,
    problem_of,
    single,
    solve,
    tree,
)
from support.numerics import assert_gradient, frozen, normals
from support.pairwise import in_turn


def test_every_layer_has_tests():
    """In the table of layers with inputs b s d or tokens, or by its name in the tests of images and dense layers."""
    public = [getattr(spmd_engine.layers, name) for name in spmd_engine.layers.__all__]
    layers = {kind for kind in public if isclass(kind) and issubclass(kind, Layer)} - {Layer}
    layers -= {type(layer) for layer in LAYERS.values()}
    others = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [kind.__name__ for kind in layers if f"{kind.__name__}(" not in others] == []


# --- one device: the backward is the derivative of the forward


@every_layer
def test_backward_by_finite_differences(name):
    problem = problem_of(name)
    results = single(problem)

    def loss(**changed):
        return (single(replace(problem, **changed))["y"] * problem.dy).sum()

    if "dx" in results:
        assert_gradient(lambda x: loss(x=x), problem.x, results["dx"])
    else:
        assert problem.x.dtype.kind == "i"
    for own, array in problem.p.items():
        gradient = results[f"d{own}"]
        assert abs(gradient).max() > 1e-3 or own == "key_bias"  # the softmax does not see the keys' bias
        assert_gradient(lambda w, own=own: loss(p=problem.p | {own: w}), array, gradient)


# --- many ranks compute what one does


@cache
def alone(name):
    """What a layer of ``LAYERS`` computes on one device."""
    return single(problem_of(name))


@in_turn(7, name=list(LAYERS), axes=MESHES)
def test_sharded_as_single(name, axes):
    assert_same(solve(problem_of(name), axes), alone(name))


@in_turn(5, 1, name=list(LAYERS), axes=[mesh for mesh in MESHES if "model" in mesh])
def test_sequence_parallel_as_single(name, axes):
    # 7 positions do not divide; on 8 ranks the last has none
    assert_same(solve(problem_of(name), axes, sequence_parallel=True), alone(name))


SHARES = [{"model": (2, 1)}, {"model": (0, 1)}, {"model": (1, 2, 0)}, {"model": (9, 0, 1), "data": (1, 3)}]


@in_turn(4, name=list(LAYERS), shares=SHARES)
def test_sharded_by_shares_as_single(name, shares):
    axes = {axis: len(numbers) for axis, numbers in shares.items()}
    assert_same(solve(problem_of(name), axes, shares=shares, sequence_parallel="data" in axes), alone(name))


@in_turn(3, name=list(LAYERS), axes=[mesh for mesh in MESHES if "context" in mesh])
def test_a_sequence_dealt_evenly_as_single(name, axes):
    assert_same(solve(problem_of(name), axes, zigzag=True, sequence_parallel=True), alone(name))


@in_turn(4, name=list(LAYERS), length=[1, 5])
def test_a_short_sequence_on_more_ranks(name, length):
    problem = problem_of(name, batch=1, length=length)
    expected = single(problem)
    for axes in {"data": 2, "model": 3}, {"context": 3, "model": 2}:
        assert_same(solve(problem, axes, sequence_parallel=True), expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_tokens_of_small_unsigned_numbers(dtype):
    """They must not wrap where a rank's first word is subtracted."""
    layer, tokens = Embedding(300, WIDTH), frozen(np.array([[0, 43, 44, 75, 255]]))
    p = {"table": normals(300, WIDTH)}
    problem = Problem(layer, tokens, normals(1, 5, WIDTH), p)
    expected = single(problem)
    np.testing.assert_array_equal(expected["y"], p["table"][tokens])
    assert_same(solve(replace(problem, x=tokens.astype(dtype)), {"model": 4}), expected)


# --- what is sent

FORWARD_AND_BACKWARD = {
    "embedding": ("scatter", "gather"),
    "positions with dropout": ("", ""),
    "norm": ("", ""),
    "mlp gelu": ("gather scatter", "gather scatter"),
    "attention 3 heads": ("gather scatter", "gather scatter"),
    "attention 6 heads sharing 2": ("gather scatter", "gather scatter"),
    "head": ("gather", "scatter"),
    "residual mlp": ("gather scatter", "gather scatter"),
}
LONG_NAMES = {"gather": "all_gather", "scatter": "reduce_scatter"}


def calls(name, axes, sequence_parallel):
    """The collectives of a forward, and those of a backward, in order."""
    problem, layer = problem_of(name), LAYERS[name]

    def rank():
        mesh = Mesh(**axes)
        local = cut(problem, mesh, sequence_parallel=sequence_parallel)
        _, saved = layer.forward(local.sh, tree(local.p), local.x, local.ctx)
        forward = list(mesh.ledger.entries)
        mesh.ledger.clear()
        _, rest = layer.backward_input(local.sh, tree(local.p), saved, local.dy)
        layer.backward_weight(local.sh, rest, GradientSums(local.g))
        return [forward, list(mesh.ledger.entries)]

    first, *others = run_threads(rank, ranks=prod(axes.values()))
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("name", FORWARD_AND_BACKWARD)
def test_collectives_of_a_layer(name):
    for words, entries in zip(FORWARD_AND_BACKWARD[name], calls(name, {"model": 2}, True)):
        assert entries == [(LONG_NAMES[word], "model", "layer") for word in words.split()]
    for words, entries in zip(FORWARD_AND_BACKWARD[name], calls(name, {"model": 2}, False)):
        assert entries == [("all_reduce", "model", "layer")] * ("scatter" in words)
    assert calls(name, {"data": 2}, False) == [[], []]


# --- what is not kept


@every_layer
def test_micro_batches_in_flight(name):
    """Forward 0, forward 1, backward 0, backward 1: as one after the other. The layer never changes."""
    problems = [problem_of(name, seed=0), replace(problem_of(name, seed=50), p=problem_of(name).p)]
    layer = LAYERS[name]
    before = pickle.dumps(layer)

    def rank():
        mesh = Mesh(model=2)
        first, second = (cut(problem, mesh) for problem in problems)
        sh, p = first.sh, tree(first.p)
        inputs, outputs = [], []

        def forward(local):
            y, saved = layer.forward(sh, p, local.x, local.ctx)
            outputs.append(y.copy())
            return saved

        def backward(local, saved, g):
            dx, rest = layer.backward_input(sh, p, saved, local.dy)
            layer.backward_weight(sh, rest, GradientSums(g))
            inputs.append(wait_for(dx))

        saved = [forward(local) for local in (first, second)]
        for local, one in zip((first, second), saved):
            backward(local, one, first.g)
        for local in (first, second):
            backward(local, forward(local), second.g)
        return inputs, outputs, first.g, second.g

    for inputs, outputs, together, one_by_one in run_threads(rank, ranks=2):
        for sequence in (inputs, outputs):
            for a, b in zip(sequence[:2], sequence[2:]):
                np.testing.assert_array_equal(a, b)
        for own in together:
            np.testing.assert_array_equal(together[own], one_by_one[own])
    assert pickle.dumps(layer) == before


@every_layer
def test_weights_may_wait(name):
    """The weights' gradients may be computed after other forwards and backwards: ``rest`` is theirs alone."""
    problem, layer = problem_of(name), LAYERS[name]

    def rank():
        local = cut(problem, Mesh())
        p, rests = tree(local.p), []
        for _ in range(2):
            _, saved = layer.forward(local.sh, p, local.x, local.ctx)
            rests.append(layer.backward_input(local.sh, p, saved, local.dy)[1])
        for rest in rests:
            layer.backward_weight(local.sh, rest, GradientSums(local.g))
        return local.gradients(layer.parameters)

    (twice,) = run_threads(rank, ranks=1)
    once = single(problem)
    for own, gradient in twice.items():
        np.testing.assert_allclose(gradient, 2 * once[f"d{own}"], rtol=0, atol=1e-12)


# --- how parameters are described


@every_layer
def test_parameters_are_of_known_letters(name):
    layer = LAYERS[name]
    for parameter in layer.parameters.values():
        assert set(parameter.dims.split()) <= layer.sizes.keys()


@every_layer
def test_norms_and_biases_do_not_decay(name):
    for own, parameter in LAYERS[name].parameters.items():
        plain = own.endswith(("bias", "b0", "b1", "_norm", "scale", "shift"))
        assert parameter.decay is not plain
        assert (parameter.std == 0) is plain


def test_letters_of_a_parameter_stand_apart():
    assert Parameter("d f").dims == "d f" and Parameter("").dims == ""
    with pytest.raises(NotationError, match=r'Parameter\("d ff"\): dims are letters with blanks between .* "d f f"'):
        Parameter("d ff")


def test_attention_takes_fields_of_its_config_as_keywords_also_by_the_names_of_earlier_releases():
    scores = {"attention_scale": 0.5, "attention_cap": 3.0, "window": 4}
    norms = {"qk_norm": True, "epsilon": 1e-3, "qk_norm_all_heads": True, "rope_before_norm": True}
    config = AttentionConfig(rotary=RotaryOptions(), **norms, **scores)
    earlier = {"norm_epsilon": 1e-3, "norm_together": True, "turned_first": True, "scale": 0.5, "cap": 3.0, "window": 4}
    assert Attention(12, 6, **norms, **scores, rotary=RotaryOptions()).config == config
    assert Attention(12, 6, **earlier, rotary=Rotary(2, RotaryOptions())).config == config
    with pytest.raises(UsageError, match="windows"):
        Attention(12, 6, windows=3)
