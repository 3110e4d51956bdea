"""OLMo 1 to 3, and OLMoE."""

from dataclasses import replace

from spmd_engine.models.families import family
from spmd_engine.models.families.family import Experts, Family, Gguf, Rope, SlidingWindow

_FIELDS = family.RMS | family.ATTENTION_BIAS
_NORMALISED = {"qk_norm": True, "qk_norm_all_heads": True}
OLMO = Family(
    "olmo",
    "a Llama whose norms have neither scale nor shift; `clip_qkv` is refused",
    family.without(family.SIZES | family.SILU | family.GROUPED | family.ATTENTION_BIAS, "epsilon"),
    constants={"norm": "layer-plain", "epsilon": 1e-5},
    gguf=Gguf("olmo", reordered=True),
)
OLMO2 = Family(
    "olmo2",
    "norms after branches alone, and of whole queries and keys",
    _FIELDS,
    family.LLAMA_MODULES | family.NORMS_AFTER,
    _NORMALISED | {"norm_position": "after"},
    gguf=Gguf("olmo2"),
)
OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    about="an OLMo 2 with windows, and rotary positions of their own in them",
    rope=Rope(5e5, in_windows=True),
    windows=SlidingWindow(4096, every=4),
    gguf=Gguf("olmo2", lambda facts: facts.get("attention.sliding_window"), window=0),
)
OLMOE = Family(
    "olmoe",
    "experts, and norms of whole queries and keys, over all heads together",
    _FIELDS | family.defaults(context=4096),
    family.LLAMA_MODULES | family.EXPERTS,
    _NORMALISED,
    experts=Experts(64, 8),
    gguf=Gguf("olmoe"),
)
