"""Dense layers, their letters cut in every way: against the formulas in plain NumPy, on virtual ranks."""

import pickle
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest

from numerics import assert_gradient, frozen, normals
from spmd_engine import Mesh, run
from spmd_engine.errors import NotationError, UsageError
from spmd_engine.layers import ForwardContext, GradientSums, Linear, Skip
from spmd_engine.layers.later import wait_for
from spmd_engine.sharding import Layout, Shards

BATCH, INPUTS, OUTPUTS = 4, 5, 7
WHOLE = [(), ("slice_input",), ("gather_output",), ("slice_input", "gather_output")]
ONE = ({"data": 1}, {})

#: Meshes, and which axes cut which letter.
CUTS = [
    ({"data": 3}, {"b": "data"}),
    ({"data": 8}, {"b": "data"}),  # 4 samples: half of the ranks have none
    ({"model": 2}, {"f": "model"}),
    ({"model": 2}, {"d": "model"}),
    ({"model": 3}, {"f": "model"}),
    ({"model": 3}, {"d": "model"}),
    ({"model": 8}, {"f": "model"}),  # 7 columns, 5 rows: the last ranks have none
    ({"model": 8}, {"d": "model"}),
    ({"row": 2, "col": 2}, {"d": "row", "f": "col"}),
    ({"row": 2, "col": 3}, {"d": "row", "f": "col"}),
    ({"row": 2, "col": 3}, {"d": "col", "f": "row"}),
    ({"row": 2, "col": 3}, {"d": "row col"}),
    ({"row": 2, "col": 3}, {"f": "col row"}),  # cut by col first, though row comes first in the mesh
    ({"row": 2, "col": 3}, {"b": "row", "f": "col"}),
    ({"data": 2, "row": 2, "col": 2}, {"b": "data", "d": "row", "f": "col"}),
    ({"row": 2, "col": 2, "data": 2}, {"b": "data", "d": "row", "f": "col"}),
    ({"data": 2, "row": 2, "col": 2}, {"b": "data", "f": "col"}),  # replicated over rows
]


def cut_id(cut):
    return " ".join(f"{letter}/{axes.replace(' ', ',')}" for letter, axes in cut[1].items()) + f" on {cut[0]}"


every_cut = pytest.mark.parametrize("cut", CUTS, ids=cut_id)
every_whole = pytest.mark.parametrize("whole", WHOLE, ids=lambda names: "+".join(names) or "as cut")


def linear(*whole, activation="relu", bias=True, **options):
    ends = ("d", INPUTS), ("f", OUTPUTS)
    return Linear(*ends, activation=activation, bias=bias, **dict.fromkeys(whole, True), **options)


def skip(*whole, activation="gelu"):
    up = Linear(("d", INPUTS), ("f", OUTPUTS), activation=activation, slice_input="slice_input" in whole)
    return Skip(up, Linear(("f", OUTPUTS), ("d", INPUTS), gather_output="slice_input" in whole))


@dataclass(frozen=True)
class Problem:
    """Whole arrays: input, output's gradient, and parameters by name."""

    layer: Linear | Skip
    x: np.ndarray
    dy: np.ndarray
    p: dict


def problem_of(layer, seed=0):
    out = INPUTS if isinstance(layer, Skip) else OUTPUTS
    shapes = {name: [layer.sizes[c] for c in about.dims.split()] for name, about in layer.parameters.items()}
    p = {name: normals(*shape, seed=seed + 2 + i) for i, (name, shape) in enumerate(shapes.items())}
    return Problem(layer, normals(BATCH, INPUTS, seed=seed), normals(BATCH, out, seed=seed + 1), p)


def tree(arrays):
    """Names as the layer uses them: "up/weights" stands at ["up"]["weights"]."""
    nested = {}
    for name, array in arrays.items():
        folder, _, leaf = name.rpartition("/")
        (nested.setdefault(folder, {}) if folder else nested)[leaf] = array
    return nested


