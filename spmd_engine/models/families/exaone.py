"""LG's EXAONE 3 and 4."""

from spmd_engine.models.families import family
from spmd_engine.models.families.family import Family, Gguf, SlidingWindow
from spmd_engine.models.families.gpt2 import GPT2_MODULES, GPT_NEO_ATTENTION

EXAONE = Family(
    "exaone",
    "a Llama under other names; transformers does not have it, so the tests compare it with that Llama",
    family.RMS | family.TIED | {
        "layers": ("num_layers", None), "epsilon": ("layer_norm_epsilon", 1e-5),
        "activation": ("activation_function", "silu")
    },
    family.without(GPT2_MODULES, "w0", "w1") | GPT_NEO_ATTENTION
    | {"gate": "mlp.c_fc_0", "up": "mlp.c_fc_1", "down": "mlp.c_proj"},
    gguf=Gguf("exaone")
)  # fmt: skip
EXAONE4 = Family(
    "exaone4",
    "norms after branches alone, and of queries and keys; where there are windows, rotary positions in the layers that "
    "have one",
    family.RMS | family.defaults(key_value_heads=32),
    family.LLAMA_MODULES | family.NORMS_AFTER,
    {"qk_norm": True, "norm_position": "after"},
    windows=SlidingWindow(4096, every=4, pattern=True, rotary_only="models with windows"),
    gguf=Gguf("exaone4", window=0),
)
