"""Nemotron and Jais 2: layer norms, and perceptrons with max(z, 0)² and without a gate."""

from spmd_engine.models.families import family
from spmd_engine.models.families.family import Family, Gguf, Rope

_FIELDS = family.RMS | family.defaults(context=4096, activation="relu2")
_CONSTANTS = {"norm": "layer", "gated": False, "activation": "relu-squared"}
NEMOTRON = Family(
    "nemotron",
    "layer norms whose scales are stored less 1, half of each head rotates, perceptrons with max(z, 0)² and no gate",
    _FIELDS | family.ATTENTION_BIAS | family.MLP_BIAS | {"epsilon": ("norm_eps", 1e-5)},
    family.UNGATED_MODULES,
    _CONSTANTS,
    scale_offset=1.0,
    rope=Rope(part=0.5),
    gguf=Gguf("nemotron"),
)
JAIS2 = Family(
    "jais2",
    "layer norms, biases, perceptrons with max(z, 0)² and no gate",
    _FIELDS
    | family.same("attention_bias", "bias", "output_bias", default=True)
    | family.same("mlp_bias", "mlp_bias", default=True)
    | family.defaults(context=8192)
    | {"epsilon": ("layer_norm_eps", 1e-5)},
    family.UNGATED_MODULES,
    _CONSTANTS,
    gguf=Gguf("jais2"),
)
