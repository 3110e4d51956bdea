"""Writes a DecoderConfig as ``config.json``, with old and new field names for all versions of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from math import isclose
from typing import Any

from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.layers import RotaryOptions, RouterOptions
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.families.family import Experts, Rope, SlidingWindow
from spmd_engine.models.hf.read_config import ACTIVATIONS, read_config
from spmd_engine.models.hf.rope import rope_fields
from spmd_engine.models.mixture import as_text, block_numbers


def config_json(shape: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """Return ``config.json`` for weights of a ``dtype``. Raises UsageError for fields that it cannot represent."""
    family = FAMILIES[shape.family]
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    for field, (name, _) in family.fields.items():
        value = _value(shape, field)
        if field == "activation":
            value = next(name for name, activation in ACTIVATIONS.items() if activation == shape.activation)
        config.setdefault(name, value)
    if family.rope is not None and family.rope.described:
        config |= _rope(shape, family.rope)
    if family.windows is not None:
        config |= _windows(shape, family.windows)
    if family.experts is not None:
        config |= _experts(shape, family.experts)
    config |= family.write(shape) if family.write is not None else {}
    if family.rope is not None and family.rope.pairs == "halves" and shape.rotary.part == 1:
        shape = shape.changed(rotary=shape.rotary.changed(pairs="halves"))  # as weights are written
    what = f"config.json of a {shape.family}"
    try:
        read, _ = read_config(config, what)
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    check_same(shape, read, what)
    return config


# --- Whether a file represents a decoder: what is read from it must be the same


#: Options of routing that files describe; the others matter to training.
_ROUTING = ("top_k", "score", "scale", "groups", "top_groups", "group_best", "bias_rate")


def check_same(shape: DecoderConfig, read: DecoderConfig, what: str, instead: str = "") -> None:
    """Raise UsageError, naming the field, unless ``what`` describes a decoder that is ``read`` as the same."""
    differing = _differences("", _explicit(shape), _explicit(read), shape)
    for name, value, other in sorted(differing, key=lambda fields: fields[0] == "hidden"):  # it may follow from others
        raise UsageError(f"{what} cannot represent {name} {value!r}, which would be read as {other!r}{instead}")


def _explicit(shape: DecoderConfig) -> DecoderConfig:
    """The same decoder with defaults in place of None, blocks listed, and without what has no effect on its outputs."""
    blocks, mixture, hidden = range(shape.layers), shape.mixture, shape.hidden
    windowed = [block for block in blocks if shape.has_window(block)]
    without_rope = [block for block in blocks if not shape.has_rope(block)]
    rotary = shape.rotary if len(without_rope) < shape.layers else RotaryOptions()
    if mixture is not None:
        router, described = mixture.router, {name: getattr(mixture.router, name) for name in _ROUTING}
        mixture = mixture.changed(
            hidden=mixture.hidden or max(1, hidden // router.top_k),
            dense=as_text(block_numbers(mixture.dense, "dense")),
            router=RouterOptions(**described, renormalise=router.renormalise or router.when == "after"),
        )
        hidden = hidden if mixture.dense else mixture.hidden
    return shape.changed(
        **{name: _value(shape, name) for name in ("key_value_heads", "head_width", "attention_scale")},
        window=shape.window if windowed else None,
        window_layers=as_text(windowed),
        window_rotary=(shape.window_rotary or rotary) if windowed else None,
        no_rope_layers=as_text(without_rope),
        rotary=rotary,
        mixture=mixture,
        hidden=hidden,
    )


def _differences(name: str, one: Any, other: Any, shape: DecoderConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each field, also of records in fields, in which two records differ."""
    if isinstance(one, RotaryOptions) and isinstance(other, RotaryOptions) and _rotate_alike(one, other, shape):
        return
    if is_dataclass(one) and is_dataclass(other):
        for field in fields(one):
            values = getattr(one, field.name), getattr(other, field.name)
            yield from _differences(f"{name}.{field.name}".removeprefix("."), *values, shape)
    elif one != other:
        yield name, one, other


def _rotate_alike(one: RotaryOptions, other: RotaryOptions, shape: DecoderConfig) -> bool:
    """Return whether two records describe the same rotation, to the precision of 32 bits."""
    if (one.part, one.pairs) != (other.part, other.pairs):
        return False
    pairs = round(one.part * shape.width_of_heads) // 2
    numbers = zip([*one.frequencies(pairs), one.magnitude], [*other.frequencies(pairs), other.magnitude], strict=True)
    return all(isclose(first, second, rel_tol=1e-6) for first, second in numbers)


def _value(shape: DecoderConfig, name: str) -> Any:
    """Return the value of a field, with defaults in place of None."""
    width = shape.width_of_heads
    defaults = {"key_value_heads": shape.heads, "head_width": width, "attention_scale": width**-0.5}
    value = getattr(shape, name)
    return defaults.get(name) if value is None else value


def _rope(shape: DecoderConfig, family_rope: Rope) -> dict[str, Any]:
    rope = rope_fields(shape.rotary)
    config: dict[str, Any] = {family_rope.theta_field: shape.rotary.theta}
    if family_rope.part is not None:
        config[family_rope.part_field] = rope["partial_rotary_factor"] = shape.rotary.part
    config |= {"rope_parameters": rope, "rope_scaling": None if rope["rope_type"] == "default" else rope}
    if family_rope.in_windows:
        near = rope_fields(shape.window_rotary or shape.rotary)
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": near}
        if family_rope.window_theta_field:
            config[family_rope.window_theta_field] = near["rope_theta"]
    return config


def _windows(shape: DecoderConfig, windows: SlidingWindow) -> dict[str, Any]:
    near = [shape.has_window(layer) for layer in range(shape.layers)]
    config: dict[str, Any] = {"sliding_window": shape.window}
    if windows.switch:
        config["use_sliding_window"] = shape.window is not None
    if windows.listed:
        config["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in near]
    return config


def _experts(shape: DecoderConfig, experts: Experts) -> dict[str, Any]:
    if (mixture := shape.mixture) is None:
        return {}
    router = mixture.router
    hidden = mixture.hidden or max(1, shape.hidden // router.top_k)
    config: dict[str, Any] = {experts.field: mixture.experts, "num_experts_per_tok": router.top_k}
    if not experts.normalised:
        config["norm_topk_prob"] = router.renormalise
    if experts.hidden is None:
        return config | {"intermediate_size": hidden}
    config |= {
        "moe_intermediate_size": hidden,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(block_numbers(mixture.dense, "dense")),
    }
    if experts.shared_hidden is not None:
        config["shared_expert_intermediate_size"] = mixture.shared * hidden
    return config
