"""Hugging Face's ``config.json`` as a DecoderConfig, by the record of its family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd_engine.errors import CheckpointError, UsageError, one_of
from spmd_engine.layers.moe.routing import RouterOptions
from spmd_engine.models.block_numbers import as_text
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.families import FAMILIES
from spmd_engine.models.families.family import Config, Family, SlidingWindow, check_required
from spmd_engine.models.hf.multimodal import MULTIMODAL, text_config
from spmd_engine.models.hf.rope import with_rotary
from spmd_engine.models.hf.unknown_fields import Fields
from spmd_engine.models.mixture import Mixture

MODEL_TYPES = {family.model_type: family for family in FAMILIES.values()}
#: Names of activations in configs, and here; the first of those that mean the same is written.
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu",
    "gelu": "gelu-erf", "relu": "relu", "relu2": "relu-squared"
}  # fmt: skip
_WINDOW, _FULL = "sliding_attention", ("full_attention", "attention")
_BOOLEANS, _FACTORS = ("bias", "output_bias", "perceptron_bias"), (
    "embedding_scale", "residual_scale", "attention_scale", "logits_divisor"
)  # fmt: skip
#: What fields that hold more than one value must be.
_KINDS = dict.fromkeys(("rope_parameters", "rope_scaling", "attn_config"), (Mapping, "an object")) | dict.fromkeys(
    ("layer_types", "mlp_only_layers", "no_rope_layers", "attention_types", "attention_layers"),
    ((list, tuple), "a list"),
)


def shape_of_config(config: Config, where: str) -> DecoderConfig:
    """The decoder that a config describes; ``where`` it is appears in errors.

    Raises CheckpointError, naming the field, for a model type or a feature that is not supported, and for fields that
    are missing or have impossible values.
    """
    return read_config(config, where)[0]


def read_config(config: Config, where: str) -> tuple[DecoderConfig, list[str]]:
    """The same, and the names of unknown fields that do not look as if they changed what is computed."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in MULTIMODAL:
        text, ignored = text_config(config, where)
        shape, unknown = read_config(text, where)
        return shape, [*ignored, *unknown]
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise CheckpointError(f"{where}: model_type {kind!r} is not supported; {one_of(kind, MODEL_TYPES)}")
    for name, (wanted, description) in _KINDS.items():
        if config.get(name) is not None and not isinstance(config[name], wanted):
            raise CheckpointError(f"{where}: {name} is {config[name]!r}: it must be {description}")
    fields = Fields(config)
    try:
        shape = _read(MODEL_TYPES[kind], fields)
        shape = shape.changed(head_width=shape.head_width or shape.width // shape.heads)
        shape.rotaries()  # raises if heads are of a width that they cannot turn
        return shape, fields.check_rest(where)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{where}: the field {error} is missing") from error
    except UsageError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise CheckpointError(f"{where}: a field has an impossible value: {error}") from error


def _read(family: Family, config: Config) -> DecoderConfig:
    for name in family.ignored:
        config.get(name)
    for name, supported in family.required.items():
        check_required(name, config.get(name, supported), supported)
    values = {own: _value(own, config, family) for own in family.fields}
    values["key_value_heads"] = values.get("key_value_heads") or values["heads"]
    values["head_width"] = values.get("head_width") or None
    values["hidden"] = values.get("hidden") or 4 * values["width"]
    shape = DecoderConfig(family=family.name, **{**family.usual(values["width"]), **values})
    shape = shape.changed(mixture=_mixture(family, config, shape))
    if family.read is not None:
        shape = family.read(config, shape)
    if family.rope is not None:
        shape = with_rotary(config, shape, family.rope)
    return _with_windows(config, shape, family.windows)


def _value(own: str, config: Config, family: Family) -> Any:
    """The value of a field of a DecoderConfig."""
    name, default = family.fields[own]
    alias = family.aliases.get(name)
    if alias is not None and (value := config.get(alias)) is not None:
        check_required(name, config.get(name, value), value)
        return value
    value = config[name] if default is None else config.get(name, default)
    if own == "activation":
        if value not in ACTIVATIONS:
            raise UsageError(f"the activation {value!r} is not supported; {one_of(value, ACTIVATIONS)}")
        return ACTIVATIONS[value]
    if own == "context":
        return value or default
    return bool(value) if own in _BOOLEANS else float(value) if own in _FACTORS else value


def _mixture(family: Family, config: Config, shape: DecoderConfig) -> Mixture | None:
    """The auxiliary loss is not part of the model: give ``--balance-loss`` when training from nothing."""
    experts = family.experts
    if experts is None:
        return None
    normalised = experts.normalised or bool(config.get("norm_topk_prob", False))
    router = RouterOptions(top_k=config.get("num_experts_per_tok", experts.top_k), renormalise=normalised)
    if experts.field == "num_experts":
        count = config.get("num_experts") or config.get("num_local_experts", experts.experts)
    else:
        count = config.get(experts.field, experts.experts)
    if experts.hidden is None:
        return Mixture(experts=count, hidden=shape.hidden, router=router)
    every, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(shape.layers) if (layer + 1) % every}
    hidden, shared, rest = config.get("moe_intermediate_size", experts.hidden), 0, 0
    if experts.shared_hidden is not None:
        shared, rest = divmod(config.get("shared_expert_intermediate_size", experts.shared_hidden), hidden)
    if rest:
        raise UsageError(f"shared_expert_intermediate_size is not a multiple of moe_intermediate_size, {hidden}")
    return Mixture(
        experts=count, hidden=hidden, dense=as_text(dense), router=router, shared=shared, shared_gate=shared > 0
    )


