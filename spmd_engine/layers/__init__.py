"""Layers as plain functions of arrays: one forward and backward pair a file, one text for every mesh."""

from spmd_engine.layers.attention import Attention
from spmd_engine.layers.embedding import Embedding, Positions
from spmd_engine.layers.gradients import GradientSums
from spmd_engine.layers.head import Head
from spmd_engine.layers.layer import At, Layer, Parameter
from spmd_engine.layers.loss import cross_entropy, mean_squared_error
from spmd_engine.layers.mlp import MLP
from spmd_engine.layers.norm import LayerNorm
from spmd_engine.layers.residual import Residual

__all__ = [
    "At",
    "Attention",
    "Embedding",
    "GradientSums",
    "Head",
    "Layer",
    "LayerNorm",
    "MLP",
    "Parameter",
    "Positions",
    "Residual",
    "cross_entropy",
    "mean_squared_error",
]
