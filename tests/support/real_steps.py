"""Batches for any model, and a real step of it on virtual ranks, whose ledgers are compared with predictions."""

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.batch import make_batch
from spmd_engine.engine.build import composed_layout
from spmd_engine.training import Trainer
from support import tiny


def real_batch(model, engine, size, micro_batches, step=0, length=None):
    """Random samples of a model, others for each step: tokens, classes or numbers, in sequences of this length."""
    sizes = {letter: n for _, layer in model.layers for letter, n in layer.sizes.items()}
    first, last = ({**each, "b": size, "s": length or model.context} for each in (model.layers[0][1].sizes, sizes))
    inputs = [size, *model.sample] if model.sample else [first[letter] for letter in model.inputs.split()]
    targets = [last[letter] for letter in model.targets.split()]
    rng = np.random.default_rng(step)
    x = rng.integers(0, model.vocabulary, inputs) if model.vocabulary else rng.random(inputs)
    named = len(targets) < len(model.outputs.split())
    y = rng.integers(0, last[model.outputs.split()[-1]], targets) if named else rng.random(targets)
    x, y = (each if each.dtype.kind == "i" else each.astype(engine.dtype) for each in (x, y))
    return make_batch(lambda rows: (x[rows], y[rows]), size, micro_batches, engine, step=step, count=y.size)


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
