"""Documents packed into one sequence learn, and are evaluated, as each does alone; on every mesh, by every method."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import LayeredEngine
from spmd_engine.engine.batch import Batch, MicroBatch, make_batch
from spmd_engine.layers.layer import documents_of
from spmd_engine.models import DecoderConfig, GPTSize, decoder, gpt
from spmd_engine.sharding import Layout
from support import tiny
from support.tiny import mesh_of_one

LENGTHS = [(4, 3, 3), (10,), (1, 9), (5, 5), (2, 2, 2, 4)]  # of the documents of each row
ROWS, LENGTH = len(LENGTHS), 10
TOKENS = np.random.default_rng(0).integers(0, 13, (ROWS, LENGTH))
TARGETS = np.random.default_rng(1).integers(0, 13, (ROWS, LENGTH))
NUMBERS = np.array([np.repeat(np.arange(len(each)), each) for each in LENGTHS])
MASK = np.random.default_rng(2).random((ROWS, LENGTH)) < 0.7
LLAMA_SHAPE = DecoderConfig(width=12, heads=6, key_value_heads=2, head_width=4, hidden=14, layers=2, vocabulary=13)


def model_of(kind, method):
    if kind == "gpt":
        return gpt(GPTSize(layers=2, width=12, heads=6, context=LENGTH, vocabulary=13), context_method=method)
    return decoder(LLAMA_SHAPE, context_method=method)


def engine_on(mesh, kind="gpt", method="ring", **options):
    layout = Layout.for_mesh(mesh, **options)
    return LayeredEngine(model_of(kind, method), mesh, layout, dtype=np.float64, seed=5)


def each_alone(kind):
    """The loss and the gradients of all documents, each a sequence of its own."""
    engine, loss, gradients = engine_on(mesh_of_one(), kind), 0.0, {}
    for row, lengths in enumerate(LENGTHS):
        for end, length in zip(np.cumsum(lengths), lengths):
            part = slice(row, row + 1), slice(end - length, end)
            micro = MicroBatch(TOKENS[part], TARGETS[part], np.array([row]), MASK[part].astype(float))
            loss += engine.step(Batch([micro], count=MASK.sum()))
            for name, gradient in engine.named(engine.gradients).items():
                gradients[name] = gradients.get(name, 0) + gradient
    return loss, gradients


def packed(engine, micro_batches=2):
    return make_batch(
        lambda samples: (TOKENS[samples], TARGETS[samples], MASK[samples].astype(float)),
        ROWS,
        micro_batches,
        engine,
        documents=lambda samples: documents_of(NUMBERS[samples], restart=True),
    )


@pytest.mark.parametrize(
    ("kind", "axes", "method", "options"),
    [
        ("gpt", {"data": 1}, "ring", {}),
        ("gpt", {"data": 2, "model": 2}, "ring", {"sequence_parallel": True}),
        ("gpt", {"context": 3}, "ring", {"zigzag": True}),
        ("gpt", {"context": 3}, "ring", {}),
        ("llama", {"context": 3}, "gather", {"zigzag": True}),
        ("llama", {"context": 2, "model": 2}, "ulysses", {}),
        ("llama", {"pipe": 2, "context": 2}, "ring", {"zigzag": True}),
    ],
    ids=str,
)
def test_packed_documents_are_as_each_alone(kind, axes, method, options):
    loss, gradients = each_alone(kind)

    def program():
        with Mesh(**axes) as mesh:
            engine = engine_on(mesh, kind, method, **options)
            batch = packed(engine)
            found = engine.step(batch)
            named = {name: engine.gather_owned(name, engine.gradients) for name in engine.names}
            return found, named, engine.evaluation([batch])

    for found, named, evaluated in run_threads(program, tiny.ranks_of(axes)):
        np.testing.assert_allclose(found, loss, rtol=1e-12)
        np.testing.assert_allclose(evaluated.loss, loss, rtol=1e-12)
        assert evaluated.count == MASK.sum()
        for name, gradient in gradients.items():
            np.testing.assert_allclose(named[name], gradient, rtol=0, atol=1e-12, err_msg=name)


def test_documents_that_are_not_kept_apart_see_each_other():
    with Mesh() as mesh:
        engine = engine_on(mesh)
        joined = make_batch(
            lambda samples: (TOKENS[samples], TARGETS[samples], MASK[samples].astype(float)), ROWS, 1, engine
        )
        assert abs(engine.step(joined) - each_alone("gpt")[0]) > 1e-6
