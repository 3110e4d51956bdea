"""LG's EXAONE 3 and 4."""

from spmd_engine.models.families.family import (
    LLAMA_MODULES,
    NORMS_AFTER,
    RMS,
    TIED,
    Family,
    Gguf,
    SlidingWindow,
    defaults,
    without,
)
from spmd_engine.models.families.gpt2 import GPT2_MODULES, GPT_NEO_ATTENTION

EXAONE = Family(
    "exaone",
    "a Llama under other names; transformers does not have it, so the tests compare it with that Llama",
    RMS | TIED | {
        "layers": ("num_layers", None), "epsilon": ("layer_norm_epsilon", 1e-5),
        "activation": ("activation_function", "silu")
    },
    without(GPT2_MODULES, "w0", "w1") | GPT_NEO_ATTENTION
    | {"gate": "mlp.c_fc_0", "up": "mlp.c_fc_1", "down": "mlp.c_proj"},
    gguf=Gguf("exaone")
)  # fmt: skip
EXAONE4 = Family(
    "exaone4",
    "norms after branches alone, and of queries and keys; where there are windows, rotary positions in the layers that "
    "have one",
    RMS | defaults(key_value_heads=32),
    LLAMA_MODULES | NORMS_AFTER,
    {"qk_norm": True, "norm_position": "after"},
    windows=SlidingWindow(4096, every=4, pattern=True, rotary_only="models with windows"),
    gguf=Gguf("exaone4", window=0),
)
