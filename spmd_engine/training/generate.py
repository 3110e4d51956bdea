"""Text from a model: one token after the other, each drawn from the scores of the last position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_engine.arrays.backend import backend_of
from spmd_engine.arrays.random import hash_bits, key_of
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import UsageError
from spmd_engine.layers.cache import Cache
from spmd_engine.sharding.shards import Shards


def generate(
    engine: LayeredEngine,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """``count`` tokens that follow ``prompt``, the same on every rank. Collective.

    Temperature 0 takes the likeliest token; otherwise the draw is a function of the seed and of the token's
    number. Only the last ``context`` tokens are looked at. One rank draws, so that ranks cannot part ways. Raises
    UsageError for an empty prompt and for a model that takes no tokens.
    """
    if not prompt:
        raise UsageError("generate: the prompt is empty; give at least one character")
    if not engine.model.vocabulary:
        raise UsageError(f"generate: {engine.model.name} is no model of text, it takes no tokens")
    tokens = list(prompt)
    group = engine.group()
    # While all positions fit, only the new ones are computed: beyond, each is another one with every token.
    cache = None if engine.layout.axes("s") else Cache()
    with engine.inference():
        for number in range(count):
            if len(tokens) > engine.model.context:
                cache = None
            known = len(tokens) - 1 if cache is not None and number else 0
            scores = _last_scores(engine, np.array([tokens[known:][-engine.model.context :]]), cache)
            here = scores is not None
            holders = group.all_gather(np.array([here]), label="generate")
            first = int(holders.argmax())
            token = None
            if group.rank == first:
                token = np.array(_draw(backend_of(scores).to_host(scores), temperature, seed, number))
            tokens.append(int(group.broadcast(token, first, label="generate")))
    return tokens[len(prompt) :]


def _last_scores(engine: LayeredEngine, window: np.ndarray, cache: Cache | None) -> np.ndarray | None:
    """Scores[v] of what follows window[1 s], whole, on the ranks that have the outputs."""
    (rows,) = engine.cut_rows(window[engine.batch_span(1)], None)[:1]
    y = engine.forward(engine.backend.asarray(rows), cache=cache)
    if y is None:
        return None
    if engine.layout.axes("s"):
        return engine.join_outputs(y, "generate")[0, -1]
    shards = Shards(engine.mesh, engine.layout, "generate")
    y = shards.gather_whole(y[:, -1], "b v", "v")
    return y[0] if len(y) else None


def _draw(scores: np.ndarray, temperature: float, seed: int, number: int) -> int:
    if temperature <= 0:
        return int(scores.argmax())
    scaled = scores.astype(np.float64) / temperature
    chances = np.cumsum(np.exp(scaled - scaled.max()))
    bits = hash_bits(key_of(seed, "generate"), np.array([number], np.uint64))[0]
    return int(min(np.searchsorted(chances, (float(bits) + 0.5) * 2.0**-32 * chances[-1]), len(scores) - 1))
