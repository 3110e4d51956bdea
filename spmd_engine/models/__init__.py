"""Models as lists of layers, with sizes by name."""

from spmd_engine.models.gpt import GPT_SIZES, GPTSize, gpt
from spmd_engine.models.layouts import layout_for
from spmd_engine.models.mixture import Mixture
from spmd_engine.models.mlp import deep_mlp, mlp, two_layers
from spmd_engine.models.model import Model
from spmd_engine.models.names import build_model

__all__ = [
    "GPT_SIZES",
    "GPTSize",
    "Mixture",
    "Model",
    "build_model",
    "deep_mlp",
    "gpt",
    "layout_for",
    "mlp",
    "two_layers",
]
