"""SantaCoder, StarCoder (``gpt_bigcode``) and StarCoder 2."""

from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.families import family
from spmd_engine.models.families.family import Config, Family, Gguf, Rope, SlidingWindow
from spmd_engine.models.families.gpt2 import GPT2_FIELDS, GPT2_MODULES


def _read_bigcode(config: Config, shape: Any) -> Any:
    heads = 1 if config.get("multi_query", True) else shape.heads
    family.check_required("num_key_value_heads", config.get("num_key_value_heads", heads), heads)
    return shape.changed(key_value_heads=heads)


def _write_bigcode(shape: Any) -> dict[str, Any]:
    heads = shape.key_value_heads or shape.heads
    if heads not in (1, shape.heads):
        raise UsageError(f"config.json of a gpt-bigcode cannot represent key_value_heads {heads}: give 1, or heads")
    return {"multi_query": heads == 1}


GPT_BIGCODE = Family(
    "gpt_bigcode",
    "a GPT-2 with one key head for all queries (SantaCoder, StarCoder)",
    GPT2_FIELDS | {"activation": ("activation_function", "gelu_pytorch_tanh")},
    GPT2_MODULES | {"grouped": "attn.c_attn"},
    family.GPT_CONSTANTS | {"learned_positions": True, "bias": True, "output_bias": True},
    architecture="GPTBigCodeForCausalLM",
    also_read=("key_value_heads",),
    required={"add_cross_attention": False},
    rope=None,
    read=_read_bigcode,
    write=_write_bigcode,
    gguf=Gguf("starcoder", joins_rows=True),
)
STARCODER2 = Family(
    "starcoder2",
    "layer norms, rotary positions, perceptrons without a gate, biases, a window",
    family.SIZES
    | family.TIED
    | family.GROUPED
    | family.same("use_bias", "bias", "output_bias", "mlp_bias", default=True)
    | family.defaults(key_value_heads=2, context=4096)
    | {"epsilon": ("norm_epsilon", 1e-5), "activation": ("hidden_act", "gelu_pytorch_tanh")},
    family.LLAMA_ATTENTION | {"w0": "mlp.c_fc", "w1": "mlp.c_proj"},
    family.GPT_CONSTANTS,
    required={"norm_type": "layer_norm"},
    ignored=("activation_function", "layer_norm_epsilon"),  # fields of older programs
    rope=Rope(),
    windows=SlidingWindow(listed=False),
    gguf=Gguf("starcoder2"),
)
