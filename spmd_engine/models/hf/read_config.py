"""What Hugging Face's ``config.json`` says of a decoder, as a DecoderConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

from spmd_engine.errors import CheckpointError, UsageError, one_of
from spmd_engine.layers.attention.rotary import RotaryOptions
from spmd_engine.layers.moe.router_options import RouterOptions
from spmd_engine.models.block_numbers import as_text
from spmd_engine.models.decoder import FAMILIES, DecoderConfig
from spmd_engine.models.hf.families import activation_said, always, says
from spmd_engine.models.hf.rope import rotary_of, rotary_of_config
from spmd_engine.models.hf.tables import BY_TABLE, shape_by_table
from spmd_engine.models.hf.unknown_fields import Fields
from spmd_engine.models.hf.vision_language import is_beside_pictures, text_of
from spmd_engine.models.mixture import Mixture

MODEL_TYPES = {family.replace("-", "_"): family for family in FAMILIES}
_LONGEST = (
    dict.fromkeys(("llama", "granite", "granitemoe", "olmo2", "olmo3"), 2048)
    | {"phi3": 4096, "olmoe": 4096, "gemma": 8192, "gemma2": 8192}
    | dict.fromkeys(("mistral", "mixtral", "gemma3-text"), 131072)
)  # positions where a config does not say; of others 32768
_THETA = {"mixtral": 1e6, "smollm3": 2e6}  # where a config does not say; of others 10000
_EPSILON = dict.fromkeys(("mixtral", "phi3", "olmo2", "olmo3", "olmoe"), 1e-5)  # of others 1e-6
_HEAD_WIDTH = dict.fromkeys(("qwen3", "qwen3-moe"), 128) | dict.fromkeys(("gemma", "gemma2", "gemma3-text"), 256)
_TIED = ("smollm3", "gemma", "gemma2", "gemma3-text", "minicpm")
_NO_WINDOW = (
    "llama",
    "granite",
    "granitemoe",
    "gemma",
    "olmo2",
    "olmoe",
    "minicpm",
)  # one in their config is refused with the rest
_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu")  # of gemma's first configs the last meant the others
_WINDOW = "sliding_attention"
#: What fields that hold more than one value must be.
_KINDS = dict.fromkeys(("rope_parameters", "rope_scaling", "attn_config"), (Mapping, "an object")) | dict.fromkeys(
    ("layer_types", "mlp_only_layers", "no_rope_layers", "attention_types", "attention_layers"),
    ((list, tuple), "a list"),
)


def shape_of_config(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """The decoder that a config describes; ``where`` it stands is said in errors.

    Raises CheckpointError, naming the field, for a model type or a feature that is not known here, and for fields that
    are missing or make no sense.
    """
    return read_config(config, where)[0]


def read_config(config: Mapping[str, Any], where: str) -> tuple[DecoderConfig, list[str]]:
    """The same, and the names of fields of which nothing is known, though they do not look as if they changed what is
    computed."""
    if is_beside_pictures(config):
        text, beside = text_of(config, where)
        shape, unknown = read_config(text, where)
        return shape, [*beside, *unknown]
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise CheckpointError(f"{where}: model_type {kind!r} is not known here; {one_of(kind, MODEL_TYPES)}")
    family, fields = MODEL_TYPES[kind], Fields(config)
    for name, (wanted, said) in _KINDS.items():
        if config.get(name) is not None and not isinstance(config[name], wanted):
            raise CheckpointError(f"{where}: {name} is {config[name]!r}: it must be {said}")
    try:
        if family in BY_TABLE:
            shape = shape_by_table(family, fields)
        else:
            shape = _gpt2(fields) if family == "gpt2" else _llama(family, fields)
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
        raise CheckpointError(f"{where}: a field is not what it should be: {error}") from error


def _gpt2(config: Mapping[str, Any]) -> DecoderConfig:
    width = config["n_embd"]
    return DecoderConfig(
        family="gpt2",
        layers=config["n_layer"],
        width=width,
        heads=config["n_head"],
        hidden=config.get("n_inner") or 4 * width,
        vocabulary=config["vocab_size"],
        context=config.get("n_positions", 1024),
        epsilon=config.get("layer_norm_epsilon", 1e-5),
        tied=config.get("tie_word_embeddings", True),
    )


def _llama(family: str, config: Mapping[str, Any]) -> DecoderConfig:
    heads, layers, width = config["num_attention_heads"], config["num_hidden_layers"], config["hidden_size"]
    values: dict[str, Any] = {"bias": False, "output_bias": False, **always(family, width)}
    if family == "qwen2-moe":
        values["bias"] = config.get("qkv_bias", True)
    elif says(family, "bias"):
        values["bias"] = values["output_bias"] = bool(config.get("attention_bias"))
    if says(family, "perceptron_bias"):
        values["perceptron_bias"] = bool(config.get("mlp_bias"))
    if says(family, "activation"):
        values["activation"] = activation_said(config.get("hidden_act", "silu"))
    shape = DecoderConfig(
        family=family,
        layers=layers,
        width=width,
        heads=heads,
        key_value_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or _HEAD_WIDTH.get(family),
        hidden=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        context=config.get("max_position_embeddings") or _LONGEST.get(family, 32768),
        epsilon=config.get("rms_norm_eps", _EPSILON.get(family, 1e-6)),
        tied=config.get("tie_word_embeddings", family in _TIED),
        **values,
    )
    shape = shape.changed(mixture=_mixture(family, config, shape.layers))
    own = _OWN.get(family)
    if own is not None:
        shape = own(config, shape)
    if family not in ("gemma3-text", "olmo3"):  # which have two kinds of them
        shape = shape.changed(rotary=_rotary(family, config, shape))
    if shape.rotary.scaling == "divided":  # longer sequences have other divisors
        shape = shape.changed(context=min(shape.context, shape.rotary.original_context))
    return _with_window(family, config, shape)


def _rotary(family: str, config: Mapping[str, Any], shape: DecoderConfig) -> RotaryOptions:
    part = None
    if family == "phi3":
        part = config.get("partial_rotary_factor")
        config.get("original_max_position_embeddings")  # without effect unless positions are scaled
    found = rotary_of_config(config, _THETA.get(family, 10_000.0), shape.context, part=part, renamed=family == "phi3")
    if found.part != 1 and family != "phi3":
        raise UsageError(f"partial_rotary_factor is {found.part}, a feature that is not known here of a {family}")
    return found


def _smollm3(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    turned = config.get("no_rope_layers")  # 1 where positions turn
    if turned is None:
        every = config.get("no_rope_layer_interval", 4)
        turned = [(layer + 1) % every for layer in range(shape.layers)]
    _one_a_layer("no_rope_layers", turned, shape)
    return shape.changed(unturned=as_text(layer for layer in range(shape.layers) if not turned[layer]))


def _granite(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    return shape.changed(
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        residual_scale=float(config.get("residual_multiplier", 1.0)),
        attention_scale=float(config.get("attention_multiplier", 1.0)),
        logits_divisor=float(config.get("logits_scaling", 1.0)),
    )


def _minicpm(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    depth, base = config.get("scale_depth"), config.get("dim_model_base")
    config.get("mup_denominator")  # of how it was trained
    return shape.changed(
        embedding_scale=float(config.get("scale_emb") or 1),
        residual_scale=float(depth) / sqrt(shape.layers) if depth else 1.0,
        logits_divisor=shape.width / base if base else 1.0,
    )


def _gemma(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    act = config.get("hidden_activation") or config.get("hidden_act") or _GELU[0]
    if act not in _GELU:
        raise UsageError(f"hidden_activation is {act!r}, a feature that is not known here of a {shape.family}")
    config.get("hidden_act")  # not looked at if both are there
    return shape


def _gemma2(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    return _gemma(config, shape).changed(
        attention_scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        attention_cap=config.get("attn_logit_softcapping", 50.0),
        logits_cap=config.get("final_logit_softcapping", 30.0),
    )


def _gemma3(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    everywhere, near = _two_kinds(config)
    return _gemma(config, shape).changed(
        attention_scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5,
        rotary=rotary_of(everywhere, config.get("rope_theta") or 1e6, config, shape.context),
        rotary_in_window=rotary_of(near, config.get("rope_local_base_freq") or 1e4, config, shape.context),
    )


def _olmo3(config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    everywhere, near = _two_kinds(config)
    theta = config.get("rope_theta") or 5e5
    return shape.changed(
        rotary=rotary_of(everywhere, theta, config, shape.context),
        rotary_in_window=rotary_of(near, theta, config, shape.context),
    )


def _two_kinds(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What is said of rotary positions of layers without a window, and with one."""
    said, old = config.get("rope_parameters") or {}, config.get("rope_scaling")
    nested = {name: each for name, each in said.items() if isinstance(each, Mapping)}
    if odd := sorted(said.keys() - nested.keys()):
        raise UsageError(f"rope_parameters has {odd[0]!r}, where it has an object each of two kinds of layers")
    return nested.get("full_attention") or old or {}, nested.get(_WINDOW) or {}


