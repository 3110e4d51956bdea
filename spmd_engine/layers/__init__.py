"""Layers as plain functions of arrays: one forward and backward pair a file, one text for every mesh."""

from spmd_engine.layers.attention import Attention
from spmd_engine.layers.embedding import Embedding, Positions
from spmd_engine.layers.gradients import GradientSums
from spmd_engine.layers.head import Head
from spmd_engine.layers.layer import At, Layer, Parameter
from spmd_engine.layers.linear import Linear
from spmd_engine.layers.loss import cross_entropy, mean_squared_error
from spmd_engine.layers.mlp import MLP
from spmd_engine.layers.norm import LayerNorm
from spmd_engine.layers.residual import Residual
from spmd_engine.layers.skip import Skip

__all__ = [
    "At",
    "Attention",
    "Embedding",
    "GradientSums",
    "Head",
    "Layer",
    "LayerNorm",
    "Linear",
    "MLP",
    "Parameter",
    "Positions",
    "Residual",
    "Skip",
    "cross_entropy",
    "mean_squared_error",
]
