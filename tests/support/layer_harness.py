"""Runs any layer on one device and on virtual ranks, for the tests of layers.

It makes global inputs and parameters, shards them by the layout, runs forward and backward on each rank,
and joins the shards of outputs and gradients. All arrays that a layer receives are read-only.
"""

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.comm.pending import wait_for
from spmd_engine.layers import (
    MLP,
    Attention,
    AttentionConfig,
    Branch,
    Embedding,
    ForwardContext,
    GatedMLP,
    GradientSums,
    Head,
    Layer,
    LayerNorm,
    Parallel,
    Positions,
    Residual,
    RMSNorm,
    RotaryOptions,
)
from spmd_engine.sharding import Layout, Shards
from support.numerics import frozen, normals
from support.parts import joined

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 7, 6, 13


class TiedEnds(Layer):
    """An embedding and a head that share their table: both layers add to its gradient."""

    inputs, outputs = Embedding.inputs, Head.outputs

    def __init__(self):
        self.embedding = Embedding(VOCABULARY, WIDTH)
        self.head = Head(VOCABULARY, WIDTH, tied="embedding/table")
        self.sizes, self.parameters = self.head.sizes, self.head.parameters

    def forward(self, sh, p, x, ctx):
        x, first = self.embedding.forward(sh, p, x, ctx)
        y, last = self.head.forward(sh, p, x, ctx)
        return y, (first, last)

    def backward_input(self, sh, p, saved, dy):
        dx, last = self.head.backward_input(sh, p, saved[1], dy)
        return None, (self.embedding.backward_input(sh, p, saved[0], wait_for(dx))[1], last)

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
    "attention 6 heads sharing 2": Attention(12, 6, 2),
    "attention with rotary positions": Attention(WIDTH, 3, rotary=RotaryOptions()),
    "attention of Qwen3": Attention(
        10, 6, 2, AttentionConfig(head_width=4, bias=False, output_bias=False, rotary=RotaryOptions(), qk_norm=True)
    ),
    "rms norm": RMSNorm(WIDTH),
    "gated mlp": GatedMLP(WIDTH, 10),
    "head": Head(VOCABULARY, WIDTH),
    "tied ends": TiedEnds(),
    "residual mlp": Residual(LayerNorm(WIDTH), MLP(WIDTH, 10), dropout=0.3),
    "residual gated mlp": Residual(RMSNorm(WIDTH), GatedMLP(WIDTH, 10)),
    "residual attention": Residual(LayerNorm(WIDTH), Attention(WIDTH, 3), dropout=0.3),
    "branch": Branch(LayerNorm(WIDTH), MLP(WIDTH, 10), after=RMSNorm(WIDTH), scale=0.5),
    "parallel": Parallel(("rows", MLP(WIDTH, 3)), ("gated", GatedMLP(WIDTH, 2)), norm=LayerNorm(WIDTH)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)

MESHES = [
    {"data": 2},
    {"data": 4},  # 3 samples: the last rank has none
    {"model": 2},
    {"model": 3},
    {"model": 4},  # 6 heads and width 10 do not divide; with 3 heads the last rank has none
    {"model": 8},  # 13 words do not divide
    {"data": 2, "model": 2},
    {"model": 2, "data": 2},
    {"context": 2},
    {"context": 3, "model": 2},  # 7 positions do not divide
    {"data": 2, "context": 2},
]
ONE = {"data": 1}


@dataclass(frozen=True)
class Problem:
    """Global arrays: input, gradient of the output, and parameters by name."""

    layer: Layer
    x: np.ndarray
    dy: np.ndarray
    p: dict

    @property
    def inputs(self):
        """The letters of the input, and where it is: tokens inside the layer, vectors on the residual stream."""
        return ("b s", "inside") if self.x.dtype.kind in "iu" else ("b s d", "residual")

    @property
    def outputs(self):
        return ("b s v", "inside") if isinstance(self.layer, (Head, TiedEnds)) else ("b s d", "residual")


def problem_of(layer, batch=BATCH, length=LENGTH, seed=0):
    """A problem of a layer, or of the layer with this name in ``LAYERS``."""
    layer = LAYERS[layer] if isinstance(layer, str) else layer
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
    """Parameters by the layer's own names: "norm/scale" is at ["norm"]["scale"]."""
    nested = {}
    for name, array in arrays.items():
        folder, _, leaf = name.rpartition("/")
        (nested.setdefault(folder, {}) if folder else nested)[leaf] = array
    return nested