#: What families have beside a Llama.
_OWN: Mapping[str, Callable[[Mapping[str, Any], DecoderConfig], DecoderConfig]] = {
    "smollm3": _smollm3,
    "granite": _granite,
    "granitemoe": _granite,
    "minicpm": _minicpm,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3-text": _gemma3,
    "olmo3": _olmo3,
}


def _with_window(family: str, config: Mapping[str, Any], shape: DecoderConfig) -> DecoderConfig:
    """With the blocks that see a window alone, if there are any: as each family says it."""
    types = config.get("layer_types")
    usual = 4096 if family in ("mistral", "gemma2", "gemma3-text", "olmo3") else None
    window = None if family in _NO_WINDOW else config.get("sliding_window", usual)
    if family.startswith("qwen") or family == "smollm3":
        window = window if config.get("use_sliding_window") else None
    if types is None:
        types = [_WINDOW if window and _is_windowed(family, config, shape, i) else "" for i in range(shape.layers)]
    else:
        _one_a_layer("layer_types", types, shape)
        if odd := sorted(set(types) - {_WINDOW, "full_attention"}):
            raise UsageError(f"layer_types has {odd[0]!r}, a feature that is not known here")
        if not window and _WINDOW in types:
            raise UsageError(f"layer_types has {_WINDOW!r}, but no sliding_window is said")
    windowed = [layer for layer, each in enumerate(types) if each == _WINDOW]
    if not windowed:
        return shape.changed(rotary_in_window=None)
    return shape.changed(window=window, windowed="" if len(windowed) == shape.layers else as_text(windowed))


