"""Rotary positions of a model: by which angles the pairs of a head are turned."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.rotary import Turn, turn_at
from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import UsageError


@dataclass(frozen=True)
class RotaryOptions(Configuration):
    """How queries and keys are turned: pair number i of n by position · theta^(-i/n), unless ``scaling`` says else.

    ``linear`` divides all frequencies by ``factor``. ``llama3`` divides those whose wavelength, in positions, is
    longer than ``original_context / low_frequency_factor``, leaves those alone that are shorter than
    ``original_context / high_frequency_factor``, and blends between (Llama 3.1). ``yarn`` blends by the number of the
    pair, between those that make ``fast_turns`` and ``slow_turns`` turns in ``original_context`` positions (Peng et
    al., "YaRN", 2023). ``divided`` divides each by its own of the ``divisors``. All in float64.
    """

    theta: float = setting(10_000.0, least=1)
    pairs: str = setting("halves", choices=("halves", "neighbours"))  #: i and i + n, or 2i and 2i + 1
    part: float = setting(1.0, least=0, most=1)  #: of each head that is turned: its first numbers
    scaling: str = setting("none", choices=("none", "linear", "llama3", "yarn", "divided"))
    factor: float = setting(1.0, least=1)
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = setting(8192, least=1)  #: positions that a model with ``scaling`` had learnt before
    fast_turns: float = setting(32.0, least=0)
    slow_turns: float = setting(1.0, least=0)
    whole_pairs: bool = True  #: whether those two limits of ``yarn`` are rounded outwards to whole numbers of pairs
    divisors: str = ""  #: numbers with commas, one a pair
    magnitude: float = setting(1.0, least=0)  #: by which queries and keys are multiplied as they are turned

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
        """Of each of so many pairs, in radians a position."""
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
        periods = self.original_context * frequency / (2 * pi)  # in what was learnt before
        span = self.high_frequency_factor - self.low_frequency_factor
        kept = min(1.0, max(0.0, (periods - self.low_frequency_factor) / span))
        return frequency * (kept + (1 - kept) / self.factor)

    def _as_yarn(self, plain: list[float]) -> list[float]:
        def pair_with(turns: float) -> float:
            return len(plain) * log(self.original_context / (turns * 2 * pi)) / log(self.theta)

        first, last = pair_with(self.fast_turns), pair_with(self.slow_turns)
        if self.whole_pairs:
            first, last = floor(first), ceil(last)
        first, last = max(first, 0), min(last, 2 * len(plain) - 1)
        span = last - first or 0.001
        shares = (min(1.0, max(0.0, (pair - first) / span)) for pair in range(len(plain)))
        return [each * (1 - share + share / self.factor) for each, share in zip(plain, shares, strict=True)]

    def _divisors(self, pairs: int) -> list[float]:
        try:
            found = [float(each) for each in self.divisors.split(",")]
        except ValueError:
            raise UsageError(f"rotary: divisors is {self.divisors!r}: it is numbers with commas") from None
        if len(found) != pairs or min(found) <= 0:
            raise UsageError(f"rotary: {len(found)} divisors for {pairs} pairs; there is a positive one for each")
        return found


class Rotary:
    """``options`` for heads of a width: shared by all layers of a model, and nothing of a micro-batch is kept."""

    def __init__(self, width: int, options: RotaryOptions) -> None:
        turned = int(width * options.part)
        if turned % 2:
            raise UsageError(f"rotary positions turn pairs: {turned} of heads of width {width} have one left over")
        self.neighbours = options.pairs == "neighbours"
        self.frequencies, self.magnitude = options.frequencies(turned // 2), options.magnitude

    def turn(self, positions: Array, like: Array) -> Turn:
        """The turns of all pairs at these positions[s], or [b s], where ``like`` lives and in its dtype."""
        cosines, sines = turn_at(positions, backend_of(like).xp.asarray(self.frequencies), like)
        return (cosines, sines) if self.magnitude == 1 else (cosines * self.magnitude, sines * self.magnitude)
