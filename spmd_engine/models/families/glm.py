"""GLM-4."""

from spmd_engine.models.families.family import LLAMA_ATTENTION, RMS, Family, Gguf, Rope

_FIELDS = RMS | {
    "key_value_heads": ("num_key_value_heads", 2), "head_width": ("head_dim", 128),
    "context": ("max_position_embeddings", 131072), "epsilon": ("rms_norm_eps", 1.5625e-7),
    "bias": ("attention_bias", True)
}  # fmt: skip
_MODULES = LLAMA_ATTENTION | {"gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"}
_ROPE = Rope(part=0.5, pairs="neighbours")
GLM = Family(
    "glm",
    "GlmForCausalLM",
    "neighbours of half of each head rotate, gate and up in one tensor",
    _FIELDS,
    _MODULES,
    rope=_ROPE,
    gguf=Gguf("chatglm"),
)
GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    "a GLM with norms after branches, too",
    _FIELDS,
    _MODULES | {"attention/norm_after": "post_self_attn_layernorm", "mlp/norm_after": "post_mlp_layernorm"},
    {"norms": "both"},
    rope=_ROPE,
    gguf=Gguf("glm4"),
)
