"""MosaicML's MPT."""

from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.families.family import TIED, Config, Family, Gguf, check_required

#: Fields of ``attn_config`` that are read below or change nothing up to the context.
_ATTENTION = ("alibi", "alibi_bias_max", "softmax_scale", "attn_pdrop", "attn_impl", "attn_uses_sequence_id")


def _read(config: Config, shape: Any) -> Any:
    from spmd_engine.models.hf.read_config import HARMLESS

    attention = config.get("attn_config") or {}
    for name, value in attention.items():
        if value and name not in HARMLESS.union(_ATTENTION) and (name, value) != ("attn_type", "multihead_attention"):
            raise UsageError(f"attn_config: {name} is {value!r}, which is not supported")
    check_required("alibi of attn_config", attention.get("alibi", True), True)
    norm = config.get("norm_type") or "layernorm"
    if norm not in ("layernorm", "low_precision_layernorm"):
        raise UsageError(f"norm_type is {norm!r}, which is not supported")
    scale = attention.get("softmax_scale")
    return shape.changed(
        hidden=config.get("expansion_ratio", 4) * shape.width,
        alibi=float(attention.get("alibi_bias_max", 8)),
        attention_scale=None if scale is None else float(scale),
    )


def _write(shape: Any) -> dict[str, Any]:
    ratio, rest = divmod(shape.hidden, shape.width)
    if rest or shape.alibi is None:
        raise UsageError(
            "config.json of an mpt cannot represent a hidden width that is no multiple of the width, or "
            f"no ALiBi: hidden {shape.hidden}, width {shape.width}, alibi {shape.alibi}"
        )
    attention = {"alibi": True, "alibi_bias_max": int(shape.alibi), "softmax_scale": shape.attention_scale}
    return {"expansion_ratio": ratio, "no_bias": True, "attn_config": attention}


def _read_gguf(facts: Config, tensors: Any, shape: Any) -> Any:
    if not facts["attention.max_alibi_bias"]:
        raise UsageError("attention.max_alibi_bias is 0: learned positions of an MPT are not supported")
    return shape


MPT = Family(
    "mpt",
    "scores that fall with the distance of the key (ALiBi), layer norms that have a scale alone, no biases; its "
    "`alibi_bias_max` counts, where transformers takes 8 for it",
    TIED | {
        "layers": ("n_layers", None), "width": ("d_model", None), "heads": ("n_heads", None),
        "vocabulary": ("vocab_size", None), "context": ("max_seq_len", 2048), "epsilon": ("layer_norm_epsilon", 1e-5)
    },
    {
        "": "transformer.", "embedding": "wte", "norm": "norm_f", "block": "blocks.", "attention/norm": "norm_1",
        "stacked": "attn.Wqkv", "output": "attn.out_proj", "mlp/norm": "norm_2", "w0": "ffn.up_proj",
        "w1": "ffn.down_proj"
    },
    {"norm": "layer-scale", "gated": False, "activation": "gelu-erf", "alibi": 8.0},
    also_read=("hidden", "alibi", "attention_scale"),
    required={"no_bias": True, "logit_scale": None, "embedding_fraction": 1.0},
    ignored=("learned_pos_emb", "init_config"),  # with ALiBi there are no learned positions
    rope=None,
    read=_read,
    write=_write,
    gguf=Gguf("mpt", joins_rows=True, values={"alibi": "attention.max_alibi_bias"}, read=_read_gguf)
)  # fmt: skip
