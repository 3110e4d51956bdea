"""Cohere's Command R and Command R7B."""

from dataclasses import replace
from typing import Any

from spmd_engine.models.families import family
from spmd_engine.models.families.family import Config, Family, Gguf, Rope, SlidingWindow

_LOGIT_SCALE = 0.0625  # the default


def _read(config: Config, shape: Any) -> Any:
    return shape.changed(logits_divisor=1 / float(config.get("logit_scale", _LOGIT_SCALE)))


def _read_cohere2(config: Config, shape: Any) -> Any:
    every = config.get("sliding_window_pattern") or 4
    family.check_required("layer_switch", config.get("layer_switch", every), every)
    return _read(config, shape)


_GGUF = Gguf(
    "command-r",
    read=lambda facts, tensors, shape: shape.changed(logits_divisor=1 / facts["logit_scale"]),
    write=lambda shape: {"logit_scale": 1 / shape.logits_divisor},
)
_FIELDS = (
    family.SIZES | family.TIED | family.SILU | family.GROUPED | family.ATTENTION_BIAS | family.defaults(context=8192)
)
COHERE = Family(
    "cohere",
    "a Llama's attention and perceptron side by side behind one norm, which has a scale alone; neighbours rotate; "
    "`logit_scale`; `use_qk_norm` is refused",
    _FIELDS,
    family.LLAMA_MODULES | {"block/norm": "input_layernorm"},
    {"norm": "layer-scale", "parallel": "one-norm"},
    also_read=("logits_divisor",),
    required={"use_qk_norm": False},
    rope=Rope(pairs="neighbours"),
    read=_read,
    write=lambda shape: {"logit_scale": 1 / shape.logits_divisor, "use_qk_norm": False},
    gguf=_GGUF,
)
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    about="a Cohere with rotary positions in the layers that see a window, and none in the others",
    fields=_FIELDS | family.defaults(head_width=0),
    required={
        "use_qk_norm": False, "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_gated_activation": True,
        "order_of_interleaved_layers": "local_attn_first", "use_parallel_block": True, "use_embedding_sharing": True
    },
    ignored=("use_parallel_embedding",),
    windows=SlidingWindow(4096, every=4, pattern=True, rotary_only="always"),
    read=_read_cohere2,
    gguf=replace(_GGUF, architecture="cohere2", window=4096)
)  # fmt: skip
