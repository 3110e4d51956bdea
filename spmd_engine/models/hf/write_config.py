"""What ``config.json`` says of a DecoderConfig: old field names and new ones, so that any version reads it."""

from __future__ import annotations

from math import sqrt
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.block_numbers import block_numbers
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.hf.families import says, unsayable, words_for_activation
from spmd_engine.models.hf.rope import rope_of
from spmd_engine.models.hf.tables import BY_TABLE, words_by_table

_ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3-text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2-moe": "Qwen2MoeForCausalLM",
    "gpt-neo": "GPTNeoForCausalLM",
    "gpt-neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "olmo": "OlmoForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "gptj": "GPTJForCausalLM",
    "falcon": "FalconForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "arcee": "ArceeForCausalLM",
    "seed-oss": "SeedOssForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "ernie4-5": "Ernie4_5ForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan-v1-dense": "HunYuanDenseV1ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "cwm": "CwmForCausalLM",
    "ministral": "MinistralForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "gpt-bigcode": "GPTBigCodeForCausalLM",
    "bloom": "BloomForCausalLM",
    "mpt": "MptForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
}
_NO_WINDOW = ("llama", "granite", "granitemoe", "gemma", "olmo2", "olmoe", "minicpm")


def config_of_shape(shape: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """The content of the file, for weights of this ``dtype``; raises UsageError for a shape that there are no words
    for."""
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
    for name in unsayable(shape):
        raise UsageError(f"a {family} has no words for {name} {getattr(shape, name)!r}")
    if family in BY_TABLE:
        return common | words_by_table(shape)
    rope, width = rope_of(shape.rotary), shape.head_width or shape.width // shape.heads
    return common | {
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads or shape.heads,
        "head_dim": width,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon,
        "hidden_act": words_for_activation(shape.activation),
        "attention_bias": shape.output_bias,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        **_windows_of(shape),
        **_experts_of(shape),
        **_own_of(shape, rope, width),
    }


def _windows_of(shape: DecoderConfig) -> dict[str, Any]:
    """Which blocks see a window alone."""
    windowed = [shape.has_window(layer) for layer in range(shape.layers)]
    said: dict[str, Any] = {"sliding_window": shape.window}
    if shape.family in ("qwen2", "qwen2-moe", "qwen3", "qwen3-moe", "smollm3"):
        said["use_sliding_window"] = shape.window is not None
    if shape.family in ("qwen2", "qwen2-moe", "qwen3", "smollm3", "gemma2", "gemma3-text", "olmo3"):
        said["layer_types"] = ["sliding_attention" if each else "full_attention" for each in windowed]
    elif any(windowed) and not all(windowed) or shape.window and shape.family in _NO_WINDOW:
        raise UsageError(f"a {shape.family} has no words for the window of blocks {shape.windowed or 'of all layers'}")
    return said


def _own_of(shape: DecoderConfig, rope: dict[str, Any], width: int) -> dict[str, Any]:
    """What a family alone has words for; ``width`` is that of a head."""
    family, said = shape.family, {}
    scale = width**-0.5 if shape.attention_scale is None else shape.attention_scale
    if family in ("granite", "granitemoe"):
        said = {
            "embedding_multiplier": shape.embedding_scale,
            "residual_multiplier": shape.residual_scale,
            "attention_multiplier": scale,
            "logits_scaling": shape.logits_divisor,
        }
    if family == "minicpm":
        said = {
            "scale_emb": shape.embedding_scale,
            "scale_depth": shape.residual_scale * sqrt(shape.layers),
            "dim_model_base": shape.width / shape.logits_divisor,
        }
    if family == "smollm3":
        said["no_rope_layers"] = [int(shape.is_turned(layer)) for layer in range(shape.layers)]
    if family == "phi3":
        said |= {"partial_rotary_factor": shape.rotary.part}
        if shape.rotary.scaling == "divided":
            said["original_max_position_embeddings"] = shape.rotary.original_context
    if says(family, "perceptron_bias"):
        said["mlp_bias"] = shape.perceptron_bias
    if family == "qwen2-moe":
        said["qkv_bias"] = shape.bias
    if family.startswith("gemma"):
        said["hidden_activation"] = words_for_activation(shape.activation)
    if family == "gemma2":
        said |= {"attn_logit_softcapping": shape.attention_cap, "final_logit_softcapping": shape.logits_cap}
    if family in ("gemma2", "gemma3-text"):
        divisor = round(scale**-2) if scale > 0 else 0
        if not divisor or abs(scale * sqrt(divisor) - 1) > 1e-12:
            raise UsageError(f"a {family} has no words for attention_scale {scale}: it is 1 / sqrt(whole number)")
        said["query_pre_attn_scalar"] = divisor
    if family in ("gemma3-text", "olmo3"):
        near = rope_of(shape.rotary_in_window or shape.rotary)
        said["rope_parameters"] = {"full_attention": rope, "sliding_attention": near}
        if family == "gemma3-text":
            said["rope_local_base_freq"] = near["rope_theta"]
    return said


def _experts_of(shape: DecoderConfig) -> dict[str, Any]:
    mixture = shape.mixture
    if mixture is None:
        return {}
    router, hidden = mixture.router, mixture.hidden or max(1, shape.hidden // mixture.router.top_k)
    of_qwen2 = shape.family == "qwen2-moe"
    shared = mixture.shared and not (of_qwen2 and mixture.shared_gate)
    if shared or router.score != "softmax" or router.groups > 1 or router.scale != 1:
        raise UsageError(f"the format has no words for these experts of a {shape.family}: {mixture}")
    if shape.family in ("mixtral", "olmoe", "granitemoe"):
        if mixture.dense or shape.family != "olmoe" and not router.renormalise:
            raise UsageError("a mixtral has experts in all layers, whose weights sum to 1; export it as a qwen3-moe")
        said = {"num_experts_per_tok": router.top_k, "intermediate_size": hidden}
        if shape.family != "olmoe":
            return said | {"num_local_experts": mixture.experts}
        return said | {"num_experts": mixture.experts, "norm_topk_prob": router.renormalise}
    own = {"shared_expert_intermediate_size": mixture.shared * hidden} if of_qwen2 else {}
    return {
        "num_experts": mixture.experts,
        "num_experts_per_tok": router.top_k,
        "moe_intermediate_size": hidden,
        "norm_topk_prob": router.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(block_numbers(mixture.dense, "dense")),
        **own,
    }
