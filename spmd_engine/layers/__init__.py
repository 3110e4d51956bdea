"""Layers as plain functions of arrays: one forward and backward pair a file, one text for every mesh."""

from spmd_engine.layers.attention import Attention
from spmd_engine.layers.context import ContextMethod
from spmd_engine.layers.declarations import Activation, Buffer, Parameter, SideOutput
from spmd_engine.layers.embedding import Embedding, Positions
from spmd_engine.layers.gather_keys import GatherKeys
from spmd_engine.layers.gradients import GradientSums
from spmd_engine.layers.head import Head
from spmd_engine.layers.layer import Extra, ForwardContext, Layer
from spmd_engine.layers.linear import Linear
from spmd_engine.layers.loss import cross_entropy, mean_squared_error
from spmd_engine.layers.mlp import MLP
from spmd_engine.layers.moe import MoE
from spmd_engine.layers.names import context_method
from spmd_engine.layers.norm import LayerNorm
from spmd_engine.layers.residual import Residual
from spmd_engine.layers.ring_attention import RingAttention
from spmd_engine.layers.router_options import RouterOptions
from spmd_engine.layers.skip import Skip
from spmd_engine.layers.ulysses import Ulysses

__all__ = [
    "Activation",
    "Attention",
    "Buffer",
    "ContextMethod",
    "Embedding",
    "Extra",
    "ForwardContext",
    "GatherKeys",
    "GradientSums",
    "Head",
    "Layer",
    "LayerNorm",
    "Linear",
    "MLP",
    "MoE",
    "Parameter",
    "Positions",
    "Residual",
    "RingAttention",
    "RouterOptions",
    "SideOutput",
    "Skip",
    "Ulysses",
    "context_method",
    "cross_entropy",
    "mean_squared_error",
]
