"""Walks from mesh to mesh: wherever a random reshard leads, every element is there, where it belongs, to the bit."""

from dataclasses import replace

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.schedules import named
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.layers import RouterOptions
from spmd_engine.models import Mixture, gpt, layout_for
from spmd_engine.sharding import Layout
from spmd_engine.sharding.rectangles import Rectangle
from spmd_engine.training import Trainer
from support import pictures, tiny
from support.own_layers import text_model
from support.own_layers import tokens as contract_tokens
from support.tiny import mesh_of_one

AXES = {
    "decoder": ["pipe", "data", "context", "model", "replicate", "shard"],
    "experts": ["pipe", "data", "expert", "model", "context"],
    "images": ["pipe", "data", "rows", "columns", "model"],
    "buffers": ["pipe", "data", "context", "model"],
}
STEPS = 5  #: reshards a walk: one engine goes from mesh to mesh


def drawn_model(kind, rng):
    """A small model of that kind, of a size that few meshes divide, and the function that makes its batches."""
    if kind == "images":
        return pictures.small_convnet(), pictures.pictures
    if kind == "buffers":
        return text_model(), contract_tokens
    size = replace(tiny.SIZE, layers=int(rng.integers(1, 5)), heads=int(rng.choice([1, 2, 3, 4, 6])))
    if kind == "experts":
        mixture = Mixture(int(rng.integers(2, 8)), int(rng.integers(2)), 7, "", RouterOptions(bias_rate=0.1))
        size = replace(size, mixture=mixture)
    return gpt(replace(size, tied=bool(rng.integers(2)))), tiny.tokens


def drawn_axes(kind, ranks, layers, rng):
    """So many ranks dealt over axes that this kind of model may have, in any order; never more stages than layers."""
    axes = {}
    factors = {1: [], 2: [2], 3: [3], 4: [2, 2], 5: [5], 6: [2, 3], 8: [2, 2, 2]}[ranks]
    for factor in factors:
        axis = str(rng.choice(AXES[kind]))
        if axis == "pipe" and axes.get("pipe", 1) * factor > layers:
            axis = "data"
        axes[axis] = axes.get(axis, 1) * factor
    return dict(sorted(axes.items(), key=lambda _: rng.random())) or {"data": 1}


def drawn_options(mesh, model, rng):
    """How the model is computed there: ZeRO stage, groups, uneven stages, schedule, and who has which expert."""
    options = {"storage": ZeroConfig(int(rng.integers(4)), threshold=int(rng.choice([0, 500, 1 << 20])))}
    stages, layers = mesh.axes.get("pipe", 1), len(model.layers)
    if stages > 1 and layers >= 2 * stages and rng.integers(2):
        options["schedule"] = named("interleaved", 2)
    elif stages > 1:
        options["stages"] = (0, *sorted((1 + rng.choice(layers - 1, stages - 1, replace=False)).tolist()))
    layout = layout_for(model, mesh)
    routed = {name: layer for name, layer in model.layers if "e" in getattr(layer, "sizes", {})}
    if "expert" in mesh.axes and rng.integers(2):
        parts = mesh.axes["expert"]
        experts = {name: tuple(rng.integers(0, parts, layer.sizes["e"]).tolist()) for name, layer in routed.items()}
        layout = Layout.for_mesh(mesh, experts=experts)
    return replace(layout, shares=tiny.drawn_shares(mesh.axes, rng)), options


def whole_arrays(model, kinds):
    """Numbers that tell every element of parameters, buffers and state from any other."""
    rng = np.random.default_rng(7)
    parameters = {name: rng.standard_normal(shape) for name, (_, shape) in model.parameters()}
    buffers = {name: rng.random(shape) + 0.5 for name, (_, shape) in model.buffers()}
    return parameters, buffers, {kind: {name: rng.random(w.shape) for name, w in parameters.items()} for kind in kinds}


