"""Meta's OPT."""

from typing import Any

from spmd_engine.models.families.family import (
    ATTENTION,
    GPT_CONSTANTS,
    SIZES,
    TIED,
    Config,
    Family,
    check_required,
    without,
)


def _read(config: Config, shape: Any) -> Any:
    check_required("word_embed_proj_dim", config.get("word_embed_proj_dim") or shape.width, shape.width)
    return shape


OPT = Family(
    "opt",
    "learned positions, layer norms, ReLU; `do_layer_norm_before`",
    without(SIZES, "epsilon") | TIED | {"hidden": ("ffn_dim", None), "activation": ("activation_function", "relu")},
    ATTENTION | {
        "": "model.", "embedding": "decoder.embed_tokens", "positions": "decoder.embed_positions",
        "norm": "decoder.final_layer_norm", "block": "decoder.layers.", "attention/norm": "self_attn_layer_norm",
        "output": "self_attn.out_proj", "mlp/norm": "final_layer_norm", "w0": "fc1", "w1": "fc2"
    },
    GPT_CONSTANTS
    | {"bias": True, "output_bias": True, "learned_positions": True, "unused_positions": 2, "epsilon": 1e-5},
    architecture="OPTForCausalLM",
    rope=None,
    read=_read,
    write=lambda shape: {"do_layer_norm_before": True, "word_embed_proj_dim": shape.width}
)  # fmt: skip
