"""Every layer: its backward against finite differences, and its shards against the whole, on virtual ranks.

One harness serves all: it makes whole inputs and parameters, cuts them as the layout says, runs forward and
backward on each rank, and puts outputs and gradients together again. Whatever a layer is given is read-only.
"""

import pickle
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import pytest

from numerics import assert_gradient, frozen, normals
from spmd_engine import Mesh, run
from spmd_engine.layers import MLP, At, Attention, Embedding, Head, Layer, LayerNorm, Positions, Residual
from spmd_engine.layers.dropout import Dropout
from spmd_engine.sharding import Layout, Shards

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 7, 6, 13


class TiedEnds(Layer):
    """An embedding and a head that share their table: two layers add to one gradient."""

    def __init__(self):
        self.embedding = Embedding(VOCABULARY, WIDTH)
        self.head = Head(VOCABULARY, WIDTH, tied="embedding/table")
        self.sizes, self.parameters = self.head.sizes, self.head.parameters

    def forward(self, sh, p, x, at):
        x, first = self.embedding.forward(sh, p, x, at)
        y, last = self.head.forward(sh, p, x, at)
        return y, (first, last)

    def backward_input(self, sh, p, saved, dy):
        dx, last = self.head.backward_input(sh, p, saved[1], dy)
        return None, (self.embedding.backward_input(sh, p, saved[0], dx)[1], last)

    def backward_weight(self, sh, rest, g):
        self.head.backward_weight(sh, rest[1], g)
        self.embedding.backward_weight(sh, rest[0], g)


LAYERS = {
    "embedding": Embedding(VOCABULARY, WIDTH),
    "positions": Positions(20, WIDTH),
    "positions with dropout": Positions(20, WIDTH, dropout=0.3),
    "norm": LayerNorm(WIDTH),
    "mlp gelu": MLP(WIDTH, 10),
    "mlp relu": MLP(WIDTH, 10, activation="relu"),
    "attention 3 heads": Attention(WIDTH, 3),
    "attention 6 heads": Attention(12, 6),
    "head": Head(VOCABULARY, WIDTH),
    "tied ends": TiedEnds(),
    "residual mlp": Residual(LayerNorm(WIDTH), MLP(WIDTH, 10), dropout=0.3),
    "residual attention": Residual(LayerNorm(WIDTH), Attention(WIDTH, 3), dropout=0.3),
}
every_layer = pytest.mark.parametrize("name", LAYERS)

# --- the harness


@dataclass(frozen=True)
class Problem:
    """Whole arrays: input, output's gradient, and parameters by name."""

    layer: Layer
    x: np.ndarray
    dy: np.ndarray
    p: dict

    @property
    def inputs(self):
        """The letters of the input, and where it is cut: tokens as inside, vectors on the residual stream."""
        return ("b s", "inside") if self.x.dtype.kind in "iu" else ("b s d", "residual")

    @property
    def outputs(self):
        return ("b s v", "inside") if isinstance(self.layer, (Head, TiedEnds)) else ("b s d", "residual")


def problem_of(name, batch=BATCH, length=LENGTH, seed=0):
    layer = LAYERS[name]
    width = layer.sizes["d"]
    if isinstance(layer, (Embedding, TiedEnds)):
        x = frozen(np.random.default_rng(seed).integers(0, VOCABULARY, (batch, length)))
    else:
        x = normals(batch, length, width, seed=seed)
    out = layer.sizes["v"] if isinstance(layer, (Head, TiedEnds)) else width
    p = {}
    for i, (own, parameter) in enumerate(layer.parameters.items()):
        shape = [layer.sizes[letter] for letter in parameter.dims.split()]
        p[own] = frozen(0.5 * normals(*shape, seed=seed + 2 + i))
    return Problem(layer, x, normals(batch, length, out, seed=seed + 1), p)


def tree(arrays):
    """A layer's own names as it uses them: "norm/scale" stands at ["norm"]["scale"]."""
    nested = {}
    for name, array in arrays.items():
        folder, _, leaf = name.rpartition("/")
        (nested.setdefault(folder, {}) if folder else nested)[leaf] = array
    return nested


