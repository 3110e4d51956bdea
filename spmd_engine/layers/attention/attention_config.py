"""What attention computes besides its sizes: records whose fields are those of a DecoderConfig."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi

from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import UsageError


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


@dataclass(frozen=True)
class AttentionConfig(Configuration):
    """What attention computes besides its sizes; a DecoderConfig has the same fields.

    Heads have the width ``head_width``, by default width / heads. ``bias`` is that of queries, keys and values,
    ``output_bias`` that of the output. ``rotary`` rotates queries and keys by their positions; with ``qk_norm`` they
    are normalised before, or after if ``rope_before_norm``, each head or, with ``qk_norm_all_heads``, all heads of a
    token: see ``QKNormRope``. ``attention_scale`` replaces the factor 1 / sqrt(k) of the scores, which then, with an
    ``attention_cap``, are cap · tanh(scores / cap). With a ``window``, a query sees only that many positions, up to its
    own; with ``alibi``, scores decrease with the distance of the key: see ``Alibi``.
    """

    head_width: int | None = setting(None, least=1)
    bias: bool = True
    output_bias: bool = True
    rotary: RotaryOptions | None = None
    qk_norm: bool = False
    qk_norm_all_heads: bool = False
    rope_before_norm: bool = False
    epsilon: float = setting(1e-6, least=0)
    attention_scale: float | None = None
    attention_cap: float | None = None
    window: int | None = setting(None, least=1)
    alibi: float | None = setting(None, least=0)
