"""Attention whose scores fall with the distance of the key: ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2, prod, sqrt

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.sharding.shards import Shards


class Alibi:
    """Scores q · k / sqrt(k) + slope[h] · t, for keys at position t: as one more number in queries and keys

    A softmax is the same if all its scores are less by slope · s, the query's position: so this is a penalty on the
    distance s - t. A key that has its position with it may be cached, and travel to other ranks, as any other. Queries
    get their head's slope, values a 0, which is cut off from what is mixed of them. Press et al., "Train short, test
    long" (2022), whose slopes are 2^(-8 i / n) for heads i from 1 to n; of n that is no power of 2, those of the next
    one, first every other of them.
    """

    def __init__(self, heads: str, sizes: Mapping[str, int], steepest: float) -> None:
        """``heads`` are the letters of queries' heads; slopes are from 2^(-``steepest`` / n) to 2^-``steepest``."""
        self.heads, self.sizes = heads, sizes
        self.slopes = _slopes(prod(sizes[letter] for letter in heads), steepest)

    def widen(self, sh: Shards, q: Array, k: Array, v: Array, positions: Array) -> tuple[Array, Array, Array]:
        """q, k and v with one more number each; ``positions`` are [s], or [b s]."""
        xp, width = backend_of(q).xp, q.shape[-1]
        slopes = xp.asarray(self.slopes, dtype=q.dtype).reshape([self.sizes[letter] for letter in self.heads])
        slopes = slopes[tuple(sh.span(letter, self.sizes[letter]) for letter in self.heads)]
        at = xp.asarray(positions, dtype=q.dtype)
        at = at.reshape(*([1] * (2 - at.ndim)), *at.shape, 1)
        scale = sqrt(width + 1)  # by which the scores are divided
        return (
            _with_last(q * (scale / sqrt(width)), slopes * scale),
            _with_last(k, at),
            _with_last(v, 0),
        )

    @staticmethod
    def with_zeros(dmixed: Array) -> Array:
        """The gradient of the mixed values as they are before a number is cut off."""
        return _with_last(dmixed, 0)

    @staticmethod
    def narrow(gradients: dict[str, Array]) -> None:
        """Make the gradients of queries, keys and values those of what was before one number more."""
        for name, gradient in gradients.items():
            width = gradient.shape[-1] - 1
            narrow = gradient[..., :-1]
            gradients[name] = narrow * sqrt((width + 1) / width) if name == "query" else narrow.copy()


def _with_last(x: Array, last: Array | int) -> Array:
    """x[... k] with one number more behind k."""
    y = backend_of(x).xp.empty((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
    y[..., :-1], y[..., -1] = x, last
    return y


def _slopes(heads: int, steepest: float) -> list[float]:
    full = 2 ** ceil(log2(heads))
    all_of_them = [2.0 ** (-steepest * i / full) for i in range(1, full + 1)]
    return all_of_them if full == heads else [*all_of_them[1::2], *all_of_them[::2]][:heads]
