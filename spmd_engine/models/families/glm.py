"""GLM-4."""

from spmd_engine.models.families.family import GATE_UP, LLAMA_ATTENTION, RMS, Family, Gguf, Rope, defaults

_FIELDS = RMS | {"bias": ("attention_bias", True)}
_FIELDS |= defaults(key_value_heads=2, head_width=128, context=131072, epsilon=1.5625e-7)
_MODULES = LLAMA_ATTENTION | GATE_UP
_ROPE = Rope(part=0.5, pairs="neighbours")
GLM = Family(
    "glm",
    "neighbours of half of each head rotate, gate and up in one tensor",
    _FIELDS,
    _MODULES,
    rope=_ROPE,
    gguf=Gguf("chatglm"),
)
GLM4 = Family(
    "glm4",
    "a GLM with norms after branches, too",
    _FIELDS,
    _MODULES | {"attention/norm_after": "post_self_attn_layernorm", "mlp/norm_after": "post_mlp_layernorm"},
    {"norm_position": "both"},
    rope=_ROPE,
    gguf=Gguf("glm4"),
)
