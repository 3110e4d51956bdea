"""A real step on virtual ranks, whose ledgers are compared with predictions."""

import numpy as np

import tiny
from spmd_engine import Mesh, run_threads
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.batch import make_batch
from spmd_engine.engine.build import composed_layout
from spmd_engine.planning.dry_run.analyze import sample_shapes
from spmd_engine.training import Trainer


def real_batch(model, engine, size, micro_batches, seed=0):
    """Random samples of a model: tokens, classes or numbers."""
    inputs, targets = sample_shapes(model, None)
    rng = np.random.default_rng(seed)
    letter = model.outputs.split()[-1]
    classes = next(layer.sizes[letter] for _, layer in reversed(model.layers) if letter in layer.sizes)
    x = rng.integers(0, model.vocabulary, (size, *inputs)) if model.vocabulary else rng.random((size, *inputs))
    named = len(model.targets.split()) < len(model.outputs.split())
    y = rng.integers(0, classes, (size, *targets)) if named else rng.random((size, *targets))
    x, y = (each if each.dtype.kind == "i" else each.astype(engine.dtype) for each in (x, y))
    return make_batch(lambda rows: (x[rows], y[rows]), size, micro_batches, engine, count=y.size)


def build(model, mesh, composition, dtype):
    if composition is None:
        return LayeredEngine(model, mesh, dtype=dtype)
    layout = composed_layout(model, mesh, composition)
    return LayeredEngine(model, mesh, layout, dtype=dtype, **composition.how_on(mesh.axes))


def ledgers(model, axes, composition, *, batch_size, micro_batches, dtype):
    """Calls, payload and bytes sent by line of the ledger, of every rank's first step."""

    def program():
        with Mesh(**axes) as mesh:
            engine = build(model, mesh, composition, dtype)
            batch = real_batch(model, engine, batch_size, micro_batches)
            trainer = Trainer(engine, AdamW(), lambda step: batch, lambda step: 0.01, step_metrics=False)
            mesh.ledger.clear()
            trainer.step()
            return {where: (e.calls, e.payload, e.sent) for where, e in mesh.ledger.entries.items() if e.calls}

    return run_threads(program, tiny.ranks_of(axes))