def _is_windowed(family: str, config: Mapping[str, Any], shape: DecoderConfig, layer: int) -> bool:
    if family in ("qwen2", "qwen3"):
        return layer >= config.get("max_window_layers", 28)
    if family == "qwen2-moe":
        return layer % 2 == 0 and layer < config.get("max_window_layers", 28)
    if family == "smollm3":
        return not shape.is_turned(layer)
    if family == "gemma2":
        return layer % 2 == 0
    if family == "olmo3":
        return bool((layer + 1) % 4)
    if family == "gemma3-text":
        return bool((layer + 1) % (config.get("sliding_window_pattern") or 6))
    return True


def _one_a_layer(name: str, values: Sequence[Any], shape: DecoderConfig) -> None:
    if len(values) != shape.layers:
        raise UsageError(f"{name} has {len(values)} values, but there are {shape.layers} layers")


#: Experts a token, experts, and f of each, where a config does not say.
_USUAL_EXPERTS = {"qwen2-moe": (4, 60, 1408), "qwen3-moe": (8, 128, 768), "olmoe": (8, 64, 2048)}


def _mixture(family: str, config: Mapping[str, Any], layers: int) -> Mixture | None:
    """The auxiliary loss is none of the model's: give ``--balance-loss`` when training from nothing."""
    if family in ("mixtral", "granitemoe"):
        router = RouterOptions(top_k=config.get("num_experts_per_tok", 2))
        return Mixture(experts=config.get("num_local_experts", 8), hidden=config["intermediate_size"], router=router)
    if family not in ("qwen2-moe", "qwen3-moe", "olmoe"):
        return None
    top_k, experts, hidden = _USUAL_EXPERTS[family]
    router = RouterOptions(
        top_k=config.get("num_experts_per_tok", top_k), renormalise=bool(config.get("norm_topk_prob", False))
    )
    experts = config.get("num_experts") or config.get("num_local_experts", experts)
    if family == "olmoe":
        return Mixture(experts=experts, hidden=config["intermediate_size"], router=router)
    every, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(layers) if (layer + 1) % every}
    hidden = config.get("moe_intermediate_size", hidden)
    shared, left = 0, 0
    if family == "qwen2-moe":
        shared, left = divmod(config.get("shared_expert_intermediate_size", 5632), hidden)
    if left:
        raise UsageError(f"shared_expert_intermediate_size is no multiple of moe_intermediate_size, {hidden}")
    return Mixture(
        experts=experts, hidden=hidden, dense=as_text(dense), router=router, shared=shared, shared_gate=shared > 0
    )
