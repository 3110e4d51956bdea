"""Nemotron and Jais 2: layer norms, and perceptrons with max(z, 0)² and without a gate."""

from spmd_engine.models.families.family import ATTENTION_BIAS, MLP_BIAS, RMS, UNGATED_MODULES, Family, Gguf, Rope, same

_CONSTANTS = {"norm": "layer", "gated": False, "activation": "relu-squared"}
NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    "layer norms whose scales are stored less 1, half of each head rotates, perceptrons with max(z, 0)² and no gate",
    RMS
    | ATTENTION_BIAS
    | MLP_BIAS
    | {
        "context": ("max_position_embeddings", 4096),
        "epsilon": ("norm_eps", 1e-5),
        "activation": ("hidden_act", "relu2"),
    },
    UNGATED_MODULES,
    _CONSTANTS,
    scale_offset=1.0,
    rope=Rope(part=0.5),
    gguf=Gguf("nemotron"),
)
JAIS2 = Family(
    "jais2",
    "Jais2ForCausalLM",
    "layer norms, biases, perceptrons with max(z, 0)² and no gate",
    RMS
    | same("attention_bias", "bias", "output_bias", default=True)
    | same("mlp_bias", "perceptron_bias", default=True)
    | {
        "context": ("max_position_embeddings", 8192),
        "epsilon": ("layer_norm_eps", 1e-5),
        "activation": ("hidden_act", "relu2"),
    },
    UNGATED_MODULES,
    _CONSTANTS,
    gguf=Gguf("jais2"),
)
