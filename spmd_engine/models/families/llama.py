"""Llama, and models that differ from it in a few respects."""

from dataclasses import replace
from math import sqrt
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.layers import RotaryOptions
from spmd_engine.models.families import family
from spmd_engine.models.families.family import Config, Experts, Family, Gguf, Rope, SlidingWindow
from spmd_engine.models.families.gpt import GPT2_MODULES, GPT_NEO_ATTENTION
from spmd_engine.models.mixture import as_text

LLAMA = Family(
    "llama",
    "RMSNorm, rotary positions, SwiGLU, fewer key heads than heads; `attention_bias` and `mlp_bias`",
    family.RMS | family.ATTENTION_BIAS | family.MLP_BIAS | family.defaults(epsilon=1e-6),
    gguf=Gguf("llama", reordered=True),
)
ARCEE = Family(
    "arcee",
    "a Llama whose perceptrons have no gate, and max(z, 0)²",
    family.RMS | family.ATTENTION_BIAS | family.MLP_BIAS | family.defaults(context=4096, activation="relu2"),
    family.UNGATED_MODULES,
    {"gated": False, "activation": "relu-squared"},
    gguf=Gguf("arcee", reordered=True),
)
CWM = Family(
    "cwm",
    "a Llama with windows in three of four layers (`layer_types`)",
    family.RMS | family.MLP_BIAS | family.defaults(context=131072, key_value_heads=8, head_width=128),
    rope=Rope(1e6),
    windows=SlidingWindow(8192, has_window=lambda config, shape, layer: bool(layer % 4)),
)
ERNIE4_5 = Family(
    "ernie4_5",
    "a Llama that rotates neighbours; `use_bias`",
    family.RMS
    | family.TIED
    | family.same("use_bias", "bias", "output_bias", "mlp_bias")
    | family.defaults(context=131072, key_value_heads=2, head_width=128),
    architecture="Ernie4_5ForCausalLM",
    required={"use_rmsnorm": True},
    rope=Rope(5e5, pairs="neighbours"),
    gguf=Gguf("ernie4_5"),
)
HELIUM = Family(
    "helium",
    "a Llama that rotates neighbours",
    family.RMS
    | family.MLP_BIAS
    | family.same("attention_bias", "bias")
    | family.defaults(context=4096, epsilon=1e-8, key_value_heads=20, head_width=128),
    rope=Rope(1e5, pairs="neighbours"),
)
SEED_OSS = Family(
    "seed_oss",
    "a Llama with biases of queries, keys and values; `attention_out_bias`",
    family.RMS
    | family.MLP_BIAS
    | family.defaults(context=524288, epsilon=1e-6, key_value_heads=8, head_width=128)
    | {"bias": ("attention_bias", True), "output_bias": ("attention_out_bias", False)},
    gguf=Gguf("seed_oss", modules={"mlp/norm": "post_attention_norm"}),
)


# --- InternLM 2 and 3


INTERNLM2 = Family(
    "internlm2",
    "a Llama under other names; transformers does not have it, so the tests compare it with that Llama",
    family.RMS | family.same("bias", "bias", "output_bias", default=True) | family.defaults(epsilon=1e-6),
    {
        "": "model.", "embedding": "tok_embeddings", "norm": "norm", "head": ("output", "lm_head"), "block": "layers.",
        "attention/norm": "attention_norm", "grouped": "attention.wqkv", "output": "attention.wo",
        "mlp/norm": "ffn_norm", "gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"
    },
    architecture="InternLM2ForCausalLM",
    gguf=Gguf("internlm2", reordered=True)
)  # fmt: skip


def _read_internlm3(config: Config, shape: Any) -> Any:
    """Biases are everywhere or nowhere, by the family's fields or by those of a Llama, which transformers reads."""
    bias = config.get("attention_bias", shape.bias)
    family.check_required("bias", config.get("mlp_bias", config.get("bias", False)), bias)
    return shape.changed(bias=bias, output_bias=bias, mlp_bias=bias)


INTERNLM3 = Family(
    "internlm3",
    "a Llama with biases everywhere or nowhere",
    family.RMS
    | family.same("qkv_bias", "bias", "output_bias", "mlp_bias")
    | family.defaults(context=32768, key_value_heads=2, head_width=128),
    architecture="InternLM3ForCausalLM",
    ignored=("bias",),
    read=_read_internlm3,
    write=lambda shape: {"bias": shape.bias},
)


# --- MiniCPM


