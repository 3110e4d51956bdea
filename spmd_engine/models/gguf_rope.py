"""Rotary positions as the facts of a GGUF file say them, and the tensors in which it keeps what no fact can."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import log
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.formats.tensor import FileTensor
from spmd_engine.layers.attention.rotary import RotaryOptions
from spmd_engine.models.huggingface_fields import must_be

_LEARNT = 8192  # positions before Llama 3.1 was scaled: what ``rope_freqs`` is made of, with a factor
_FREQUENCIES, _SHORT = "rope_freqs.weight", "rope_factors_short.weight"
IGNORED = (_FREQUENCIES, _SHORT, "rope_factors_long.weight")  #: tensors whose numbers the rotary options have


def as_written(value: float) -> float:
    """1e-5, of which a file keeps 32 bits: the shortest number that has these."""
    shorter = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((found for found in shorter if _narrow(found) == _narrow(value)), value)


def rotary_of_gguf(
    facts: Mapping[str, Any], tensors: Mapping[str, FileTensor], head_width: int, context: int
) -> RotaryOptions:
    """Of all blocks, or of those without a window; raises UsageError for what is not known here."""
    turned = facts.get("rope.dimension_count") or head_width
    plain = RotaryOptions(as_written(facts.get("rope.freq_base", 10_000.0)), part=turned / head_width)
    kind = facts.get("rope.scaling.type", "linear")
    factor = as_written(facts.get("rope.scaling.factor") or facts.get("rope.scale_linear") or 1.0)
    name = next((each for each in (_SHORT, _FREQUENCIES) if each in tensors), None)
    if name is not None:
        if kind not in ("none", "longrope"):
            must_be("rope.scaling.factor", factor, 1.0)
        divisors = tensors[name].read([[turned // 2]], [slice(None)]).tolist()
        if name == _FREQUENCIES:
            return _of_llama3(plain, divisors) or _divided(plain, divisors, context)
        magnitude = as_written(facts.get("rope.scaling.attn_factor") or 1.0)
        return _divided(plain, divisors, facts["rope.scaling.original_context_length"]).changed(magnitude=magnitude)
    if kind == "none" or factor == 1 and kind == "linear":
        return plain
    if kind == "linear":
        return plain.changed(scaling="linear", factor=factor)
    if kind != "yarn":
        known = f"none, linear, yarn, and longrope with {_SHORT}"
        raise UsageError(f"rope.scaling.type {kind!r} is not known here; known are {known}")
    must_be("rope.scaling.yarn_ext_factor", facts.get("rope.scaling.yarn_ext_factor", 1.0), 1.0)
    usual = _magnitude(factor) / _magnitude(factor, as_written(facts.get("rope.scaling.yarn_log_multiplier", 0.0)))
    return plain.changed(
        scaling="yarn",
        factor=factor,
        original_context=facts.get("rope.scaling.original_context_length") or context,
        fast_turns=as_written(facts.get("rope.scaling.yarn_beta_fast", 32.0)),
        slow_turns=as_written(facts.get("rope.scaling.yarn_beta_slow", 1.0)),
        magnitude=as_written(facts.get("rope.scaling.yarn_attn_factor") or 0.0) or usual,
    )


def rotary_in_window_of_gguf(facts: Mapping[str, Any], rotary: RotaryOptions, usual: float) -> RotaryOptions:
    """Of the blocks with a window, of families where they are turned in another way: never scaled."""
    return RotaryOptions(as_written(facts.get("rope.freq_base_swa", usual)), part=rotary.part)


def _of_llama3(plain: RotaryOptions, divisors: list[float]) -> RotaryOptions | None:
    """What Llama 3.1 calls its scaling, if these are its."""
    found = plain.changed(scaling="llama3", factor=float(round(max(divisors), 3)), original_context=_LEARNT)
    frequencies = zip(plain.frequencies(len(divisors)), found.frequencies(len(divisors)), divisors, strict=True)
    return found if all(abs(old / new - divisor) <= 1e-4 * divisor for old, new, divisor in frequencies) else None


def _divided(plain: RotaryOptions, divisors: list[float], learnt: int) -> RotaryOptions:
    written = ",".join(repr(as_written(each)) for each in divisors)
    return plain.changed(scaling="divided", divisors=written, original_context=learnt)


def _narrow(value: float) -> float:
    """With 32 bits."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0
