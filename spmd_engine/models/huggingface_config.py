"""What Hugging Face's ``config.json`` says of a decoder, as a DecoderShape, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.layers.rotary import RotaryOptions
from spmd_engine.layers.router_options import RouterOptions
from spmd_engine.models.decoder import DecoderShape
from spmd_engine.models.mixture import Mixture

_MODEL_TYPES = {each: each.replace("_", "-") for each in (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"
)}  # fmt: skip
_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
}
_LONGEST = {"llama": 2048, "mistral": 131072, "mixtral": 131072}  # where a config does not say; of others 32768
#: Fields that change what is computed, and their one value that is computed here (None, 0, false and "" aside).
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1.0,),
    "hidden_act": ("silu", "swish"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "mlp_bias": (),
    "use_sliding_window": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "clip_qkv": (),
    "no_rope_layers": (),
    "rope_interleaved": (),
    "attention_chunk_size": (),
    "shared_expert_intermediate_size": (),
    "n_shared_experts": (),
    "quantization_config": (),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (),
    "add_cross_attention": (),
    "is_encoder_decoder": (),
}


def shape_of_config(config: Mapping[str, Any], where: str) -> DecoderShape:
    """The decoder that a config describes; ``where`` it stands is said in errors.

    Raises CheckpointError, naming the field, for a model type or a feature that is not known here, and for fields that
    are missing or make no sense.
    """
    kind = config.get("model_type")
    if kind not in _MODEL_TYPES:
        raise CheckpointError(f"{where}: model_type {kind!r} is not known here; known are {', '.join(_MODEL_TYPES)}")
    try:
        _refuse_unknown(config, kind, where)
        shape = _gpt2(config) if kind == "gpt2" else _llama(_MODEL_TYPES[kind], config)
        return shape.changed(head_width=shape.head_width or shape.width // shape.heads)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{where}: the field {error} is missing") from error
    except (UsageError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def _refuse_unknown(config: Mapping[str, Any], kind: str, where: str) -> None:
    for name, computed in _REFUSED.items():
        value = config.get(name)
        if value and value not in computed or value is False and computed == (True,):
            raise CheckpointError(f"{where}: {name} is {value!r}, a feature that is not known here")
    windowed = [each for each in config.get("layer_types") or () if each != "full_attention"]
    if windowed or config.get("sliding_window") and config.get("use_sliding_window", not kind.startswith("qwen")):
        said = f"layer_types has {windowed[0]!r}" if windowed else f"sliding_window is {config['sliding_window']!r}"
        raise CheckpointError(f"{where}: {said}, but a query sees all positions before it here")


def _gpt2(config: Mapping[str, Any]) -> DecoderShape:
    width = config["n_embd"]
    return DecoderShape(
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


def _llama(family: str, config: Mapping[str, Any]) -> DecoderShape:
    heads, biased = config["num_attention_heads"], bool(config.get("attention_bias"))
    usual_width = 128 if family.startswith("qwen3") else None
    return DecoderShape(
        family=family,
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=heads,
        key_value_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or usual_width,
        hidden=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        context=config.get("max_position_embeddings") or _LONGEST.get(family, 32768),
        epsilon=config.get("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6),
        tied=config.get("tie_word_embeddings", False),
        rotary=_rotary(family, config),
        bias=biased or family == "qwen2",
        output_bias=biased and family != "qwen2",
        query_key_norm=family.startswith("qwen3"),
        mixture=_mixture(family, config),
    )


def _rotary(family: str, config: Mapping[str, Any]) -> RotaryOptions:
    """Of ``rope_parameters``, as newer programs write them, or of ``rope_theta`` and ``rope_scaling``."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    usual = 1e6 if family == "mixtral" else 10_000.0
    theta = float(said.get("rope_theta") or config.get("rope_theta") or usual)
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind == "default":
        return RotaryOptions(theta)
    if kind == "linear":
        return RotaryOptions(theta, scaling="linear", factor=float(said["factor"]))
    if kind == "llama3":
        return RotaryOptions(
            theta,
            scaling="llama3",
            factor=float(said["factor"]),
            low_frequency_factor=float(said["low_freq_factor"]),
            high_frequency_factor=float(said["high_freq_factor"]),
            original_context=said["original_max_position_embeddings"],
        )
    raise UsageError(f"rope_type {kind!r} is not known here; known are default, linear and llama3")


def _mixture(family: str, config: Mapping[str, Any]) -> Mixture | None:
    """The auxiliary loss is none of the model's: give ``--balance-loss`` when training from nothing."""
    if family == "mixtral":
        router = RouterOptions(top_k=config.get("num_experts_per_tok", 2))
        return Mixture(experts=config.get("num_local_experts", 8), hidden=config["intermediate_size"], router=router)
    if family != "qwen3-moe":
        return None
    router = RouterOptions(
        top_k=config.get("num_experts_per_tok", 8), renormalise=bool(config.get("norm_topk_prob", False))
    )
    every, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(config["num_hidden_layers"]) if (layer + 1) % every}
    return Mixture(
        experts=config.get("num_experts") or config.get("num_local_experts", 128),
        hidden=config.get("moe_intermediate_size", 768),
        dense=",".join(map(str, sorted(dense))),
        router=router,
    )


def config_of_shape(shape: DecoderShape, dtype: str = "float32") -> dict[str, Any]:
    """What ``config.json`` says of a decoder, old field names and new ones, so that any version reads it.

    Raises UsageError for a shape that the format has no words for.
    """
    family = shape.family
    common = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family.replace("-", "_"),
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
    }
    if family == "gpt2":
        return common | {
            "n_embd": shape.width,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_inner": shape.hidden,
            "n_positions": shape.context,
            "n_ctx": shape.context,
            "layer_norm_epsilon": shape.epsilon,
            "activation_function": "gelu_new",
        }
    rope = _rope_of(shape.rotary)
    return common | {
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads or shape.heads,
        "head_dim": shape.head_width or shape.width // shape.heads,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon,
        "hidden_act": "silu",
        "attention_bias": shape.output_bias,
        "sliding_window": None,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        **_experts_of(shape),
    }


def _rope_of(rotary: RotaryOptions) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": rotary.theta, "rope_type": "default"}
    if rotary.scaling != "none":
        rope |= {"rope_type": rotary.scaling, "factor": rotary.factor}
    if rotary.scaling == "llama3":
        rope |= {
            "low_freq_factor": rotary.low_frequency_factor,
            "high_freq_factor": rotary.high_frequency_factor,
            "original_max_position_embeddings": rotary.original_context,
        }
    return rope


def _experts_of(shape: DecoderShape) -> dict[str, Any]:
    mixture = shape.mixture
    if mixture is None:
        return {}
    router, hidden = mixture.router, mixture.hidden or max(1, shape.hidden // mixture.router.top_k)
    if mixture.shared or router.score != "softmax" or router.groups > 1 or router.scale != 1:
        raise UsageError(f"the format has no words for these experts of a {shape.family}: {mixture}")
    if shape.family == "mixtral":
        if mixture.dense or not router.renormalise:
            raise UsageError("a mixtral has experts in all layers, whose weights sum to 1; export it as a qwen3-moe")
        return {
            "num_local_experts": mixture.experts, "num_experts_per_tok": router.top_k, "intermediate_size": hidden
        }  # fmt: skip
    return {
        "num_experts": mixture.experts,
        "num_experts_per_tok": router.top_k,
        "moe_intermediate_size": hidden,
        "norm_topk_prob": router.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [int(block) for block in mixture.dense.split(",") if block],
    }