def _read_minicpm(config: Config, shape: Any) -> Any:
    depth, base = config.get("scale_depth"), config.get("dim_model_base")
    return shape.changed(
        embedding_scale=float(config.get("scale_emb") or 1),
        residual_scale=float(depth) / sqrt(shape.layers) if depth else 1.0,
        logits_divisor=shape.width / base if base else 1.0,
    )


def _write_minicpm(shape: Any) -> dict[str, Any]:
    return {
        "scale_emb": shape.embedding_scale,
        "scale_depth": shape.residual_scale * sqrt(shape.layers),
        "dim_model_base": shape.width / shape.logits_divisor,
    }


_FACTORS = {"embedding_scale": "embedding_scale", "residual_scale": "residual_scale", "logits_divisor": "logit_scale"}
MINICPM = Family(
    "minicpm",
    "a Granite with other fields; transformers does not have it, so the tests compare it with that Granite",
    family.RMS | family.TIED | family.ATTENTION_BIAS | family.defaults(context=32768, epsilon=1e-6),
    architecture="MiniCPMForCausalLM",
    also_read=tuple(_FACTORS),
    ignored=("mup_denominator",),  # used in training only
    read=_read_minicpm,
    write=_write_minicpm,
    gguf=Gguf("minicpm", reordered=True, values=_FACTORS, needed=tuple(_FACTORS.values())),
)


# --- SmolLM 3


def _read_smollm(config: Config, shape: Any) -> Any:
    """``no_rope_layers`` is 1 for layers with rotary positions."""
    rotates = config.get("no_rope_layers")
    if rotates is None:
        every = config.get("no_rope_layer_interval", 4)
        rotates = [(layer + 1) % every for layer in range(shape.layers)]
    if len(rotates) != shape.layers:
        raise UsageError(f"no_rope_layers has {len(rotates)} values, but there are {shape.layers} layers")
    return shape.changed(no_rope_layers=as_text(layer for layer in range(shape.layers) if not rotates[layer]))


SMOLLM3 = Family(
    "smollm3",
    "a Llama with layers without rotary positions (`no_rope_layers`)",
    family.RMS | family.TIED | family.ATTENTION_BIAS | family.defaults(context=32768, epsilon=1e-6),
    architecture="SmolLM3ForCausalLM",
    also_read=("no_rope_layers",),
    rope=Rope(2e6),
    windows=SlidingWindow(switch=True, has_window=lambda config, shape, layer: not shape.has_rope(layer)),
    read=_read_smollm,
    write=lambda shape: {"no_rope_layers": [int(shape.has_rope(layer)) for layer in range(shape.layers)]},
    gguf=Gguf(
        "smollm3",
        reordered=True,
        read=lambda facts, tensors, shape: shape.changed(no_rope_layers=as_text(range(3, shape.layers, 4))),
    ),
)


# --- Tencent's Hunyuan


def _rotary_hunyuan(config: Config, shape: Any) -> RotaryOptions:
    """``dynamic`` with an ``alpha`` has the base theta · alpha^(k / (k - 2)) at all positions."""
    from spmd_engine.models.hf.rope import rotary_of_config

    width = shape.width_of_heads
    family.check_required("attention_head_dim", config.get("attention_head_dim") or width, width)
    ropes = {name: dict(rope) for name in ("rope_scaling", "rope_parameters") if (rope := config.get(name))}
    dynamic = [rope for rope in ropes.values() if "dynamic" in (rope.get("rope_type"), rope.get("type"))]
    alphas = {float(rope.get("alpha") or 1) for rope in dynamic} or {1.0}
    for rope in dynamic:
        for name in ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):  # without effect except alpha
            rope.pop(name, None)
    if len(alphas) > 1:
        raise UsageError(f"rope_scaling and rope_parameters differ in alpha: {sorted(alphas)}")
    rotary = rotary_of_config({**config, **ropes}, shape, Rope())
    return rotary.changed(theta=rotary.theta * alphas.pop() ** (width / (width - 2)))


HUNYUAN_V1_DENSE = Family(
    "hunyuan_v1_dense",
    "a Llama whose queries and keys are normalised after they rotate; `dynamic` positions with an `alpha`",
    family.RMS | family.ATTENTION_BIAS,
    family.LLAMA_MODULES | {"query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm"},
    {"qk_norm": True, "rope_before_norm": True},
    architecture="HunYuanDenseV1ForCausalLM",
    required={
        "use_qk_norm": True, "norm_type": "rms", "use_rotary_pos_emb": True, "use_cla": False, "num_experts": 1,
        "position_embedding_xdrope": False, "mlp_bias": False, "add_classification_head": False
    },
    rope=Rope(read=_rotary_hunyuan),
    gguf=Gguf("hunyuan-dense")
)  # fmt: skip


# --- LG's EXAONE 3 and 4