def where_and_when(sh, batch, length, training=True):
    """Sample numbers start at 100 and positions at 2, so that no layer may count from 0."""
    positions = np.arange(2, 2 + length)
    samples = np.arange(100, 100 + batch)[sh.span("b", batch)]
    return ForwardContext(
        frozen(positions[sh.layout.positions(length, sh.mesh)]),
        frozen(positions[sh.layout.positions(length, sh.mesh, "residual")]),
        frozen(samples),
        step=3,
        seed=7,
        training=training,
        length=length,
    )


@dataclass(frozen=True)
class Local:
    """One rank's part of a problem."""

    sh: Shards
    ctx: ForwardContext
    x: np.ndarray
    dy: np.ndarray
    p: dict
    g: dict

    def gradients(self, parameters):
        """This rank's shards of the gradients, reduced over the axes over which parameters declare them unreduced."""
        reduced, mesh = {}, self.sh.mesh
        for name, parameter in parameters.items():
            gradient = self.g[name] - 1.0
            axes = self.sh.axes(parameter.summed, parameter.where)
            reduced[name] = mesh.all_reduce(gradient, over=axes) if axes else gradient
        return reduced


def cut(problem, mesh, training=True, layout=None, shares=None, **options):
    """This rank's part of the problem, by ``layout`` or by the default layout of the mesh with ``options``."""
    layout = layout or replace(Layout.for_mesh(mesh, **options), shares=shares or {})
    sh = Shards(mesh, layout, "layer")

    def block(x, dims, where="inside"):
        return frozen(x[layout.spec(dims, where).block(x.shape, mesh)].copy())

    order = in_rank_order(sh, problem.x.shape[1])
    x, dy = block(problem.x[:, order], *problem.inputs), block(problem.dy[:, order], *problem.outputs)
    ctx = where_and_when(sh, *problem.x.shape[:2], training)
    p = {name: block(array, problem.layer.parameters[name].dims) for name, array in problem.p.items()}
    g = {name: np.ones(array.shape) for name, array in p.items()}  # not zero: gradients are added
    return Local(sh, ctx, x, dy, p, g)


def in_rank_order(sh, length):
    """Positions in the order of the ranks: split in this order, each rank gets its own positions."""
    return np.concatenate(sh.layout.positions_by_rank(length, sh.mesh))


def solve(problem, axes, training=True, **options):
    """Global output, input gradient and parameter gradients, joined from the shards of all ranks."""
    layer = problem.layer
    shapes = {f"d{name}": array.shape for name, array in problem.p.items()}
    shapes |= {"y": problem.dy.shape, "dx": problem.x.shape}
    dims = {"y": problem.outputs, "dx": problem.inputs}
    dims |= {f"d{name}": (parameter.dims,) for name, parameter in layer.parameters.items()}

    def rank():
        mesh = Mesh(**axes)
        local = cut(problem, mesh, training, **options)
        sh, p = local.sh, tree(local.p)
        y, saved = layer.forward(sh, p, local.x, local.ctx)
        results = {"y": y}
        if training:
            dx, rest = layer.backward_input(sh, p, saved, local.dy)
            layer.backward_weight(sh, rest, GradientSums(local.g))
            dx = wait_for(dx)
            results |= {f"d{name}": gradient for name, gradient in local.gradients(layer.parameters).items()}
            if dx is not None:
                results["dx"] = dx
        index = {name: sh.layout.spec(*dims[name]).block(shapes[name], mesh) for name in results}
        return {name: (index[name], part) for name, part in results.items()}, in_rank_order(sh, problem.x.shape[1])

    found = run_threads(rank, ranks=prod(axes.values()))
    whole = joined([parts for parts, _ in found], {name: shapes[name] for name in found[0][0]})
    by_position = np.argsort(found[0][1])
    return {name: array[:, by_position] if name in ("y", "dx") else array for name, array in whole.items()}


def single(problem, training=True):
    return solve(problem, {"data": 1}, training=training)


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for name, array in results.items():
        scale = max(1.0, abs(expected[name]).max(initial=0.0))
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-12 * scale, err_msg=name)
