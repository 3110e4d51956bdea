"""A mixture of experts is what a loop over tokens computes, and sends what the formulas say."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays.activations import gelu
from spmd_engine.comm.pending import wait_for
from spmd_engine.layers import GradientSums, MoE, RouterOptions
from spmd_engine.layers.moe.dispatch import Dispatch
from spmd_engine.sharding import Layout, Shards
from support.layer_harness import where_and_when
from support.numerics import assert_gradient, normals

B, S, D, F, E = 3, 4, 6, 5, 7


def tree(p):
    nested = {}
    for name, array in p.items():
        *folder, leaf = name.split("/")
        (nested.setdefault(folder[0], {}) if folder else nested)[leaf] = array
    return nested


def parameters(layer, seed=0):
    shapes = {name: [layer.sizes[x] for x in each.dims.split()] for name, each in layer.parameters.items()}
    return {name: 0.7 * normals(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def by_token(x, p, k=2, shared=0):
    """Token by token, expert by expert."""
    y = np.zeros_like(x)
    for place in np.ndindex(x.shape[:2]):
        scores = np.exp(x[place] @ p["router"])
        best = sorted(range(E), key=lambda e: (-scores[e], e))[:k]
        ways = [(scores[e] / scores[best].sum(), f"expert{e}") for e in best]
        for weight, name in [*ways, *((1.0, f"shared{i}") for i in range(shared))]:
            y[place] += weight * (gelu(x[place] @ p[f"{name}/w0"])[0] @ p[f"{name}/w1"])
    return y


@pytest.mark.parametrize("k, shared", [(1, 0), (2, 2), (7, 1)])
def test_output_and_gradients_are_those_of_a_loop_over_tokens(k, shared):
    layer = MoE(D, F, E, RouterOptions(top_k=k), shared=shared)
    p, x, dy = parameters(layer), normals(B, S, D, seed=50), normals(B, S, D, seed=51)
    with Mesh() as mesh:
        sh = Shards(mesh, Layout.for_mesh(mesh), "moe")
        y, saved, _ = layer.forward(sh, tree(p), x, where_and_when(sh, B, S))
        np.testing.assert_allclose(y, by_token(x, p, k, shared), atol=1e-13)
        g = {name: np.zeros_like(array) for name, array in p.items()}
        dx, rest = layer.backward_input(sh, tree(p), saved, dy)
        layer.backward_weight(sh, rest, GradientSums(g))
    value = lambda **other: np.vdot(dy, by_token(other.get("x", x), {**p, **other.get("p", {})}, k, shared))
    assert_gradient(lambda x: value(x=x), x, wait_for(dx), step=1e-6, tolerance=1e-7)
    for name in ("router", "expert0/w0", "expert3/w1", *(["shared0/w1"] if shared else [])):
        assert_gradient(lambda w, name=name: value(p={name: w}), p[name], g[name], step=1e-6, tolerance=1e-7)


def test_without_tokens_nothing_comes():
    layer = MoE(D, F, E, RouterOptions(balance_loss=0.1, sequence_balance_loss=0.1, z_loss=0.1), shared=1)
    p = tree(parameters(layer))
    with Mesh() as mesh:
        sh = Shards(mesh, Layout.for_mesh(mesh), "moe")
        y, saved, told = layer.forward(sh, p, np.zeros((0, S, D)), where_and_when(sh, 0, S))
        dx, _ = layer.backward_input(sh, p, saved, y, dict.fromkeys(("balance", "sequence_balance", "z"), 1.0))
    assert y.shape == wait_for(dx).shape == (0, S, D)
    assert told.outputs["balance"] == told.outputs["z"] == told.outputs["dropped"] == 0


# --- the way of the rows


CHOICES = np.random.default_rng(4).permuted(np.tile(np.arange(-1, E), (24, 1)), axis=1)[:, :3]  # [t k], some dropped


@pytest.mark.parametrize("ranks, parts", [(1, None), (3, None), (3, (2, 0, 2, 2, 0, 0, 2)), (8, None)])
def test_rows_come_to_their_experts_and_back(ranks, parts):
    """An expert multiplies by its number + 1; what comes back is combined as if all had been here."""
    x, weights = normals(24, D), normals(24, 3, seed=1)
    scale = np.where(CHOICES >= 0, CHOICES + 1, 0)
    expected = (weights * scale).sum(axis=1)[:, None] * x

    def program():
        with Mesh(expert=ranks) as mesh:
            layout = Layout.for_mesh(mesh, experts={"moe": parts} if parts else {})
            sh = Shards(mesh, layout, "moe")
            own = sh.span("b", 24)
            dispatch = Dispatch(sh, CHOICES[own], E)
            rows = wait_for(dispatch.start(x[own][dispatch.tokens]))
            assert len(rows) == dispatch.rows[-1].stop if dispatch.rows else not len(rows)
            for number, part in zip(dispatch.here, dispatch.rows, strict=True):
                rows[part] *= number + 1
            back = wait_for(dispatch.start_back(rows))
            np.testing.assert_allclose(dispatch.gathered(back, D, weights[own]), expected[own], atol=1e-12)
            return dispatch.here

    held = run_threads(program, ranks)
    assert sorted(sum(held, [])) == list(range(E))
    if parts:
        assert held[1] == []


def test_what_travels_is_what_leaves_and_numbers_of_it():
    """Rows of d numbers to other ranks, twice in a forward and twice in a backward, and E counts of 8 bytes a rank."""
    layer = MoE(D, F, E, RouterOptions(top_k=2))
    p, x = parameters(layer), normals(8, S, D, seed=50)
    scores = x.reshape(-1, D) @ p["router"]
    best = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    ranks = 4
    owner = np.repeat(np.arange(ranks), [len(part) for part in np.array_split(np.arange(E), ranks)])
    home = np.repeat(np.arange(ranks), len(best) // ranks)
    leaving = (owner[best] != home[:, None]).sum()

    def program():
        with Mesh(expert=ranks) as mesh:
            sh = Shards(mesh, Layout.for_mesh(mesh), "moe")
            own, here = sh.span("b", 8), [e for e in range(E) if owner[e] == mesh.rank]
            mine = {n: a for n, a in p.items() if not n.startswith("exp") or int(n[6 : n.index("/")]) in here}
            mesh.ledger.clear()
            y, saved, _ = layer.forward(sh, tree(mine), x[own], where_and_when(sh, 8, S))
            forward = mesh.ledger.total(operation="all_to_all").sent
            wait_for(layer.backward_input(sh, tree(mine), saved, y)[0])
            return forward, mesh.ledger.total(operation="all_to_all").sent - forward

    forward, backward = np.sum(run_threads(program, ranks), axis=0)
    assert forward == 2 * leaving * D * 8 + E * (ranks - 1) * 8
    assert backward == 2 * leaving * D * 8
