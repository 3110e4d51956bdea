"""Meta's OPT."""

from typing import Any

from spmd_engine.models.families import family
from spmd_engine.models.families.family import Config, Family


def _read(config: Config, shape: Any) -> Any:
    family.check_required("word_embed_proj_dim", config.get("word_embed_proj_dim") or shape.width, shape.width)
    return shape


OPT = Family(
    "opt",
    "learned positions, layer norms, ReLU; `do_layer_norm_before`",
    family.without(family.SIZES, "epsilon") | family.TIED
    | {"hidden": ("ffn_dim", None), "activation": ("activation_function", "relu")},
    family.ATTENTION | {
        "": "model.", "embedding": "decoder.embed_tokens", "positions": "decoder.embed_positions",
        "norm": "decoder.final_layer_norm", "block": "decoder.layers.", "attention/norm": "self_attn_layer_norm",
        "output": "self_attn.out_proj", "mlp/norm": "final_layer_norm", "w0": "fc1", "w1": "fc2"
    },
    family.GPT_CONSTANTS
    | {"bias": True, "output_bias": True, "learned_positions": True, "unused_positions": 2, "epsilon": 1e-5},
    architecture="OPTForCausalLM",
    rope=None,
    read=_read,
    write=lambda shape: {"do_layer_norm_before": True, "word_embed_proj_dim": shape.width}
)  # fmt: skip