EXAONE = Family(
    "exaone",
    "a Llama under other names; transformers does not have it, so the tests compare it with that Llama",
    family.RMS | family.TIED | {
        "layers": ("num_layers", None), "epsilon": ("layer_norm_epsilon", 1e-5),
        "activation": ("activation_function", "silu")
    },
    family.without(GPT2_MODULES, "w0", "w1") | GPT_NEO_ATTENTION
    | {"gate": "mlp.c_fc_0", "up": "mlp.c_fc_1", "down": "mlp.c_proj"},
    gguf=Gguf("exaone")
)  # fmt: skip
EXAONE4 = Family(
    "exaone4",
    "norms after branches alone, and of queries and keys; where there are windows, rotary positions in the layers that "
    "have one",
    family.RMS | family.defaults(key_value_heads=32),
    family.LLAMA_MODULES | family.NORMS_AFTER,
    {"qk_norm": True, "norm_position": "after"},
    windows=SlidingWindow(4096, every=4, pattern=True, rotary_only="models with windows"),
    gguf=Gguf("exaone4", window=0),
)


# --- GLM-4


_GLM_FIELDS = family.RMS | {"bias": ("attention_bias", True)}
_GLM_FIELDS |= family.defaults(key_value_heads=2, head_width=128, context=131072, epsilon=1.5625e-7)
_GLM_MODULES = family.LLAMA_ATTENTION | family.GATE_UP
_GLM_ROPE = Rope(part=0.5, pairs="neighbours")
GLM = Family(
    "glm",
    "neighbours of half of each head rotate, gate and up in one tensor",
    _GLM_FIELDS,
    _GLM_MODULES,
    rope=_GLM_ROPE,
    gguf=Gguf("chatglm"),
)
GLM4 = Family(
    "glm4",
    "a GLM with norms after branches, too",
    _GLM_FIELDS,
    _GLM_MODULES | {"attention/norm_after": "post_self_attn_layernorm", "mlp/norm_after": "post_mlp_layernorm"},
    {"norm_position": "both"},
    rope=_GLM_ROPE,
    gguf=Gguf("glm4"),
)


# --- Granite, with or without experts, and Granite 4 without Mamba layers


_GRANITE_FIELDS = family.RMS | family.ATTENTION_BIAS | {
    "epsilon": ("rms_norm_eps", 1e-6), "embedding_scale": ("embedding_multiplier", 1.0),
    "residual_scale": ("residual_multiplier", 1.0), "attention_scale": ("attention_multiplier", 1.0),
    "logits_divisor": ("logits_scaling", 1.0)
}  # fmt: skip
_GRANITE_GGUF_VALUES = {
    "embedding_scale": "embedding_scale", "residual_scale": "residual_scale", "attention_scale": "attention.scale",
    "logits_divisor": "logit_scale"
}  # fmt: skip
_GRANITE3 = {"rope.scaling.finetuned": True}  # Granite 4 has no positions
GRANITE = Family(
    "granite",
    "a Llama with `embedding_multiplier`, `residual_multiplier`, `attention_multiplier`, `logits_scaling`",
    _GRANITE_FIELDS | family.MLP_BIAS,
    gguf=Gguf("granite", reordered=True, values=_GRANITE_GGUF_VALUES, needed=("logit_scale",), required=_GRANITE3),
)
GRANITEMOE = Family(
    "granitemoe",
    "a Granite with experts, of which each layer keeps all in two tensors",
    _GRANITE_FIELDS,
    family.LLAMA_ATTENTION
    | {
        "router": ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
        "experts/gate_up": ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        "experts/down": ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    },
    architecture="GraniteMoeForCausalLM",
    experts=Experts(8, 2, "num_local_experts", normalised=True, gguf_normalised=True),
    gguf=Gguf("granitemoe", reordered=True, values=_GRANITE_GGUF_VALUES, required=_GRANITE3),
)


def _read_hybrid(config: Config, shape: Any) -> Any:
    """Read a model without Mamba layers and experts, with rotary positions in all layers or in none."""
    family.check_required("num_local_experts", config.get("num_local_experts", 8), 0)
    for name in config:
        if name.startswith(("mamba_", "time_step_")):
            config.get(name)
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
    if unknown := sorted(set(kinds) - {"attention", "full_attention"}):
        raise UsageError(f"layer_types has {unknown[0]!r}, which is not supported")
    positions = config.get("position_embedding_type") or "nope"
    if positions == "rope":
        return shape
    family.check_required("position_embedding_type", positions, "nope")
    return shape.changed(no_rope_layers=as_text(range(shape.layers)))


