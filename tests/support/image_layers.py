"""Runs image layers on one device and on virtual ranks, for their tests."""

from math import prod

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.comm.pending import wait_for
from spmd_engine.layers import ForwardContext, GradientSums
from spmd_engine.sharding import Layout, Shards
from support.layer_harness import tree
from support.numerics import frozen, normals

BATCH, IMAGE = 3, (7, 6)
ONE = ({"data": 1}, {})


class Problem:
    """A layer with global arrays: input, gradient of the output, and parameters by name."""

    def __init__(self, layer, channels, seed=0, batch=BATCH, image=IMAGE):
        self.layer = layer
        self.x = normals(batch, *image, channels, seed=seed)
        self.p = {
            name: frozen(0.5 * normals(*parameter.whole(layer.sizes), seed=seed + 2 + i))
            for i, (name, parameter) in enumerate(layer.parameters.items())
        }
        whole = Shards(Mesh(), Layout({}, {}), "layer")
        y, *_ = layer.forward(whole, self.arrays(), self.x, ForwardContext(None, None, training=True))
        self.dy = normals(*y.shape, seed=seed + 1)

    def arrays(self, p=None):
        """Parameters and buffers as a layer receives them."""
        buffers = {name: np.full(b.whole(self.layer.sizes), b.initial) for name, b in self.layer.buffers.items()}
        return tree_of({**(self.p if p is None else p), **buffers})


def tree_of(arrays):
    """Like ``layer_harness.tree``, with nested names."""
    folders, nested = {}, {}
    for name, array in arrays.items():
        folder, slash, rest = name.partition("/")
        if slash:
            folders.setdefault(folder, {})[rest] = array
        else:
            nested[name] = array
    return tree(nested) | {folder: tree_of(inner) for folder, inner in folders.items()}


def solve(problem, cut):
    """The global output, gradients and updates of buffers on each rank; what it sent and saved.

    ``cut``: the axes of a mesh, the axes that shard each letter, and the shares along axes that are not even.
    """
    axes, cuts, *shares = cut
    layer, layout = problem.layer, Layout(dict(cuts), dict(cuts), shares=dict(*shares))

    def rank():
        mesh = Mesh(**axes)
        sh = Shards(mesh, layout, "layer")

        def block(x, dims):
            return frozen(x[layout.spec(dims).block(x.shape, mesh)].copy())

        def whole(x, dims):
            return layout.spec(dims).gather(x, mesh)

        p = {name: block(array, layer.parameters[name].dims) for name, array in problem.p.items()}
        buffers = {name: block(np.full(b.whole(layer.sizes), b.initial), b.dims) for name, b in layer.buffers.items()}
        given, ctx = tree_of({**p, **buffers}), ForwardContext(None, None, training=True)
        y, saved, *extra = layer.forward(sh, given, block(problem.x, layer.inputs.dims), ctx)
        dx, rest = layer.backward_input(sh, given, saved, block(problem.dy, layer.outputs.dims))
        g = {name: np.ones(array.shape) for name, array in p.items()}  # not zero: gradients are added
        layer.backward_weight(sh, rest, GradientSums(g))
        dx, results = wait_for(dx), {}
        mesh.barrier()
        sent = mesh.ledger.total().sent
        results = {"y": whole(y, layer.outputs.dims)}
        if dx is not None:
            results["dx"] = whole(dx, layer.inputs.dims)
        for name, parameter in layer.parameters.items():
            over = sh.axes(parameter.summed, parameter.where)
            gradient = mesh.all_reduce(g[name] - 1.0, over=over) if over else g[name] - 1.0
            results[f"d{name}"] = whole(gradient, parameter.dims)
        for told in extra:
            results |= {name: whole(update, layer.buffers[name].dims) for name, update in told.updates.items()}
        return results, sent

    return run_threads(rank, ranks=prod(axes.values()))


def assert_as_one_device(problem, cut):
    (expected, _), *_ = solve(problem, ONE)
    for results, _ in solve(problem, cut):
        assert_same(results, expected)


def assert_same(results, expected):
    assert results.keys() == expected.keys()
    for name, array in results.items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-11, err_msg=name)


def slope(problem, seed=9, distance=1e-6):
    """<dy, change of y> along a direction of input and parameters: by the backward and by finite differences."""
    (results, _), *_ = solve(problem, ONE)
    along = {"x": normals(*problem.x.shape, seed=seed)}
    along |= {name: normals(*array.shape, seed=seed + 1 + i) for i, (name, array) in enumerate(problem.p.items())}
    found = sum((results[f"d{name}"] * direction).sum() for name, direction in along.items())
    sh = Shards(Mesh(), Layout({}, {}), "layer")

    def at(step):
        p = {name: array + step * along[name] for name, array in problem.p.items()}
        ctx = ForwardContext(None, None, training=True)
        y, *_ = problem.layer.forward(sh, problem.arrays(p), problem.x + step * along["x"], ctx)
        return (y * problem.dy).sum()

    return found, (at(distance) - at(-distance)) / (2 * distance)
