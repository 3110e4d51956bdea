"""Falcon."""

from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.families.family import SIZES, TIED, Config, Family, Gguf, Rope, check_required, same

_NORMS = {"two-norms": 2, "one-norm": 1}


def _read(config: Config, shape: Any) -> Any:
    """One key head for all queries (Falcon 7B), or several in the new architecture, in which attention and perceptron
    may have a norm each."""
    parallel, multi_query = config.get("parallel_attn", True), config.get("multi_query", True)
    heads, norms = config.get("num_kv_heads"), config.get("num_ln_in_parallel_attn")
    new = bool(config.get("new_decoder_architecture"))
    two_norms = new and (norms or 2) == 2
    if not two_norms:
        check_required("parallel_attn", parallel, True)
    if not new:
        check_required("multi_query", multi_query, True)
        return shape.changed(key_value_heads=1)
    return shape.changed(key_value_heads=heads or shape.heads, parallel="two-norms" if two_norms else "one-norm")


def _write(shape: Any) -> dict[str, Any]:
    if shape.parallel not in _NORMS:
        raise UsageError(f"config.json of a falcon cannot represent parallel {shape.parallel!r}")
    heads = shape.key_value_heads or shape.heads
    new = heads > 1 or shape.parallel == "two-norms"
    written = {"alibi": False, "new_decoder_architecture": new, "multi_query": True, "parallel_attn": True}
    return written | ({"num_kv_heads": heads, "num_ln_in_parallel_attn": _NORMS[shape.parallel]} if new else {})


def _read_gguf(facts: Config, tensors: Any, shape: Any) -> Any:
    return shape.changed(parallel="two-norms") if "blk.0.attn_norm_2.weight" in tensors else shape


FALCON = Family(
    "falcon",
    "one layer norm before attention and perceptron, side by side, and one key head for all queries (7B), or several "
    "(`new_decoder_architecture`: 40B, 11B); its `alibi`, rounded to bfloat16, is refused",
    SIZES | TIED | same("bias", "bias", "output_bias", "mlp_bias") | {
        "hidden": ("ffn_hidden_size", 0), "epsilon": ("layer_norm_epsilon", 1e-5), "activation": ("activation", "gelu")
    },
    {
        "": "transformer.", "embedding": "word_embeddings", "norm": "ln_f", "block": "h.",
        "block/norm": "input_layernorm", "attention/norm": "ln_attn", "mlp/norm": "ln_mlp",
        "grouped": "self_attention.query_key_value", "output": "self_attention.dense", "w0": "mlp.dense_h_to_4h",
        "w1": "mlp.dense_4h_to_h"
    },
    {"norm": "layer", "gated": False, "parallel": "one-norm", "activation": "gelu-erf"},
    also_read=("key_value_heads", "parallel"),
    required={"alibi": False, "apply_residual_connection_post_layernorm": False},
    rope=Rope(),
    read=_read,
    write=_write,
    gguf=Gguf(
        "falcon",
        modules={"attention/norm": "attn_norm_2", "mlp/norm": "attn_norm"},
        joins_rows=True,
        read=_read_gguf,
    )
)  # fmt: skip
