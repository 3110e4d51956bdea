"""Rotary positions of a model: by which angles the pairs of a head are turned."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.rotary import Turn, turn_at
from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import UsageError


@dataclass(frozen=True)
class RotaryOptions(Configuration):
    """How queries and keys are turned: pair number i of n by position · theta^(-i/n), unless ``scaling`` says else.

    ``linear`` divides all frequencies by ``factor``. ``llama3`` divides those whose wavelength, in positions, is
    longer than ``original_context / low_frequency_factor``, leaves those alone that are shorter than
    ``original_context / high_frequency_factor``, and blends between (Llama 3.1).
    """

    theta: float = setting(10_000.0, least=1)
    pairs: str = setting("halves", choices=("halves", "neighbours"))  #: i and i + n, or 2i and 2i + 1
    scaling: str = setting("none", choices=("none", "linear", "llama3"))
    factor: float = setting(1.0, least=1)
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = setting(8192, least=1)  #: positions that a model with ``scaling`` had learnt before

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise UsageError(
                f"rotary: low_frequency_factor {self.low_frequency_factor} must be positive and below "
                f"high_frequency_factor {self.high_frequency_factor}"
            )

    def frequencies(self, pairs: int) -> list[float]:
        """Of each of so many pairs, in radians a position."""
        plain = [self.theta ** (-pair / pairs) for pair in range(pairs)]
        if self.scaling == "none":
            return plain
        if self.scaling == "linear":
            return [frequency / self.factor for frequency in plain]
        return [self._as_llama3(frequency) for frequency in plain]

    def _as_llama3(self, frequency: float) -> float:
        periods = self.original_context * frequency / (2 * pi)  # in what was learnt before
        span = self.high_frequency_factor - self.low_frequency_factor
        kept = min(1.0, max(0.0, (periods - self.low_frequency_factor) / span))
        return frequency * (kept + (1 - kept) / self.factor)


class Rotary:
    """``options`` for heads of a width: shared by all layers of a model, and nothing of a micro-batch is kept."""

    def __init__(self, width: int, options: RotaryOptions) -> None:
        if width % 2:
            raise UsageError(f"rotary positions turn pairs: heads of width {width} have one number left over")
        self.neighbours = options.pairs == "neighbours"
        self.frequencies = options.frequencies(width // 2)

    def turn(self, positions: Array, like: Array) -> Turn:
        """The turns of all pairs at these positions[s], or [b s], where ``like`` lives and in its dtype."""
        return turn_at(positions, backend_of(like).xp.asarray(self.frequencies), like)