class Local:
    """A problem as one rank has it, and forward and backward on it."""

    def __init__(self, problem, mesh, cuts):
        axes = {letter: tuple(names.split()) for letter, names in cuts.items()}
        self.problem, self.mesh, self.layer = problem, mesh, problem.layer
        self.layout = Layout(axes, axes)
        self.layout.check("layer", {"b", "s", *self.layer.sizes}, self.layer.may_cut, self.layer.across)
        self.sh = Shards(mesh, self.layout, "layer")
        ends = (self.layer.up, self.layer.down) if isinstance(self.layer, Skip) else (self.layer, self.layer)
        self.inputs = self.spec("b " + ends[0].letters[0], whole=ends[0].slice_input)
        self.outputs = self.spec("b " + ends[1].letters[1], whole=ends[1].gather_output)
        self.p = {name: self.block(array, self.dims(name)) for name, array in problem.p.items()}
        self.g = {name: np.ones(array.shape) for name, array in self.p.items()}  # not zero: gradients are added
        self.x, self.dy = self.block(problem.x, self.inputs), self.block(problem.dy, self.outputs)

    def spec(self, dims, whole=False):
        axes = {"b": self.layout.axes("b")} if whole else self.layout.inside
        return Layout(axes, axes).spec(dims)

    def dims(self, name):
        return self.spec(self.layer.parameters[name].dims)

    def block(self, array, spec):
        return frozen(array[spec.block(array.shape, self.mesh)].copy())

    def forward(self, training=True):
        none = np.arange(0)  # positions mean nothing to these layers
        return self.layer.forward(self.sh, tree(self.p), self.x, ForwardContext(none, none, training=training))

    def backward_input(self, saved):
        return self.layer.backward_input(self.sh, tree(self.p), saved, self.dy)

    def backward_weight(self, rest):
        self.layer.backward_weight(self.sh, rest, GradientSums(self.g))

    def gradients(self):
        """The whole gradients: reduced over the axes along which the parameters say they are unreduced."""
        whole = {}
        for name, gradient in self.g.items():
            axes = self.sh.axes(self.layer.parameters[name].summed)
            gradient = gradient - 1.0
            whole[f"d{name}"] = self.dims(name).gather(
                self.mesh.all_reduce(gradient, over=axes) if axes else gradient, self.mesh
            )
        return whole

    def solve(self):
        y, saved = self.forward()
        dx, rest = self.backward_input(saved)
        self.backward_weight(rest)
        dx = wait_for(dx)
        results = {"y": self.outputs.gather(y, self.mesh), **self.gradients()}
        return results | ({} if dx is None else {"dx": self.inputs.gather(dx, self.mesh)})


def on_mesh(problem, cut, work=Local.solve):
    axes, cuts = cut

    def rank():
        with Mesh(**axes) as mesh:
            return work(Local(problem, mesh, cuts))

    return run(rank, prod(axes.values()))


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for name, array in results.items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-12, err_msg=name)


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


# --- many ranks compute what one does, and replicas the same bits


@every_cut
@every_whole
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_any_cut_as_one_device(cut, whole, activation):
    problem = problem_of(linear(activation=activation))
    (expected,) = on_mesh(problem, ONE)
    first, *others = on_mesh(problem_of(linear(*whole, activation=activation)), cut)
    assert_same(first, expected)
    for other in others:
        assert all(np.array_equal(other[name], first[name]) for name in first)


@every_cut
@pytest.mark.parametrize("whole", WHOLE[:2], ids=["as cut", "whole"])
def test_any_cut_of_a_skip_as_one_device(cut, whole):
    (expected,) = on_mesh(problem_of(skip()), ONE)
    for results in on_mesh(problem_of(skip(*whole)), cut):
        assert_same(results, expected)


def test_the_input_gradient_can_be_left_out():
    for results in on_mesh(problem_of(linear(input_gradient=False)), CUTS[2]):
        (expected,) = on_mesh(problem_of(linear()), ONE)
        assert "dx" not in results
        assert_same(results, {name: array for name, array in expected.items() if name != "dx"})


# --- what is sent

