"""Gemma 1 to 3."""

from dataclasses import replace
from math import sqrt
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.models.families import family
from spmd_engine.models.families.family import Config, Family, Gguf, Rope, SlidingWindow

_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu")  # in the first configs, "gelu" meant the others


def _read(config: Config, shape: Any) -> Any:
    """Queries are divided by the square root of ``query_pre_attn_scalar``."""
    activation = config.get("hidden_activation") or config.get("hidden_act") or _GELU[0]
    if activation not in _GELU:
        raise UsageError(f"hidden_activation is {activation!r}, which is not supported in a {shape.family}")
    if shape.family == "gemma":
        return shape
    return shape.changed(attention_scale=float(config.get("query_pre_attn_scalar") or 256) ** -0.5)


def _write(shape: Any) -> dict[str, Any]:
    written: dict[str, Any] = dict.fromkeys(("hidden_act", "hidden_activation"), _GELU[0])
    if shape.family == "gemma":
        return written
    scale = shape.width_of_heads**-0.5 if shape.attention_scale is None else shape.attention_scale
    divisor = round(scale**-2) if scale > 0 else 0
    if not divisor or abs(scale * sqrt(divisor) - 1) > 1e-12:
        raise UsageError(
            f"config.json of a {shape.family} cannot represent attention_scale {scale}: it must be 1 / sqrt(integer)"
        )
    return written | {"query_pre_attn_scalar": divisor}


def _read_gguf(facts: Config, tensors: Any, shape: Any) -> Any:
    """The 27B models, known by their numbers of layers, divide queries by sqrt(width / heads), others by sqrt(k)."""
    large = shape.layers == {"gemma2": 46, "gemma3-text": 62}[shape.family]
    return shape.changed(attention_scale=(shape.width // shape.heads if large else shape.head_width) ** -0.5)


_FIELDS = (
    family.SIZES
    | family.TIED
    | family.GROUPED
    | family.ATTENTION_BIAS
    | family.defaults(context=8192, epsilon=1e-6, head_width=256)
)
_CONSTANTS = {"activation": "gelu"}
GEMMA = Family(
    "gemma",
    "GELU gates, scaled embeddings, scales of norms that are stored less 1",
    _FIELDS,
    constants=_CONSTANTS,
    scaled_embedding=True,
    scale_offset=1.0,
    ignored=("hidden_act",),
    read=_read,
    write=_write,
    gguf=Gguf("gemma"),
)
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    about="a Gemma with norms after branches, too, windows, `query_pre_attn_scalar`, soft caps of scores and logits",
    fields=_FIELDS
    | {"attention_cap": ("attn_logit_softcapping", 50.0), "logits_cap": ("final_logit_softcapping", 30.0)},
    modules=family.LLAMA_MODULES | family.NORMS_AFTER,
    constants=_CONSTANTS | {"norm_position": "both"},
    also_read=("attention_scale",),
    windows=SlidingWindow(4096, every=2),
    gguf=Gguf(
        "gemma2",
        values={"attention_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping"},
        needed=("attn_logit_softcapping", "final_logit_softcapping"),
        window=4096,
        read=_read_gguf,
    ),
)
GEMMA3_TEXT = replace(
    GEMMA,
    model_type="gemma3_text",
    about="a Gemma 2 without caps, with norms of queries and keys, and rotary positions of their own in windows",
    fields=_FIELDS | family.defaults(context=131072),
    modules=family.LLAMA_MODULES | family.NORMS_AFTER,
    constants=_CONSTANTS | {"norm_position": "both", "qk_norm": True},
    architecture="Gemma3ForCausalLM",
    also_read=("attention_scale",),
    rope=Rope(1e6, in_windows=True, window_theta=1e4, window_theta_field="rope_local_base_freq"),
    windows=SlidingWindow(4096, every=6, pattern=True),
    multimodal={
        "gemma3": {
            "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4
        }
    },
    gguf=Gguf("gemma3", values={"logits_cap": "final_logit_softcapping"}, window=0, read=_read_gguf)
)  # fmt: skip