# --- Windows: which blocks see one, in config.json and in GGUF files


def _with_windows(config: Config, shape: DecoderConfig, windows: SlidingWindow | None) -> DecoderConfig:
    kinds, window = config.get("layer_types"), None
    if windows is not None:
        window = config.get("sliding_window", windows.default)
        if windows.switch and not config.get("use_sliding_window"):
            window = None
    if kinds is None:
        near = _usual_windows(config, shape, windows) if window else []
    else:
        if len(kinds) != shape.layers:
            raise UsageError(f"layer_types has {len(kinds)} values, but there are {shape.layers} layers")
        if unknown := sorted(set(kinds) - {_WINDOW, *_FULL}):
            raise UsageError(f"layer_types has {unknown[0]!r}, which is not supported")
        near = [layer for layer, kind in enumerate(kinds) if kind == _WINDOW]
        if near and not window:
            raise UsageError(f"layer_types has {_WINDOW!r}, but there is no sliding_window")
    if windows is not None and windows.rotary_only == "always" and not window and kinds is None:
        raise UsageError("sliding_window is null, which is not supported without layer_types")
    return with_windows_in(shape, windows, window, near)


def _usual_windows(config: Config, shape: DecoderConfig, windows: SlidingWindow) -> list[int]:
    every = windows.every
    if windows.pattern:
        every = config.get("sliding_window_pattern") or every
        check_required("sliding_window_pattern", every, every if isinstance(every, int) else windows.every)
    if windows.has_window is not None:
        return [layer for layer in range(shape.layers) if windows.has_window(config, shape, layer)]
    return [layer for layer in range(shape.layers) if not every or (layer + 1) % every]


def with_windows_in(
    shape: DecoderConfig, windows: SlidingWindow | None, window: int | None, near: list[int]
) -> DecoderConfig:
    """With this window in the blocks ``near``, and rotary positions where the family then has them."""
    far = as_text(set(range(shape.layers)) - set(near))
    if windows is not None and (windows.rotary_only == "always" or windows.rotary_only and window):
        shape = shape.changed(unturned=far)
    if not near:
        return shape.changed(rotary_in_window=None)
    return shape.changed(window=window, windowed=as_text(near) if far else "")
