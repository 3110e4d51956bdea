"""Rotary positions as ``config.json`` says them: ``rope_parameters``, or ``rope_theta`` beside ``rope_scaling``."""

from __future__ import annotations

from collections.abc import Mapping
from math import log, sqrt
from typing import Any

from spmd_engine.errors import UsageError, one_of
from spmd_engine.layers.attention.rotary import RotaryOptions

_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
#: What else each kind has. Of ``mrope_section`` and its like nothing is known here.
_FIELDS = {
    "default": {"factor"},  # without effect
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},  # without effect up to the context
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    },
    "longrope": {
        "factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor", "short_mscale",
        "long_mscale",
    },
}  # fmt: skip
_ALSO = {"su": "longrope", "none": "default", None: "default"}


def rotary_of_config(
    config: Mapping[str, Any], usual_theta: float, context: int, *, part: float | None = None, renamed: bool = False
) -> RotaryOptions:
    """Of a model whose rotary positions are the same in all layers; ``context`` is what the config calls so.

    ``part`` is how much of a head is turned where they do not say it; ``renamed`` that it is Phi-3, which once called
    ``longrope`` yarn. Raises UsageError for what is not known here, and if old fields and new ones differ.
    """
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    for name in "rope_theta", "partial_rotary_factor":
        outside = config.get(name)
        for said in (old, new):
            inside = said.get(name) if said else None
            if outside is not None and inside is not None and float(outside) != float(inside):
                raise UsageError(f"{name} is {outside}, but {inside} in {said}; leave the wrong one out")
    theta, found = config.get("rope_theta") or usual_theta, []
    for said in [each for each in (old, new) if each] or [{}]:
        if said.get("partial_rotary_factor") is None:
            said = {**said, "partial_rotary_factor": part}
        if renamed and (said.get("rope_type") or said.get("type")) == "yarn":
            said = {**said, "rope_type": "longrope"}
        found.append(rotary_of(said, theta, config, context))
    if found[0] != found[-1]:
        raise UsageError(f"rope_scaling {old} and rope_parameters {new} differ; leave the wrong one out")
    return found[0]


def rotary_of(said: Mapping[str, Any], theta: float, config: Mapping[str, Any], context: int) -> RotaryOptions:
    """Of one such object. ``dynamic`` positions change beyond the context alone, and so not at all here."""
    kind = said.get("rope_type") or said.get("type")
    kind = _ALSO.get(kind, kind)
    if kind not in _FIELDS:
        raise UsageError(f"rope_type {kind!r} is not known here; {one_of(kind, _FIELDS)}")
    for name in said.keys() - _COMMON - _FIELDS[kind]:
        if said[name]:
            raise UsageError(f"{name} of rope_type {kind!r} is {said[name]!r}, a feature that is not known here")
    theta = float(said.get("rope_theta") or theta)
    part = said.get("partial_rotary_factor")
    plain = RotaryOptions(theta, part=1.0 if part is None else float(part))
    if kind in ("default", "dynamic"):
        return plain
    if kind == "linear":
        return plain.changed(scaling="linear", factor=float(said["factor"]))
    learnt = config.get("original_max_position_embeddings") or said.get("original_max_position_embeddings") or context
    if kind == "llama3":
        return plain.changed(
            scaling="llama3",
            factor=float(said["factor"]),
            low_frequency_factor=float(said["low_freq_factor"]),
            high_frequency_factor=float(said["high_freq_factor"]),
            original_context=learnt,
        )
    factor = float(said.get("factor") or context / learnt)
    magnitude = said.get("attention_factor")
    if kind == "yarn":
        return plain.changed(
            scaling="yarn",
            factor=factor,
            original_context=learnt,
            fast_turns=float(said.get("beta_fast") or 32),
            slow_turns=float(said.get("beta_slow") or 1),
            whole_pairs=bool(said.get("truncate", True)),
            magnitude=_magnitude_of_yarn(said, factor) if magnitude is None else float(magnitude),
        )
    if magnitude is None:
        magnitude = sqrt(1 + log(factor) / log(learnt)) if factor > 1 else 1.0
    divisors = ",".join(repr(float(each)) for each in said["short_factor"])
    return plain.changed(scaling="divided", divisors=divisors, original_context=learnt, magnitude=float(magnitude))


def _magnitude_of_yarn(said: Mapping[str, Any], factor: float) -> float:
    def of(scale: float) -> float:
        return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0

    one, other = said.get("mscale"), said.get("mscale_all_dim")
    return of(one) / of(other) if one and other else of(1.0)


def rope_of(rotary: RotaryOptions) -> dict[str, Any]:
    """What ``rope_parameters`` says of them."""
    kind = {"none": "default", "divided": "longrope"}.get(rotary.scaling, rotary.scaling)
    rope: dict[str, Any] = {"rope_theta": rotary.theta, "rope_type": kind}
    if rotary.part != 1:
        rope["partial_rotary_factor"] = rotary.part
    if kind in ("linear", "llama3", "yarn"):
        rope["factor"] = rotary.factor
    if kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = rotary.original_context
    if kind == "llama3":
        rope |= {"low_freq_factor": rotary.low_frequency_factor, "high_freq_factor": rotary.high_frequency_factor}
    if kind == "yarn":
        rope |= {"beta_fast": rotary.fast_turns, "beta_slow": rotary.slow_turns, "truncate": rotary.whole_pairs}
    if kind == "longrope":
        divisors = [float(each) for each in rotary.divisors.split(",")]
        rope |= {"short_factor": divisors, "long_factor": divisors}
    if kind in ("yarn", "longrope"):
        rope["attention_factor"] = rotary.magnitude
    return rope
