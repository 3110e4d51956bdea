"""The next tokens of sequences that a cache remembers: which of them this rank computes, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spmd_engine.arrays.attention import HIDDEN
from spmd_engine.arrays.backend import Array
from spmd_engine.errors import UsageError
from spmd_engine.layers.attention.kv_cache import Cache
from spmd_engine.layers.layer import ForwardContext
from spmd_engine.sharding.notation import nested_span

if TYPE_CHECKING:
    from spmd_engine.engine.layered import LayeredEngine


@dataclass(frozen=True)
class Growth:
    """What ``engine.forward(growth.inputs, growth.ctx)`` is given."""

    inputs: Array  #: [b s]: this rank's columns of the tokens
    ctx: ForwardContext
    rows: np.ndarray  #: if only the last outputs are wanted: the sequences here whose last token is among the inputs


def grow(
    engine: LayeredEngine, tokens: np.ndarray, cache: Cache, counts: Sequence[int] | None = None, *, last: bool = False
) -> Growth:
    """Put tokens[b s], of this rank's sequences and whole in s, at the ends of the cached sequences.

    Of row b only the first ``counts[b]`` (at least one) are tokens, the others fill it up. Where s is cut over ranks,
    each takes its part of the columns; of a single one, it is the ranks' turn, so that the cache is cut evenly. With
    ``last`` the outputs are those of each sequence's last token, [n 1 ...] for ``rows``. Raises UsageError for
    sequences that become longer than the model's context.
    """
    if engine.is_training:
        raise UsageError("forward with a cache remembers nothing for a backward; call it in engine.inference()")
    begins, length = np.array(cache.check(len(tokens)), np.int64), tokens.shape[1]
    counts = np.full(len(tokens), length) if counts is None else np.asarray(counts, np.int64)
    longest = int((begins + counts).max(initial=0))
    if 0 < engine.model.context < longest:
        raise UsageError(
            f"{engine.model.name}: {longest} positions with those of the cache, but the context is "
            f"{engine.model.context}"
        )
    columns = _columns(engine, length, int(begins.max(initial=0)))
    valid = columns < counts[:, None]
    positions = begins[:, None] + np.minimum(columns, counts[:, None] - 1)
    cache.begin(engine.backend.asarray(np.where(valid, positions, HIDDEN)), counts.tolist())
    residual = engine.layout.axes("s", "residual")[len(engine.layout.axes("s")) :]
    part = nested_span(len(columns), residual, engine.mesh.axes, engine.mesh.coordinates)
    wanted, rows = None, np.arange(len(tokens))
    if last:
        rows, at = (columns == counts[:, None] - 1).nonzero()
        wanted = engine.backend.asarray(rows), engine.backend.asarray(at)
    ctx = ForwardContext(
        engine.backend.asarray(positions),
        engine.backend.asarray(positions[:, part]),
        seed=engine.seed,
        length=length,
        cache=cache,
        wanted=wanted,
    )
    return Growth(tokens[:, columns], ctx, rows)


def _columns(engine: LayeredEngine, length: int, begin: int) -> np.ndarray:
    """This rank's columns of so many new ones."""
    ranks = engine.mesh.axis_size(engine.layout.axes("s"))
    if length >= ranks:
        return engine.layout.positions(length, engine.mesh)
    turn = (np.arange(length) + begin) % ranks
    return np.flatnonzero(turn == engine.mesh.index(engine.layout.axes("s")))