def where_and_when(sh, batch, length, training=True):
    """At the third position of samples 100, 101, ...: nothing may depend on counting from 0."""
    positions = np.arange(2, 2 + length)
    samples = np.arange(100, 100 + batch)[sh.span("b", batch)]
    return At(
        frozen(positions[sh.span("s", length)]),
        frozen(positions[sh.span("s", length, "residual")]),
        frozen(samples),
        step=3,
        seed=7,
        training=training,
    )


@dataclass(frozen=True)
class Local:
    """A problem as one rank has it."""

    sh: Shards
    at: At
    x: np.ndarray
    dy: np.ndarray
    p: dict
    g: dict

    def gradients(self, parameters):
        """The whole gradients: reduced over the axes along which the parameters say they are unreduced."""
        whole, mesh = {}, self.sh.mesh
        for name, parameter in parameters.items():
            gradient = self.g[name] - 1.0
            axes = self.sh.axes(parameter.summed, parameter.where)
            if axes:
                gradient = mesh.all_reduce(gradient, over=axes)
            whole[name] = self.sh.layout.spec(parameter.dims).gather(gradient, mesh)
        return whole


def cut(problem, mesh, sequence_parallel=False, training=True):
    layout = Layout.for_mesh(mesh, sequence_parallel=sequence_parallel)
    sh = Shards(mesh, layout, "layer")

    def block(x, dims, where="inside"):
        return frozen(x[layout.spec(dims, where).block(x.shape, mesh)].copy())

    at = where_and_when(sh, *problem.x.shape[:2], training)
    p = {name: block(array, problem.layer.parameters[name].dims) for name, array in problem.p.items()}
    g = {name: np.ones(array.shape) for name, array in p.items()}  # not zero: gradients are added
    return Local(sh, at, block(problem.x, *problem.inputs), block(problem.dy, *problem.outputs), p, g)


def solve(problem, axes, sequence_parallel=False, training=True):
    """Whole output, input gradient and parameter gradients, as each rank of the mesh sees them."""
    layer = problem.layer

    def rank():
        mesh = Mesh(**axes)
        local = cut(problem, mesh, sequence_parallel, training)
        sh, p = local.sh, tree(local.p)
        y, saved = layer.forward(sh, p, local.x, local.at)
        results = {"y": sh.layout.spec(*problem.outputs).gather(y, mesh)}
        if training:
            dx, rest = layer.backward_input(sh, p, saved, local.dy)
            layer.backward_weight(sh, rest, tree(local.g))
            results |= {f"d{name}": gradient for name, gradient in local.gradients(layer.parameters).items()}
            if dx is not None:
                results["dx"] = sh.layout.spec(*problem.inputs).gather(dx, mesh)
        return results

    return run(rank, ranks=prod(axes.values()))


def single(problem, training=True):
    (results,) = solve(problem, {"data": 1}, training=training)
    return results


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for name, array in results.items():
        scale = max(1.0, abs(expected[name]).max(initial=0.0))
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-12 * scale, err_msg=name)


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

MESHES = [
    {"data": 2},
    {"data": 4},  # 3 samples: the last rank has none
    {"model": 2},
    {"model": 3},
    {"model": 4},  # 6 heads and 10 hidden do not divide; of 3 heads the last rank has none
    {"model": 8},  # 13 words do not divide
    {"data": 2, "model": 2},
    {"model": 2, "data": 2},
]


@every_layer
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_sharded_as_single(name, axes):
    problem = problem_of(name)
    expected = single(problem)
    for results in solve(problem, axes):
        assert_same(results, expected)


@every_layer
@pytest.mark.parametrize("axes", [mesh for mesh in MESHES if "model" in mesh], ids=str)
def test_sequence_parallel_as_single(name, axes):
    problem = problem_of(name)  # 7 positions do not divide; on 8 ranks the last has none
    expected = single(problem)
    for results in solve(problem, axes, sequence_parallel=True):
        assert_same(results, expected)


