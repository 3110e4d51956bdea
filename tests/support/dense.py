"""Helpers for the tests of dense layers, on one device and sharded on meshes."""

from dataclasses import dataclass
from math import prod

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.comm.pending import wait_for
from spmd_engine.layers import ForwardContext, GradientSums, Linear, Skip
from spmd_engine.sharding import Layout, Shards
from support.numerics import frozen, normals

BATCH, INPUTS, OUTPUTS = 4, 5, 7
ONE = ({"data": 1}, {})


def linear(*whole, activation="relu", bias=True, **options):
    ends = ("d", INPUTS), ("f", OUTPUTS)
    return Linear(*ends, activation=activation, bias=bias, **dict.fromkeys(whole, True), **options)


def skip(*whole, activation="gelu"):
    up = Linear(("d", INPUTS), ("f", OUTPUTS), activation=activation, slice_input="slice_input" in whole)
    return Skip(up, Linear(("f", OUTPUTS), ("d", INPUTS), gather_output="slice_input" in whole))


@dataclass(frozen=True)
class Problem:
    """Global arrays: input, gradient of the output, and parameters by name."""

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
    """Parameters by the layer's own names: "up/weights" is at ["up"]["weights"]."""
    nested = {}
    for name, array in arrays.items():
        folder, _, leaf = name.rpartition("/")
        (nested.setdefault(folder, {}) if folder else nested)[leaf] = array
    return nested


class Local:
    """One rank's part of a problem, with forward and backward."""

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
        none = np.arange(0)  # these layers ignore positions
        return self.layer.forward(self.sh, tree(self.p), self.x, ForwardContext(none, none, training=training))

    def backward_input(self, saved):
        return self.layer.backward_input(self.sh, tree(self.p), saved, self.dy)

    def backward_weight(self, rest):
        self.layer.backward_weight(self.sh, rest, GradientSums(self.g))

    def gradients(self):
        """The global gradients: reduced over the axes over which the parameters declare them unreduced."""
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

    return run_threads(rank, prod(axes.values()))


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for name, array in results.items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-12, err_msg=name)
