"""InternLM 2 and 3."""

from typing import Any

from spmd_engine.models.families import family
from spmd_engine.models.families.family import LLAMA_MODULES, RMS, Config, Family, Gguf, check_required, same

INTERNLM2 = Family(
    "internlm2",
    "a Llama under other names; transformers does not have it, so the tests compare it with that Llama",
    RMS | same("bias", "bias", "output_bias", default=True) | family.defaults(epsilon=1e-6),
    {
        "": "model.", "embedding": "tok_embeddings", "norm": "norm", "head": ("output", "lm_head"), "block": "layers.",
        "attention/norm": "attention_norm", "grouped": "attention.wqkv", "output": "attention.wo",
        "mlp/norm": "ffn_norm", "gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"
    },
    architecture="InternLM2ForCausalLM",
    gguf=Gguf("internlm2", reordered=True)
)  # fmt: skip


def _read3(config: Config, shape: Any) -> Any:
    """Biases are everywhere or nowhere, by the family's fields or by those of a Llama, which transformers reads."""
    bias = config.get("attention_bias", shape.bias)
    check_required("bias", config.get("mlp_bias", config.get("bias", False)), bias)
    return shape.changed(bias=bias, output_bias=bias, mlp_bias=bias)


INTERNLM3 = Family(
    "internlm3",
    "a Llama with biases everywhere or nowhere",
    RMS
    | same("qkv_bias", "bias", "output_bias", "mlp_bias")
    | family.defaults(context=32768, key_value_heads=2, head_width=128),
    LLAMA_MODULES,
    architecture="InternLM3ForCausalLM",
    ignored=("bias",),
    read=_read3,
    write=lambda shape: {"bias": shape.bias},
)
