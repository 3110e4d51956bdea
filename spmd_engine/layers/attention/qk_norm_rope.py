"""Rotary positions, and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, log, pi, prod
from typing import Any

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.normalization import rms_norm, rms_norm_backward, rms_norm_backward_scale
from spmd_engine.arrays.precision import rounded, scaled, widened
from spmd_engine.arrays.rotary import Turn, rotate, turn_at
from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import UsageError
from spmd_engine.layers.declarations import Parameter
from spmd_engine.sharding.shards import Shards


@dataclass(frozen=True)
class RotaryOptions(Configuration):
    """The rotation of queries and keys: pair i of n by position · theta^(-i/n), and the ``scaling`` of frequencies.

    ``linear`` divides all frequencies by ``factor``. ``llama3`` divides those with a wavelength, in positions, above
    ``original_context / low_frequency_factor``, keeps those with one below ``original_context /
    high_frequency_factor``, and interpolates between them (Llama 3.1). ``yarn`` interpolates by the number of the pair,
    between those that make ``fast_turns`` and ``slow_turns`` turns in ``original_context`` positions (Peng et al.,
    "YaRN", 2023). ``divided`` divides each frequency by one of the ``divisors``. All in float64.
    """

    theta: float = setting(10_000.0, least=1)
    pairs: str = setting("halves", choices=("halves", "neighbours"))  #: i and i + n, or 2i and 2i + 1
    part: float = setting(1.0, least=0, most=1)  #: fraction of each head that is rotated: its first numbers
    scaling: str = setting("none", choices=("none", "linear", "llama3", "yarn", "divided"))
    factor: float = setting(1.0, least=1)
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = setting(8192, least=1)  #: positions that the model was trained on before ``scaling``
    fast_turns: float = setting(32.0, least=0)
    slow_turns: float = setting(1.0, least=0)
    whole_pairs: bool = True  #: whether ``yarn`` rounds its two limits outwards to whole numbers of pairs
    divisors: str = ""  #: comma-separated numbers, one per pair
    magnitude: float = setting(1.0, least=0)  #: factor of rotated queries and keys

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise UsageError(
                f"rotary: low_frequency_factor {self.low_frequency_factor} must be positive and below "
                f"high_frequency_factor {self.high_frequency_factor}"
            )
        if self.scaling == "yarn" and not 0 < self.slow_turns <= self.fast_turns:
            raise UsageError(f"rotary: slow_turns {self.slow_turns} must be positive and at most {self.fast_turns}")

    def frequencies(self, pairs: int) -> list[float]:
        """The frequency of each pair, in radians a position."""
        plain = [self.theta ** (-pair / pairs) for pair in range(pairs)]
        if self.scaling == "none":
            return plain
        if self.scaling == "linear":
            return [frequency / self.factor for frequency in plain]
        if self.scaling == "yarn":
            return self._as_yarn(plain)
        if self.scaling == "divided":
            return [frequency / divisor for frequency, divisor in zip(plain, self._divisors(pairs), strict=True)]
        return [self._as_llama3(frequency) for frequency in plain]

    def _as_llama3(self, frequency: float) -> float:
        periods = self.original_context * frequency / (2 * pi)  # in the original context
        span = self.high_frequency_factor - self.low_frequency_factor
        share = min(1.0, max(0.0, (periods - self.low_frequency_factor) / span))
        return frequency * (share + (1 - share) / self.factor)

    def _as_yarn(self, plain: list[float]) -> list[float]:
        def pair_with(turns: float) -> float:
            return len(plain) * log(self.original_context / (turns * 2 * pi)) / log(self.theta)

        first, last = pair_with(self.fast_turns), pair_with(self.slow_turns)
        if self.whole_pairs:
            first, last = floor(first), ceil(last)
        first, last = max(first, 0), min(last, 2 * len(plain) - 1)
        span = last - first or 0.001
        shares = (min(1.0, max(0.0, (pair - first) / span)) for pair in range(len(plain)))
        return [frequency * (1 - share + share / self.factor) for frequency, share in zip(plain, shares, strict=True)]

    def _divisors(self, pairs: int) -> list[float]:
        try:
            divisors = [float(number) for number in self.divisors.split(",")]
        except ValueError:
            raise UsageError(f"rotary: divisors is {self.divisors!r}: write numbers with commas between them") from None
        if len(divisors) != pairs or min(divisors) <= 0:
            raise UsageError(f"rotary: {len(divisors)} divisors for {pairs} pairs; write one positive number for each")
        return divisors


class Rotary:
    """Rotary positions for heads of a width; one object without state serves all layers of a model."""

    def __init__(self, width: int, options: RotaryOptions) -> None:
        turned = int(width * options.part)
        if turned % 2:
            raise UsageError(f"rotary: {turned} numbers of a head of {width} are not pairs; rotate an even number")
        self.neighbours = options.pairs == "neighbours"
        self.frequencies, self.magnitude = options.frequencies(turned // 2), options.magnitude

    def turn(self, positions: Array, like: Array) -> Turn:
        """The turns of all pairs at positions[s] or [b s], on the device of ``like`` and in its dtype."""
        cosines, sines = turn_at(positions, backend_of(like).constant(self.frequencies), like)
        return (cosines, sines) if self.magnitude == 1 else (cosines * self.magnitude, sines * self.magnitude)


# --- Queries and keys before their products: normalized, then rotated by their positions


class QueriesAndKeys:
    """q[b s h k] = rotate(norm(q) · query_norm), and the same for k; both steps are optional

    Queries are then multiplied by ``factor``, the scale of the scores besides 1 / sqrt(k).

    ``heads`` are the letters of the heads of queries and of keys, ``sizes`` the sizes of these and of k. A norm is that
    of one head, with query_norm[k], or, with ``together``, of all heads of a token, with query_norm[h k]. If heads are
    sharded, a rank's heads give only a part of the gradient of a scale that all heads share: it is summed over them,
    too. The gradients of keys and of their norm are unreduced over r, the queries that share them. With
    ``turned_first`` the order is norm(rotate(q)).
    """

    def __init__(
        self,
        heads: Mapping[str, str],
        sizes: Mapping[str, int],
        rotary: Rotary | None = None,
        norm_epsilon: float | None = None,
        together: bool = False,
        factor: float = 1.0,
        turned_first: bool = False,
    ) -> None:
        self.rotary, self.factor, self.turned_first = rotary, factor, turned_first
        self.parameters: dict[str, Parameter] = {}
        self.norms: dict[str, NormOfHead | NormOfAllHeads | None] = {"query": None, "key": None}
        if norm_epsilon is None:
            return
        for name in self.norms:
            h_dims, dims, summed = heads[name], "k", "bs" + heads["query"]
            self.norms[name] = NormOfHead(norm_epsilon)
            if together:
                dims, summed = " ".join(h_dims + "k"), "bs" + heads["query"].removeprefix(h_dims)
                self.norms[name] = NormOfAllHeads(norm_epsilon, h_dims, prod(sizes[letter] for letter in h_dims + "k"))
            self.parameters[f"{name}_norm"] = Parameter(dims, mean=1.0, decay=False, summed=summed)

    def forward(
        self, sh: Shards, p: Any, q: Array, k: Array, positions: Array, turns: dict[Rotary, Turn] | None = None
    ) -> tuple[Array, Array, Any]:
        """q and k, normalized and rotated, and what the backward needs; ``positions`` are [s], or [b s].

        ``turns`` has the turns of these positions that other layers have computed; missing ones are added.
        """
        turn = None if self.rotary is None or turns is None else turns.get(self.rotary)
        if self.rotary is not None and turn is None:
            turn = self.rotary.turn(positions, q)
            if turns is not None:
                turns[self.rotary] = turn
        results, normals = {}, {}
        for (name, norm), x in zip(self.norms.items(), (q, k), strict=True):
            x = self._rotated(x, turn, self.turned_first)
            if norm is not None:
                x, normals[name] = norm.forward(sh, x, p[f"{name}_norm"])
            results[name] = self._rotated(x, turn, not self.turned_first)
        if self.factor != 1:
            results["query"] = scaled(results["query"], self.factor)
        return results["query"], results["key"], (turn, normals)

    def _rotated(self, x: Array, turn: Turn | None, now: bool, *, back: bool = False) -> Array:
        """x[b s h k] with its pairs rotated, if there is a ``turn`` and it is applied ``now``."""
        return (
            x if self.rotary is None or turn is None or not now else rotate(x, turn, self.rotary.neighbours, back=back)
        )

    def backward(self, sh: Shards, p: Any, saved: Any, gradients: dict[str, Array]) -> dict[str, Array]:
        """Replace ``gradients`` of the results by those of q and k; returns the gradients of the norms' scales."""
        turn, normals = saved
        scale_gradients = {}
        if self.factor != 1:
            gradients["query"] = scaled(gradients["query"], self.factor)
        for name, norm in self.norms.items():
            dx = self._rotated(gradients[name], turn, not self.turned_first, back=True)
            if norm is not None:
                scale = f"{name}_norm"
                dx, scale_gradients[scale] = norm.backward(sh, normals[name], p[scale], dx)
            gradients[name] = self._rotated(dx, turn, self.turned_first, back=True)
        return scale_gradients


