"""OLMo 1 to 3, and OLMoE."""

from spmd_engine.models.families import family
from spmd_engine.models.families.family import Experts, Family, Gguf, Rope, SlidingWindow

_NORMALISED = {"query_key_norm": True, "norm_together": True}
OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    "a Llama whose norms have neither scale nor shift; `clip_qkv` is refused",
    {
        own: names
        for own, names in (family.SIZES | family.SILU | family.GROUPED | family.ATTENTION_BIAS).items()
        if own != "epsilon"
    },
    family.LLAMA_MODULES,
    {"norm": "layer-plain", "epsilon": 1e-5},
    gguf=Gguf("olmo", reordered=True),
)
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    "norms after branches alone, and of whole queries and keys",
    family.RMS | family.ATTENTION_BIAS,
    family.LLAMA_MODULES | family.NORMS_AFTER,
    _NORMALISED | {"norms": "after"},
    gguf=Gguf("olmo2"),
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    "an OLMo 2 with windows, and rotary positions of their own in them",
    family.RMS | family.ATTENTION_BIAS,
    family.LLAMA_MODULES | family.NORMS_AFTER,
    _NORMALISED | {"norms": "after"},
    rope=Rope(5e5, in_windows=True),
    windows=SlidingWindow(4096, every=4),
    gguf=Gguf("olmo2", lambda facts: facts.get("attention.sliding_window"), window=0),
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    "experts, and norms of whole queries and keys, over all heads together",
    family.RMS | family.ATTENTION_BIAS | family.defaults(context=4096),
    family.LLAMA_MODULES
    | {
        "router": "mlp.gate.weight",
        "expert/gate": "mlp.experts.{}.gate_proj.weight",
        "expert/up": "mlp.experts.{}.up_proj.weight",
        "expert/down": "mlp.experts.{}.down_proj.weight",
        "experts/gate_up": "mlp.experts.gate_up_proj",
        "experts/down": "mlp.experts.down_proj",
    },
    _NORMALISED,
    experts=Experts(64, 8),
    gguf=Gguf("olmoe"),
)