def parts_here(engine, optimizer):
    """All that this rank holds: (what, name) -> (where in the whole, the part)."""
    found = {("parameters", name): (engine.index(name), array) for name, array in engine.parameters.items()}
    found |= {("buffers", name): (engine.buffer_index(name), array) for name, array in engine.buffers.items()}
    for kind, arrays in optimizer.state.items():
        found |= {(kind, name): (engine.owned_index(name), part) for name, part in engine.named(arrays).items()}
    return {key: (index, part) for key, (index, part) in found.items() if index is not None}


def lacking(before, after):
    """The bytes of what this rank holds now and did not before."""
    size = 0
    for key, (index, part) in after.items():
        shared = Rectangle.of(index) & Rectangle.of(before[key][0]) if key in before else None
        size += part.nbytes - (shared.size * part.itemsize if shared else 0)
    return size


def walk(kind, seed):
    """Go through ``STEPS`` meshes that the seed draws; assert on every rank, after each, that it has what it should."""
    rng = np.random.default_rng([seed, *kind.encode()])
    ranks = int(rng.choice([2, 3, 4, 6, 8]))
    model, tokens = drawn_model(kind, rng)
    stops = [drawn_axes(kind, ranks, len(model.layers), rng) for _ in range(STEPS + 1)]
    seeds = [int(rng.integers(1 << 30)) for _ in stops]

    def placed(number):
        mesh = Mesh(**stops[number])
        return mesh, *drawn_options(mesh, model, np.random.default_rng(seeds[number]))

    def program():
        mesh, layout, options = placed(0)
        engine, optimizer = LayeredEngine(model, mesh, layout, dtype=np.float64, drawn=False, **options), AdamW()
        optimizer.prepare(engine)
        parameters, buffers, state = whole_arrays(model, optimizer.state)
        whole = {"parameters": parameters, "buffers": buffers, **state}
        engine.load_checkpoint({**parameters, **buffers})
        for (what, name), (index, part) in parts_here(engine, optimizer).items():
            part[...] = whole[what][name][index]
        engine.after_update()
        sent = []
        for number in range(1, len(stops)):
            before = parts_here(engine, optimizer)
            other, layout, options = placed(number)
            mesh.ledger.clear()
            engine.reshard(other, layout, optimizer=optimizer, **options)
            after = parts_here(engine, optimizer)
            for (what, name), (index, part) in after.items():
                np.testing.assert_array_equal(part, whole[what][name][index], f"{what} of {name} on {other}")
            engine.placement(owned=True).checked()  # each element has one owner: nothing is missing
            sent.append((lacking(before, after), mesh.ledger.total(label="reshard").sent))
            mesh.close()
            mesh = other
        for name in engine.names:
            np.testing.assert_array_equal(engine.gather(name), parameters[name])
        batch = batch_of(*tokens(3), engine, 1)
        loss = Trainer(engine, optimizer, lambda step: batch, lambda step: 0.0).evaluate([batch])
        mesh.close()
        return sent, loss

    results = run_threads(program, ranks)
    for received, told in np.array([each for each, _ in results]).sum(axis=0):
        assert told == received  # each element once to every rank that lacked it
    alone = LayeredEngine(model, mesh_of_one(), dtype=np.float64)
    parameters, buffers, _ = whole_arrays(model, ())
    alone.load_checkpoint({**parameters, **buffers})
    batch = batch_of(*tokens(3), alone, 1)
    expected = Trainer(alone, AdamW(), lambda step: batch, lambda step: 0.0).evaluate([batch])
    for _, loss in results:
        np.testing.assert_allclose(loss, expected, rtol=1e-10)


#: 200 reshards of each kind in ``soak``; a walk of each but decoders in ``make test``.
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 200 // STEPS))])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.soak] * (kind == "decoder")) for kind in AXES])
def test_a_model_walks_from_mesh_to_mesh(kind, seed):
    walk(kind, seed)