# --- Norms of queries or keys: of each head by itself, or of all heads of a token together


class NormOfHead:
    """y[b s h k] = x / sqrt(mean(x²) + epsilon) · scale[k], the mean over k"""

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def forward(self, sh: Shards, x: Array, scale: Array) -> tuple[Array, Any]:
        """y, and what the backward needs."""
        y, *saved = rms_norm(x, scale, self.epsilon)
        return y, saved

    def backward(self, sh: Shards, saved: Any, scale: Array, dy: Array) -> tuple[Array, Array]:
        """dx and dscale."""
        normal, inverse = saved
        return rms_norm_backward(dy, normal, inverse, scale), rms_norm_backward_scale(dy, normal)


class NormOfAllHeads:
    """y[b s h k] = x / sqrt(mean(x²) + epsilon) · scale[h k], the mean over h and k, ``many`` numbers

    ``heads`` are the letters h of the heads, which may be sharded:

        1. squares[b s] {U_h} = sum of x² over this rank's heads,    squares[b s] = AllReduce_h(...)
        2. n = x / sqrt(squares / many + epsilon),                   y = n · scale
    Backward, linear in dy, which may be unreduced over other letters than h:
        3. g = dy · scale,   along[b s] = AllReduce_h(sum of g · n over this rank's heads)
        4. dx = (g - n · along / many) / sqrt(...),                  dscale = sum of dy · n over b and s
    """

    def __init__(self, epsilon: float, heads: str, many: int) -> None:
        self.epsilon, self.heads, self.many = epsilon, heads, many

    def forward(self, sh: Shards, x: Array, scale: Array) -> tuple[Array, Any]:
        """y, and what the backward needs."""
        xp, dtype, x = backend_of(x).xp, x.dtype, widened(x)
        squares = sh.all_reduce(_sum_over_heads(x * x), over=self.heads)
        inverse = _expand_to_heads(1.0 / xp.sqrt(squares / self.many + self.epsilon), x)
        normal = x * inverse
        return rounded(normal * scale, dtype), (rounded(normal, dtype), inverse)

    def backward(self, sh: Shards, saved: Any, scale: Array, dy: Array) -> tuple[Array, Array]:
        """dx and dscale."""
        normal, inverse = saved
        xp, dtype = backend_of(dy).xp, dy.dtype
        dy, normal, scale = widened(dy), widened(normal), widened(scale)
        weighted = dy * normal
        dscale = weighted.sum(axis=(0, 1))
        weighted *= scale
        along = sh.all_reduce(_sum_over_heads(weighted), over=self.heads)
        dx = dy * scale
        dx -= normal * _expand_to_heads(along / self.many, dy)
        dx *= inverse
        return rounded(xp.ascontiguousarray(dx), dtype), dscale


def _sum_over_heads(x: Array) -> Array:
    """The sums [b s] of x[b s h k], or [b s h r k]."""
    return x.sum(axis=tuple(range(2, x.ndim)))


def _expand_to_heads(x: Array, like: Array) -> Array:
    """x[b s] as [b s 1 1], or [b s 1 1 1], to be multiplied with ``like``."""
    return x.reshape(*x.shape, *[1] * (like.ndim - 2))
