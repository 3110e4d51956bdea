"""Models as lists of layers, and model sizes by name."""

from spmd_engine.models.convnet import ImageShape, convnet, resnet
from spmd_engine.models.decoder import DECODERS, GPT_SIZES, DecoderConfig, GPTSize, decoder, gpt, token_loss
from spmd_engine.models.layouts import layout_for
from spmd_engine.models.mixture import Mixture
from spmd_engine.models.mlp import deep_mlp, mlp, two_layers
from spmd_engine.models.model import Model, class_accuracy, class_loss
from spmd_engine.models.names import build_model

__all__ = [
    "DECODERS",
    "GPT_SIZES",
    "DecoderConfig",
    "GPTSize",
    "ImageShape",
    "Mixture",
    "Model",
    "build_model",
    "class_accuracy",
    "class_loss",
    "convnet",
    "decoder",
    "deep_mlp",
    "gpt",
    "layout_for",
    "mlp",
    "resnet",
    "token_loss",
    "two_layers",
]