def _write_hybrid(shape: Any) -> dict[str, Any]:
    rotates = [shape.has_rope(layer) for layer in range(shape.layers)]
    if any(rotates) and not all(rotates):
        raise UsageError("a granitemoehybrid must have rotary positions in all blocks, or in none")
    return {
        "num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": shape.hidden,
        "layer_types": ["attention"] * shape.layers, "position_embedding_type": "rope" if rotates[0] else "nope",
        "mamba_n_heads": 1,  # unused, but readers check that it divides the width
    }  # fmt: skip


GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    "Granite 4 without Mamba and experts (`micro`, `350m`, `1b`)",
    _GRANITE_FIELDS | {"hidden": ("shared_intermediate_size", 1024)},
    family.LLAMA_ATTENTION | {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"},
    architecture="GraniteMoeHybridForCausalLM",
    also_read=("no_rope_layers",),
    required={"normalization_function": "rmsnorm"},
    ignored=("layers_block_type", "intermediate_size", "num_experts_per_tok", "init_method"),
    read=_read_hybrid,
    write=_write_hybrid,
)


# --- Cohere's Command R and Command R7B


def _read_cohere(config: Config, shape: Any) -> Any:
    return shape.changed(logits_divisor=1 / float(config.get("logit_scale", 0.0625)))


def _read_cohere2(config: Config, shape: Any) -> Any:
    every = config.get("sliding_window_pattern") or 4
    family.check_required("layer_switch", config.get("layer_switch", every), every)
    return _read_cohere(config, shape)


_COHERE_GGUF = Gguf(
    "command-r",
    read=lambda facts, tensors, shape: shape.changed(logits_divisor=1 / facts["logit_scale"]),
    write=lambda shape: {"logit_scale": 1 / shape.logits_divisor},
)
_COHERE_FIELDS = (
    family.SIZES | family.TIED | family.SILU | family.GROUPED | family.ATTENTION_BIAS | family.defaults(context=8192)
)
COHERE = Family(
    "cohere",
    "a Llama's attention and perceptron side by side behind one norm, which has a scale alone; neighbours rotate; "
    "`logit_scale`; `use_qk_norm` is refused",
    _COHERE_FIELDS,
    family.LLAMA_MODULES | {"block/norm": "input_layernorm"},
    {"norm": "layer-scale", "parallel": "one-norm"},
    also_read=("logits_divisor",),
    required={"use_qk_norm": False},
    rope=Rope(pairs="neighbours"),
    read=_read_cohere,
    write=lambda shape: {"logit_scale": 1 / shape.logits_divisor, "use_qk_norm": False},
    gguf=_COHERE_GGUF,
)
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    about="a Cohere with rotary positions in the layers that see a window, and none in the others",
    fields=_COHERE_FIELDS | family.defaults(head_width=0),
    required={
        "use_qk_norm": False, "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_gated_activation": True,
        "order_of_interleaved_layers": "local_attn_first", "use_parallel_block": True, "use_embedding_sharing": True
    },
    ignored=("use_parallel_embedding",),
    windows=SlidingWindow(4096, every=4, pattern=True, rotary_only="always"),
    read=_read_cohere2,
    gguf=replace(_COHERE_GGUF, architecture="cohere2", window=4096)
)  # fmt: skip


# --- Nemotron and Jais 2: layer norms, and perceptrons with max(z, 0)² and without a gate


_NEMOTRON_FIELDS = family.RMS | family.defaults(context=4096, activation="relu2")
_NEMOTRON_CONSTANTS = {"norm": "layer", "gated": False, "activation": "relu-squared"}
NEMOTRON = Family(
    "nemotron",
    "layer norms whose scales are stored less 1, half of each head rotates, perceptrons with max(z, 0)² and no gate",
    _NEMOTRON_FIELDS | family.ATTENTION_BIAS | family.MLP_BIAS | {"epsilon": ("norm_eps", 1e-5)},
    family.UNGATED_MODULES,
    _NEMOTRON_CONSTANTS,
    scale_offset=1.0,
    rope=Rope(part=0.5),
    gguf=Gguf("nemotron"),
)
JAIS2 = Family(
    "jais2",
    "layer norms, biases, perceptrons with max(z, 0)² and no gate",
    _NEMOTRON_FIELDS
    | family.same("attention_bias", "bias", "output_bias", default=True)
    | family.same("mlp_bias", "mlp_bias", default=True)
    | family.defaults(context=8192)
    | {"epsilon": ("layer_norm_eps", 1e-5)},
    family.UNGATED_MODULES,
    _NEMOTRON_CONSTANTS,
    gguf=Gguf("jais2"),
)
