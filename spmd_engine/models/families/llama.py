"""Llama, and models that differ from it in defaults and biases."""

from spmd_engine.models.families import family
from spmd_engine.models.families.family import Family, Gguf, Rope, SlidingWindow

LLAMA = Family(
    "llama",
    "RMSNorm, rotary positions, SwiGLU, fewer key heads than heads; `attention_bias` and `mlp_bias`",
    family.RMS | family.ATTENTION_BIAS | family.MLP_BIAS | family.defaults(epsilon=1e-6),
    family.LLAMA_MODULES,
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
    family.LLAMA_MODULES,
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
    family.LLAMA_MODULES,
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
    family.LLAMA_MODULES,
    rope=Rope(1e5, pairs="neighbours"),
)
SEED_OSS = Family(
    "seed_oss",
    "a Llama with biases of queries, keys and values; `attention_out_bias`",
    family.RMS
    | family.MLP_BIAS
    | family.defaults(context=524288, epsilon=1e-6, key_value_heads=8, head_width=128)
    | {"bias": ("attention_bias", True), "output_bias": ("attention_out_bias", False)},
    family.LLAMA_MODULES,
    gguf=Gguf("seed_oss", modules={"mlp/norm": "post_attention_norm"}),
)
