"""Rotary positions in ``config.json``: ``rope_parameters``, or ``rope_theta`` beside ``rope_scaling``."""

from __future__ import annotations

from collections.abc import Mapping
from math import log, sqrt
from typing import Any

from spmd_engine.errors import UsageError, one_of
from spmd_engine.layers import RotaryOptions
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.families.family import Config, Rope

_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
#: Other fields of each kind. ``mrope_section`` and the like are not supported.
_FIELDS = {
    "default": {"factor"},  # without effect
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},  # without effect up to the context
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate"
    },
    "longrope": {
        "factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor", "short_mscale",
        "long_mscale"
    }
}  # fmt: skip
_ALIASES = {"su": "longrope", "none": "default", None: "default"}


def with_rotary(config: Config, shape: DecoderConfig, rope: Rope) -> DecoderConfig:
    """Return the decoder with the rotary positions of its config, and a context in which they are constant.

    Raises UsageError for unsupported options, and if old and new fields differ.
    """
    if rope.read is not None:
        shape = shape.changed(rotary=rope.read(config, shape))
    elif rope.in_windows:
        everywhere, near = _fields_by_window(config)
        theta = config.get("rope_theta") or rope.theta
        window_theta = theta if rope.window_theta is None else config.get(rope.window_theta_field) or rope.window_theta
        shape = shape.changed(
            rotary=_rotary(everywhere, theta, config, shape.context),
            window_rotary=_rotary(near, window_theta, config, shape.context),
        )
    else:
        shape = shape.changed(rotary=rotary_of_config(config, shape, rope).changed(pairs=rope.pairs))
    if shape.rotary.scaling == "divided":  # longer sequences have other divisors
        shape = shape.changed(context=min(shape.context, shape.rotary.original_context))
    return shape


def rotary_of_config(config: Config, shape: DecoderConfig, rope: Rope) -> RotaryOptions:
    """Return the rotary positions of a model that has the same in all layers. Raises UsageError."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if new:
        new = {name: value for name, value in new.items() if name not in rope.ignored}
    for name in "rope_theta", "partial_rotary_factor":
        outside = config.get(name)
        for fields in (old, new):
            inside = fields.get(name) if fields else None
            if outside is not None and inside is not None and float(outside) != float(inside):
                raise UsageError(f"{name} is {outside}, but {inside} in {fields}; remove the wrong one")
    theta = config.get("rope_theta") or config.get(rope.theta_field) or rope.theta
    part = config.get(rope.part_field, config.get("partial_rotary_factor"))
    options = []
    for fields in [fields for fields in (old, new) if fields] or [{}]:
        if fields.get("partial_rotary_factor") is None:
            fields = {**fields, "partial_rotary_factor": rope.part if part is None else part}
        kind = str(fields.get("rope_type") or fields.get("type"))
        if kind in rope.kinds:
            fields = {**fields, "rope_type": rope.kinds[kind]}
        options.append(_rotary(fields, theta, config, shape.context))
    if options[0] != options[-1]:
        raise UsageError(f"rope_scaling {old} and rope_parameters {new} differ; remove the wrong one")
    if options[0].part != 1 and rope.part is None:
        raise UsageError(f"partial_rotary_factor is {options[0].part}, which is not supported in a {shape.family}")
    return options[0]


def _fields_by_window(config: Config) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the fields of layers without a window, and of layers with one."""
    fields, old = config.get("rope_parameters") or {}, config.get("rope_scaling")
    nested = {name: value for name, value in fields.items() if isinstance(value, Mapping)}
    if unknown := sorted(fields.keys() - nested.keys()):
        raise UsageError(f"rope_parameters has {unknown[0]!r}, but must have only full_attention and sliding_attention")
    return nested.get("full_attention") or old or {}, nested.get("sliding_attention") or {}


def _rotary(fields: Mapping[str, Any], theta: float, config: Config, context: int) -> RotaryOptions:
    """Return the options in an object of rope fields. ``dynamic`` positions change only beyond the context."""
    kind = fields.get("rope_type") or fields.get("type")
    kind = _ALIASES.get(kind, kind)
    if kind not in _FIELDS:
        raise UsageError(f"rope_type {kind!r} is not supported; {one_of(kind, _FIELDS)}")
    for name in fields.keys() - _COMMON - _FIELDS[kind]:
        if fields[name]:
            raise UsageError(f"{name} of rope_type {kind!r} is {fields[name]!r}, which is not supported")
    theta = float(fields.get("rope_theta") or theta)
    part = fields.get("partial_rotary_factor")
    plain = RotaryOptions(theta, part=1.0 if part is None else float(part))
    if kind in ("default", "dynamic"):
        return plain
    if kind == "linear":
        return plain.changed(scaling="linear", factor=float(fields["factor"]))
    original = (
        config.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings") or context
    )
    if kind == "llama3":
        return plain.changed(
            scaling="llama3",
            factor=float(fields["factor"]),
            low_frequency_factor=float(fields["low_freq_factor"]),
            high_frequency_factor=float(fields["high_freq_factor"]),
            original_context=original,
        )
    factor = float(fields.get("factor") or context / original)
    magnitude = fields.get("attention_factor")
    if kind == "yarn":
        return plain.changed(
            scaling="yarn",
            factor=factor,
            original_context=original,
            fast_turns=float(fields.get("beta_fast") or 32),
            slow_turns=float(fields.get("beta_slow") or 1),
            whole_pairs=bool(fields.get("truncate", True)),
            magnitude=_magnitude_of_yarn(fields, factor) if magnitude is None else float(magnitude),
        )
    if magnitude is None:
        magnitude = sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
    divisors = ",".join(repr(float(divisor)) for divisor in fields["short_factor"])
    return plain.changed(scaling="divided", divisors=divisors, original_context=original, magnitude=float(magnitude))


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Return the factor of queries and keys for ``yarn``."""
    return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0


def _magnitude_of_yarn(fields: Mapping[str, Any], factor: float) -> float:
    scale, total = fields.get("mscale"), fields.get("mscale_all_dim")
    return yarn_magnitude(factor, scale) / yarn_magnitude(factor, total) if scale and total else yarn_magnitude(factor)


def rope_fields(rotary: RotaryOptions) -> dict[str, Any]:
    """Return the content of ``rope_parameters``."""
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
        divisors = [float(divisor) for divisor in rotary.divisors.split(",")]
        rope |= {"short_factor": divisors, "long_factor": divisors}
    if kind in ("yarn", "longrope"):
        rope["attention_factor"] = rotary.magnitude
    return rope
