"""LG's EXAONE 3 and 4."""

from spmd_engine.models.families import family
from spmd_engine.models.families.family import LLAMA_MODULES, NORMS_AFTER, RMS, TIED, Family, Gguf, SlidingWindow
from spmd_engine.models.families.gpt2 import GPT2_MODULES

EXAONE = Family(
    "exaone",
    "ExaoneForCausalLM",
    "a Llama under other names; transformers does not have it, so the tests compare it with that Llama",
    RMS
    | TIED
    | {
        "layers": ("num_layers", None),
        "epsilon": ("layer_norm_epsilon", 1e-5),
        "activation": ("activation_function", "silu")
    },
    {name: module for name, module in GPT2_MODULES.items() if name not in ("w0", "w1")}
    | {
        "query": "attn.attention.q_proj", "key": "attn.attention.k_proj", "value": "attn.attention.v_proj",
        "output": "attn.attention.out_proj", "gate": "mlp.c_fc_0", "up": "mlp.c_fc_1", "down": "mlp.c_proj"
    },
    gguf=Gguf("exaone")
)  # fmt: skip
EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    "norms after branches alone, and of queries and keys; where there are windows, rotary positions in the layers that "
    "have one",
    RMS | family.defaults(key_value_heads=32),
    LLAMA_MODULES | NORMS_AFTER,
    {"query_key_norm": True, "norms": "after"},
    windows=SlidingWindow(4096, every=4, pattern=True, rotary_only="models with windows"),
    gguf=Gguf("exaone4", window=0),
)