ITEM = 8  # bytes of a float64
X, Y = BATCH * INPUTS * ITEM, BATCH * OUTPUTS * ITEM  # bytes of the whole input, and output
#: cut, options: bytes that all ranks together send forward and backward, by operation. An all_reduce of S bytes
#: over n ranks sends 2 S (n-1), an all_gather S (n-1); each happens in as many groups as the other axes make,
#: on blocks that add up to the whole where those axes cut it, and on whole copies where they do not.
BYTES = {
    "column": (({"model": 3}, {"f": "model"}), (), {}, {"all_reduce": 2 * X * 2}),
    "row": (({"model": 3}, {"d": "model"}), (), {"all_reduce": 2 * Y * 2}, {}),
    "column gathered": (
        ({"model": 3}, {"f": "model"}),
        ("gather_output",),
        {"all_gather": Y * 2},
        {"all_reduce": 2 * X * 2},
    ),
    "row sliced": (
        ({"model": 3}, {"d": "model"}),
        ("slice_input",),
        {"all_reduce": 2 * Y * 2},
        {"all_gather": X * 2},
    ),
    "2-D": (
        ({"row": 2, "col": 3}, {"d": "row", "f": "col"}),
        (),
        {"all_reduce": 2 * Y * (2 - 1)},
        {"all_reduce": 2 * X * (3 - 1)},
    ),
    "2-D whole": (
        ({"row": 2, "col": 3}, {"d": "row", "f": "col"}),
        ("slice_input", "gather_output"),
        {"all_reduce": 2 * Y * (2 - 1), "all_gather": Y * (3 - 1) * 2},  # gathered in each of 2 rows
        {"all_reduce": 2 * X * (3 - 1), "all_gather": X * (2 - 1) * 3},  # and in each of 3 columns
    ),
    "2-D and data": (
        ({"data": 2, "row": 2, "col": 2}, {"b": "data", "d": "row", "f": "col"}),
        (),
        {"all_reduce": 2 * Y * (2 - 1)},
        {"all_reduce": 2 * X * (2 - 1)},
    ),
    "data": (({"data": 3}, {"b": "data"}), (), {}, {}),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_layer(name):
    cut, whole, *expected = BYTES[name]

    def sent(local):
        def account():
            entries = {key[0]: entry.sent for key, entry in local.mesh.ledger.entries.items()}
            assert all(entry.calls == 1 for entry in local.mesh.ledger.entries.values())
            assert {key[2] for key in local.mesh.ledger.entries} <= {"layer"}
            local.mesh.ledger.clear()
            return entries

        _, saved = local.forward()
        forward = account()
        dx, rest = local.backward_input(saved)
        local.backward_weight(rest)
        wait_for(dx)
        return forward, account()

    for ours, theirs in zip(zip(*on_mesh(problem_of(linear(*whole)), cut, sent)), expected):
        totals = {operation: sum(rank[operation] for rank in ours) for operation in ours[0]}
        assert totals == theirs


# --- what is not kept, and when the weights' turn comes


@pytest.mark.parametrize("layer", [linear(activation="gelu"), skip()], ids=["linear", "skip"])
def test_micro_batches_in_flight_and_weights_that_wait(layer):
    first, other = problem_of(layer), problem_of(layer, seed=50)
    second = Problem(layer, other.x, other.dy, first.p)
    before = pickle.dumps(layer)

    def rank():
        with Mesh(row=2, col=2) as mesh:
            cuts = {"d": "row", "f": "col"}
            both = [Local(problem, mesh, cuts) for problem in (first, second)]
            saved = [local.forward()[1] for local in both]
            rests = [local.backward_input(one)[1] for local, one in zip(both, saved)]
            for local, rest in zip(both, rests):
                local.backward_weight(rest)
            return [local.gradients() for local in both]

    for results in run(rank, 4):
        for problem, gradients in zip((first, second), results):
            (expected,) = on_mesh(problem, ONE)
            assert_same(gradients, {name: expected[name] for name in gradients})
    assert pickle.dumps(layer) == before


# --- what is refused


@pytest.mark.parametrize("letters", ["dd", "bd", "db", "sd", "ds", ("d1", "f"), ("", "f")], ids=str)
def test_letters_that_cannot_be_told_apart_are_refused(letters):
    with pytest.raises(UsageError, match="take two different letters"):
        Linear((letters[0], 3), (letters[1], 4))


def test_unknown_activations_are_refused():
    with pytest.raises(UsageError, match="unknown activation 'swish'; choose one of gelu, relu, or None"):
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
    with pytest.raises(NotationError, match='s is cut over mesh axis "model" inside'):
        on_mesh(problem_of(layer), ({"model": 1}, {"s": "model"}))


def test_initial_deviations():
    def deviation(**options):
        return Linear(("d", 50), ("f", 4), **options).parameters["weights"].std

    assert deviation() == pytest.approx(50**-0.5)
    assert deviation(activation="relu") == pytest.approx((2 / 50) ** 0.5)
    assert deviation(std=0.3) == 0.3