@every_layer
@pytest.mark.parametrize("length", [1, 5])
def test_a_short_sequence_on_more_ranks(name, length):
    problem = problem_of(name, batch=1, length=length)
    expected = single(problem)
    for results in solve(problem, {"data": 2, "model": 3}, sequence_parallel=True):
        assert_same(results, expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_tokens_of_small_unsigned_numbers(dtype):
    """They must not wrap where a rank's first word is subtracted."""
    layer, tokens = Embedding(300, WIDTH), frozen(np.array([[0, 43, 44, 75, 255]]))
    p = {"table": normals(300, WIDTH)}
    problem = Problem(layer, tokens, normals(1, 5, WIDTH), p)
    expected = single(problem)
    np.testing.assert_array_equal(expected["y"], p["table"][tokens])
    for results in solve(replace(problem, x=tokens.astype(dtype)), {"model": 4}):
        assert_same(results, expected)


# --- what is sent

FORWARD_AND_BACKWARD = {
    "embedding": ("scatter", "gather"),
    "positions with dropout": ("", ""),
    "norm": ("", ""),
    "mlp gelu": ("gather scatter", "gather scatter"),
    "attention 3 heads": ("gather scatter", "gather scatter"),
    "head": ("gather", "scatter"),
    "residual mlp": ("gather scatter", "gather scatter"),
}
LONG_NAMES = {"gather": "all_gather", "scatter": "reduce_scatter"}


def calls(name, axes, sequence_parallel):
    """The collectives of a forward, and those of a backward, in order."""
    problem, layer = problem_of(name), LAYERS[name]

    def rank():
        mesh = Mesh(**axes)
        local = cut(problem, mesh, sequence_parallel)
        _, saved = layer.forward(local.sh, tree(local.p), local.x, local.at)
        forward = list(mesh.ledger.entries)
        mesh.ledger.clear()
        _, rest = layer.backward_input(local.sh, tree(local.p), saved, local.dy)
        layer.backward_weight(local.sh, rest, tree(local.g))
        return [forward, list(mesh.ledger.entries)]

    first, *others = run(rank, ranks=prod(axes.values()))
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("name", FORWARD_AND_BACKWARD)
def test_collectives_of_a_layer(name):
    for words, entries in zip(FORWARD_AND_BACKWARD[name], calls(name, {"model": 2}, True)):
        assert entries == [(LONG_NAMES[word], "model", "layer") for word in words.split()]
    for words, entries in zip(FORWARD_AND_BACKWARD[name], calls(name, {"model": 2}, False)):
        assert entries == [("all_reduce", "model", "layer")] * ("scatter" in words)
    assert calls(name, {"data": 2}, False) == [[], []]


# --- dropout


def masks(axes, rate=0.5, sequence_parallel=False, length=LENGTH, label="layer", x=None, **when):
    """Dropout of ones[b s d] on a mesh, gathered."""
    x = np.ones((BATCH, length, 50)) if x is None else x

    def rank():
        mesh = Mesh(**axes)
        layout = Layout.for_mesh(mesh, sequence_parallel=sequence_parallel)
        sh, spec = Shards(mesh, layout, label), layout.spec("b s d", "residual")
        at = replace(where_and_when(sh, BATCH, length), **when)
        y, mask = Dropout(rate).forward(sh, frozen(x[spec.block(x.shape, mesh)].copy()), at)
        assert (mask is None) == (rate == 0 or not at.training)
        return spec.gather(y, mesh)

    return run(rank, ranks=prod(axes.values()))


ONE = {"data": 1}


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
    rows = masks(ONE)[0].reshape(BATCH * LENGTH, -1)
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
        (y, *_) = solve(problem, axes, training=False)
        np.testing.assert_allclose(y["y"], single(problem)["y"], rtol=0, atol=1e-12)


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
            y, saved = layer.forward(sh, p, local.x, local.at)
            outputs.append(y.copy())
            return saved

        def backward(local, saved, g):
            dx, rest = layer.backward_input(sh, p, saved, local.dy)
            inputs.append(dx)
            layer.backward_weight(sh, rest, tree(g))

        saved = [forward(local) for local in (first, second)]
        for local, one in zip((first, second), saved):
            backward(local, one, first.g)
        for local in (first, second):
            backward(local, forward(local), second.g)
        return inputs, outputs, first.g, second.g

    for inputs, outputs, together, one_by_one in run(rank, ranks=2):
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
            _, saved = layer.forward(local.sh, p, local.x, local.at)
            rests.append(layer.backward_input(local.sh, p, saved, local.dy)[1])
        for rest in rests:
            layer.backward_weight(local.sh, rest, tree(local.g))
        return local.gradients(layer.parameters)

    (twice,) = run(rank, ranks=1)
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
        plain = own.endswith(("bias", "b0", "b1", "scale", "shift"))
        assert parameter.decay is not plain
        assert (parameter.std == 0) is plain
