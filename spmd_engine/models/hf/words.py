"""What ``config.json`` says of a decoder that no table holds: what families have of their own, as it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.decoder import DecoderConfig
from spmd_engine.models.hf.family_tables import PARALLEL
from spmd_engine.models.hf.rope import rope_of


def words_beside_table(shape: DecoderConfig) -> dict[str, Any]:
    """Rotary positions, and what the family has beside the table; raises UsageError for what it has no words for."""
    own = _OWN.get(shape.family)
    return _words_of_rope(shape) | ({} if own is None else own(shape))


def _words_of_rope(shape: DecoderConfig) -> dict[str, Any]:
    if shape.learned or shape.alibi or shape.family == "gptj":
        return {}
    rope = rope_of(shape.rotary) | {"partial_rotary_factor": shape.rotary.part}
    said = {"rope_parameters": rope, "rope_scaling": None if rope["rope_type"] == "default" else rope}
    of_neox = shape.family == "gpt-neox"
    theta, part = ("rotary_emb_base", "rotary_pct") if of_neox else ("rope_theta", "partial_rotary_factor")
    return said | {theta: shape.rotary.theta, part: shape.rotary.part}


def _opt(shape: DecoderConfig) -> dict[str, Any]:
    return {"do_layer_norm_before": True, "word_embed_proj_dim": shape.width}


def _starcoder2(shape: DecoderConfig) -> dict[str, Any]:
    if shape.windowed:
        raise UsageError(f"a starcoder2 has no words for the window of blocks {shape.windowed}")
    return {"sliding_window": shape.window}


def _perhaps_parallel(shape: DecoderConfig) -> dict[str, Any]:
    if shape.parallel not in ("none", PARALLEL[shape.family]):
        raise UsageError(f"a {shape.family} has no words for parallel {shape.parallel!r}")
    return {"use_parallel_residual": shape.parallel != "none"}


def _gpt_neo(shape: DecoderConfig) -> dict[str, Any]:
    kinds = ["local" if shape.has_window(layer) else "global" for layer in range(shape.layers)]
    types = [[[kind], 1] for kind in kinds]
    return {"attention_layers": kinds, "attention_types": types, "window_size": shape.window or 256}


def _cohere(shape: DecoderConfig) -> dict[str, Any]:
    said = {"logit_scale": 1 / shape.logits_divisor, "use_qk_norm": False}
    return said | (_windows(shape) if shape.family == "cohere2" else {})


def _gptj(shape: DecoderConfig) -> dict[str, Any]:
    return {"rotary_dim": int((shape.head_width or shape.width // shape.heads) * shape.rotary.part)}


def _gpt_bigcode(shape: DecoderConfig) -> dict[str, Any]:
    shared = shape.key_value_heads or shape.heads
    if shared not in (1, shape.heads):
        raise UsageError(f"a gpt-bigcode has no words for key_value_heads {shared}: one, or all")
    return {"multi_query": shared == 1}


def _ministral3(shape: DecoderConfig) -> dict[str, Any]:
    """By how much queries grow beyond the context must be said."""
    rope = rope_of(shape.rotary) | {"llama_4_scaling_beta": 0.1}
    return {"rope_parameters": rope, "rope_scaling": None}


def _granite4(shape: DecoderConfig) -> dict[str, Any]:
    turned = [shape.is_turned(layer) for layer in range(shape.layers)]
    if any(turned) and not all(turned):
        raise UsageError("a granitemoehybrid has rotary positions in all blocks, or in none")
    width = shape.head_width or shape.width // shape.heads
    return {
        "num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": shape.hidden,
        "layer_types": ["attention"] * shape.layers, "position_embedding_type": "rope" if turned[0] else "nope",
        "attention_multiplier": width**-0.5 if shape.attention_scale is None else shape.attention_scale,
        "mamba_n_heads": 1,  # there are none, but those who read it look whether their width is a multiple
    }  # fmt: skip


def _mpt(shape: DecoderConfig) -> dict[str, Any]:
    ratio, left = divmod(shape.hidden, shape.width)
    if left:
        raise UsageError(f"an mpt has no words for hidden {shape.hidden}: it is a multiple of {shape.width}")
    attention = {"alibi": True, "alibi_bias_max": int(shape.alibi), "softmax_scale": shape.attention_scale}
    return {"expansion_ratio": ratio, "no_bias": True, "attn_config": attention}


def _falcon(shape: DecoderConfig) -> dict[str, Any]:
    shared = shape.key_value_heads or shape.heads
    new = shared > 1 or shape.parallel == "two-norms"
    said = {"alibi": False, "new_decoder_architecture": new, "multi_query": True, "parallel_attn": True}
    norms = {"two-norms": 2, "one-norm": 1}
    if shape.parallel not in norms:
        raise UsageError(f"a falcon has no words for parallel {shape.parallel!r}")
    return said | ({"num_kv_heads": shared, "num_ln_in_parallel_attn": norms[shape.parallel]} if new else {})


def _windows(shape: DecoderConfig) -> dict[str, Any]:
    near = [shape.has_window(layer) for layer in range(shape.layers)]
    turned = [shape.is_turned(layer) for layer in range(shape.layers)]
    if shape.family in ("cohere2", "exaone4") and turned != near and (shape.family == "cohere2" or shape.window):
        raise UsageError(f"a {shape.family} has rotary positions in the blocks that see a window, and in no others")
    if shape.family == "exaone4" and not shape.window and not all(turned):
        raise UsageError("an exaone4 without windows has rotary positions in all blocks")
    kinds = ["sliding_attention" if each else "full_attention" for each in near]
    return {"sliding_window": shape.window, "layer_types": kinds}


_OWN: Mapping[str, Callable[[DecoderConfig], dict[str, Any]]] = {
    "opt": _opt, "starcoder2": _starcoder2, "gpt-neox": _perhaps_parallel, "stablelm": _perhaps_parallel,
    "gpt-neo": _gpt_neo, "cohere": _cohere, "cohere2": _cohere, "gptj": _gptj, "falcon": _falcon, "mpt": _mpt,
    "gpt-bigcode": _gpt_bigcode, "granitemoehybrid": _granite4, "ministral3": _ministral3,
    **dict.fromkeys(("exaone4", "cwm", "ministral"), _windows),
}  # fmt: skip
