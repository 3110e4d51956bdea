"""Writes a DecoderConfig as ``config.json``, with old and new field names for all versions of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.families.family import Experts, Rope, SlidingWindow
from spmd_engine.models.hf.read_config import ACTIVATIONS
from spmd_engine.models.hf.rope import rope_fields
from spmd_engine.models.mixture import as_text, block_numbers

#: Fields of a DecoderConfig that are checked separately.
_APART = ("family", "rotary", "mixture", "window", "window_layers")


def config_json(shape: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """Return ``config.json`` for weights of a ``dtype``. Raises UsageError for fields that it cannot represent."""
    family = FAMILIES[shape.family]
    for name in unrepresentable(shape):
        raise _refusal(shape, name)
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    for field, (name, _) in family.fields.items():
        value = _explicit(shape, field)
        if field == "activation":
            value = next(name for name, activation in ACTIVATIONS.items() if activation == shape.activation)
        if config.setdefault(name, value) != value:
            raise _refusal(shape, field)
    if family.rope is not None and family.rope.described:
        config |= _rope(shape, family.rope)
    if family.windows is not None:
        config |= _windows(shape, family.windows)
    if family.experts is not None:
        config |= _experts(shape, family.experts)
    return config | (family.write(shape) if family.write is not None else {})


def unrepresentable(shape: DecoderConfig) -> Iterator[str]:
    """Yield fields that differ from the family's constants and cannot be expressed in its ``config.json``."""
    family = FAMILIES[shape.family]
    usual = DecoderConfig(family=shape.family).changed(**family.usual(shape.width))
    read = {*family.fields, *family.also_read, *_APART}
    for name in (field.name for field in fields(shape)):
        if name in read or name == "window_rotary" and family.rope is not None and family.rope.in_windows:
            continue
        expected = getattr(usual, name)
        if name == "key_value_heads":
            expected = shape.heads
        elif name == "head_width":
            expected = shape.width / shape.heads
        elif name == "no_rope_layers" and family.windows is not None and family.windows.rotary_only:
            expected = _usual_no_rope_layers(shape, family.windows)
        if _explicit(shape, name) != expected:
            yield name
    if shape.window is not None and family.windows is None and "window" not in family.also_read:
        yield "window"
    rope = family.rope
    if rope is not None:
        reordered = shape.rotary.pairs != rope.pairs  # only to halves, and only whole heads
        if reordered and rope.pairs != "halves" or shape.rotary.part != 1 and (reordered or rope.part is None):
            yield "rotary"
    if (shape.mixture is not None) != (family.experts is not None):
        yield "mixture"


def _usual_no_rope_layers(shape: DecoderConfig, windows: SlidingWindow) -> str:
    """Return the blocks without rotary positions, in a family whose windows determine them."""
    if windows.rotary_only != "always" and not shape.window:
        return ""
    return as_text(block for block in range(shape.layers) if not shape.has_window(block))


def _refusal(shape: DecoderConfig, name: str) -> UsageError:
    return UsageError(f"config.json of a {shape.family} cannot represent {name} {getattr(shape, name)!r}")


def _explicit(shape: DecoderConfig, name: str) -> Any:
    """Return the value of a field, with defaults in place of None."""
    width = shape.head_width or shape.width // shape.heads
    defaults = {"key_value_heads": shape.heads, "head_width": width}
    if "attention_scale" in FAMILIES[shape.family].fields:
        defaults["attention_scale"] = width**-0.5
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
    elif any(near) and not all(near):
        raise _refusal(shape, "window_layers")
    return config


def _experts(shape: DecoderConfig, experts: Experts) -> dict[str, Any]:
    mixture = shape.mixture
    assert mixture is not None, "unrepresentable() refuses it"
    router = mixture.router
    hidden = mixture.hidden or max(1, shape.hidden // router.top_k)
    shared = mixture.shared and not (experts.shared_hidden is not None and mixture.shared_gate)
    if shared or router.score != "softmax" or router.groups > 1 or router.scale != 1:
        raise _refusal(shape, "mixture")
    if experts.hidden is None and mixture.dense or experts.normalised and not router.renormalise:
        raise UsageError(
            f"experts of a {shape.family} must be in all layers"
            f"{', and their weights sum to 1' if experts.normalised else ''}; export it as a qwen3-moe"
        )
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
