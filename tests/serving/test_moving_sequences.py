"""Sequences in progress move with their engine to another mesh, and get the tokens of an engine that stays."""

from functools import cache
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import LayeredEngine, ParallelConfig
from spmd_engine.engine.reshape import Reshaper, Shape, ShapeRequest
from spmd_engine.models import DecoderConfig
from spmd_engine.models.decoder import decoder
from spmd_engine.serving import SamplingOptions, StoppingCriteria, generation
from spmd_engine.serving.generation import BATCH, NextTokens, _Writer
from spmd_engine.sharding import Layout
from support import tiny

MODEL = DecoderConfig(
    layers=2, width=8, heads=4, key_value_heads=2, hidden=10, vocabulary=13, context=40, window=3, window_layers="1"
)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
EACH, ALL = 2, 7  #: tokens on each mesh but the last, and in all
DRAWN = SamplingOptions(sample=True, seed=2)


def written(*meshes):
    """The texts, and the bytes that moved, of an engine that goes from one mesh to the next."""
    ranks = max(map(tiny.ranks_of, meshes))

    def program():
        with Mesh(data=ranks) as mesh:
            engine = LayeredEngine(decoder(MODEL), mesh, Layout.for_mesh(mesh), dtype=np.float64, seed=5, trained=False)
            model, shape = NextTokens(engine, DRAWN), Shape(ParallelConfig(mesh={"data": ranks}), tuple(range(ranks)))
            reshaper = Reshaper(engine, None, shape, lambda composition: engine.model, states=[model])
            writer = _Writer(engine, PROMPTS, StoppingCriteria(ALL), None, DRAWN, None, BATCH)
            calls = writer.calls()
            for number, axes in enumerate(meshes, 1):
                if axes != reshaper.shape.axes:
                    wanted, _ = reshaper.checked(ShapeRequest({"mesh": axes}))
                    reshaper.move(wanted)
                if reshaper.placed:
                    model.inference_loop(islice(calls, EACH if number < len(meshes) else None), writer)
            return [sequence.tokens for sequence in writer.sequences]

    return run_threads(program, ranks)[0]


@cache
def expected():
    texts = written({"data": 1})
    assert [len(text) for text in texts] == [ALL] * len(PROMPTS)
    return texts


@pytest.mark.parametrize(
    "meshes",
    [
        [{"model": 1}, {"model": 2}, {"model": 1}],
        [{"pipe": 1}, {"pipe": 2}],
        [{"context": 3}, {"data": 2}, {"context": 2}, {"pipe": 2, "model": 2}],
        [{"data": 4}, {"model": 4}, {"data": 3}],  # more ranks than sequences, and than key heads
    ],
    ids=lambda meshes: " to ".join(map(tiny.mesh_id, meshes)),
)
def test_sequences_continue_on_another_mesh(meshes):
    assert written(*meshes) == expected()


def test_sequences_that_moved_are_split_as_a_batch_is(monkeypatch):
    model, rows = NextTokens.__new__(NextTokens), []
    monkeypatch.setattr(generation, "unpack_cache", lambda engine, mine, *rest: (rows.extend(mine), {}))
    engine = SimpleNamespace(mesh=None, batch_span=lambda samples: slice(1, samples))
    facts = [{"texts": [(5, [1]), (2, [3, 4])]}, {"texts": [(9, [6])]}]
    model.unpack(engine, facts, None)
    assert rows == model._rows == [5, 9] and model._texts == {2: [3, 4], 5: [1], 9: [6]}
