"""A cache of keys and values: one position at a time is what all at once are, however sequences come and go."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import LayeredEngine
from spmd_engine.engine.inference import decode_inputs
from spmd_engine.errors import UsageError
from spmd_engine.layers.attention.kv_cache import Cache
from spmd_engine.models import DecoderConfig, GPTSize, gpt
from spmd_engine.models.decoder import decoder
from spmd_engine.sharding import Layout
from spmd_engine.sharding.shards import Shards
from support import tiny
from support.pairwise import in_turn
from support.tiny import mesh_of_one

SIZE = GPTSize(layers=2, width=12, heads=6, context=10, vocabulary=13, key_value_heads=3)
TOKENS = np.random.default_rng(0).integers(0, 13, (5, 10))
ONE = {"data": 1}


def engine_on(mesh, **options):
    return LayeredEngine(gpt(SIZE), mesh, Layout.for_mesh(mesh, **options), dtype=np.float64, seed=5)


def whole(tokens):
    """The scores of all positions at once, on one device."""
    engine = engine_on(mesh_of_one())
    with engine.inference():
        return engine.forward(tokens)


WAYS = [
    (ONE, {}),
    ({"data": 2}, {}),
    ({"model": 3}, {}),
    ({"model": 2, "data": 2}, {"sequence_parallel": True}),
    ({"pipe": 2, "model": 2}, {}),
    ({"data": 8}, {}),  # more ranks than sequences
]


@in_turn(
    4,
    pieces=[[10], [1] * 10, [4, 1, 1, 3, 1]],
    **{"axes, options": [pytest.param(*way, id=tiny.mesh_id(way[0])) for way in WAYS]},
)
def test_pieces_are_the_whole(axes, options, pieces):
    def program():
        with Mesh(**axes) as mesh:
            engine, cache, parts, begin = engine_on(mesh, **options), Cache(), [], 0
            with engine.inference():
                for length in pieces:
                    rows = TOKENS[engine.batch_span(5), begin : begin + length]
                    y = engine.forward(rows, cache=cache)
                    parts.append(None if y is None else engine.join_outputs(y))
                    begin += length
            return None if parts[0] is None else np.concatenate(parts, axis=1)

    found = [each for each in run_threads(program, tiny.ranks_of(axes)) if each is not None]
    assert found
    for each in found:
        np.testing.assert_allclose(each, whole(TOKENS), rtol=0, atol=1e-12)


def test_sequences_of_other_lengths_grow_together():
    """Prompts of 3, 6 and 3 tokens, read alone; then two more for each, at once."""
    engine, prompts = engine_on(mesh_of_one()), [TOKENS[:1, :3], TOKENS[1:2, :6], TOKENS[2:3, :3]]
    more, caches = TOKENS[:3, 8:], []
    with engine.inference():
        for prompt in prompts:
            caches.append(Cache())
            engine.forward(prompt, cache=caches[-1])
        cache = Cache.joined(caches)
        assert cache.lengths == [3, 6, 3]
        y = engine.forward(more, cache=cache)
    for prompt, row, scores in zip(prompts, more, y):
        alone = whole(np.concatenate([prompt[0], row])[None])
        np.testing.assert_allclose(scores, alone[0, -2:], rtol=0, atol=1e-12)
    assert cache.lengths == [5, 8, 5]


def test_sequences_are_reordered_repeated_dropped_and_cut_short():
    engine, cache = engine_on(mesh_of_one()), Cache()
    with engine.inference():
        engine.forward(TOKENS[:3, :4], cache=cache)
        cache.select([2, 0, 2])
        cache.truncate(3)
        y = engine.forward(TOKENS[:3, 5:6], cache=cache)
    for row, (of, scores) in enumerate(zip([2, 0, 2], y)):
        alone = whole(np.concatenate([TOKENS[of, :3], TOKENS[row, 5:6]])[None])
        np.testing.assert_allclose(scores[0], alone[0, -1], rtol=0, atol=1e-12)


WINDOWED = DecoderConfig(
    layers=2, width=8, heads=2, hidden=10, vocabulary=13, context=40, window=4, window_layers="1", qk_norm=True
)
LONG = np.random.default_rng(1).integers(0, 13, (3, 40))


def windowed_on(mesh):
    return LayeredEngine(decoder(WINDOWED), mesh, Layout.for_mesh(mesh), dtype=np.float64, seed=5)


@pytest.mark.parametrize("axes", [ONE, {"context": 3}, {"model": 2, "data": 2}], ids=tiny.mesh_id)
def test_keys_beyond_a_window_are_dropped(axes):
    """A prompt of 11, then one token after the other: of the layer with a window few columns stay, of the other all."""

    def program():
        with Mesh(**axes) as mesh:
            engine, cache, parts = windowed_on(mesh), Cache(), []
            tokens = LONG[engine.batch_span(3)]
            with engine.inference():
                for begin, end in [(0, 11), *((n, n + 1) for n in range(11, 40))]:
                    parts.append(engine.join_outputs(engine.forward(tokens[:, begin:end], cache=cache)))
            return np.concatenate(parts, axis=1), [cache.columns(window).used for window in (None, 4)]

    engine = windowed_on(mesh_of_one())
    with engine.inference():
        expected = engine.forward(LONG)
    for found, (without, within) in run_threads(program, tiny.ranks_of(axes)):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
        assert within <= 9 and without == (40 if "context" not in axes else without)


def test_sequences_with_a_window_are_joined_dropped_and_read_anew():
    engine, caches = windowed_on(mesh_of_one()), [Cache(), Cache()]
    with engine.inference():
        for row, cache in enumerate(caches):  # of other lengths: 21 and 17
            for begin in range(0, 21 - 4 * row):
                engine.forward(LONG[row : row + 1, begin : begin + 1], cache=cache)
        cache = Cache.joined(caches)
        with pytest.raises(
            UsageError, match=r"cannot be truncated to 9 positions: its first \d+, beyond a window of 4"
        ):
            cache.truncate([9, 17])
        cache.truncate([0, 17])
        cache.select([1, 0])
        y = engine.forward(LONG[[1, 2], 17:20], cache=cache)
        alone = [engine.forward(LONG[1:2, :20])[0, 17:], engine.forward(LONG[2:3, 17:20])[0]]
    np.testing.assert_allclose(y, alone, rtol=0, atol=1e-12)


def test_what_a_cache_cannot_do_is_refused():
    engine, cache = engine_on(mesh_of_one()), Cache()
    with pytest.raises(UsageError, match="call it in engine.inference"):
        engine.forward(TOKENS, cache=cache)
    with engine.inference():
        engine.forward(TOKENS[:, :8], cache=cache)
        with pytest.raises(UsageError, match="11 positions with those of the cache, but the context is 10"):
            engine.forward(TOKENS[:, :3], cache=cache)
        with pytest.raises(UsageError, match="the cache has 5 sequences on this rank, the inputs 2"):
            engine.forward(TOKENS[:2, :1], cache=cache)


@pytest.mark.parametrize(
    "axes", [ONE, {"context": 3}, {"context": 2, "model": 2}, {"context": 2, "data": 2}, {"pipe": 2}]
)
def test_the_last_outputs_of_sequences_that_grow_by_different_numbers(axes):
    """Prompts of 3, 6, 1, 5 and 2 tokens at once, filled up; then of each some tokens more. Where s is cut, so is the
    cache, and each row's outputs are on the rank that has its last token."""
    prompts, more = [3, 6, 1, 5, 2], [1, 2, 4, 1, 1]

    def program():
        with Mesh(**axes) as mesh:
            engine, cache, found = engine_on(mesh), Cache(), {}
            span = engine.batch_span(5)
            rows = range(span.start, span.stop)
            with engine.inference():
                for begins, counts in ([0] * 5, prompts), (prompts, more):
                    here = np.zeros((len(rows), max(counts)), int)
                    for line, row in zip(here, rows):
                        line[: counts[row]] = TOKENS[row, begins[row] : begins[row] + counts[row]]
                    step = decode_inputs(engine, here, cache, [counts[row] for row in rows], last=True)
                    y = engine.forward(step.inputs, step.ctx)
                    if y is not None:
                        y = Shards(mesh, engine.layout).gather_whole(y, "b s v", "v")
                        found |= {(begins[0] > 0, rows[row]): y[number, 0] for number, row in enumerate(step.rows)}
            return found, cache.lengths

    results = run_threads(program, tiny.ranks_of(axes))
    found = {key: scores for scores_by_key, _ in results for key, scores in scores_by_key.items()}
    assert len(found) == 10
    scores = whole(TOKENS)
    for (later, row), each in found.items():
        at = prompts[row] + later * more[row] - 1
        np.testing.assert_allclose(each, scores[row, at], rtol=0, atol=1e-12)
    lengths = {length for _, lengths in results for length in lengths}
    assert lengths == {prompt + each for prompt, each in zip(prompts, more)}
