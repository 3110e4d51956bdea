"""Layers as plain functions of arrays: one forward and backward pair a file, one text for every mesh."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.layers.attention.attention import Attention
    from spmd_engine.layers.attention.context import ContextMethod, GatherKeys
    from spmd_engine.layers.attention.kv_cache import Cache
    from spmd_engine.layers.attention.methods import context_method
    from spmd_engine.layers.attention.ring_attention import RingAttention
    from spmd_engine.layers.attention.rotary import Rotary, RotaryOptions
    from spmd_engine.layers.attention.ulysses import Ulysses
    from spmd_engine.layers.chain import Chain
    from spmd_engine.layers.declarations import Activation, Buffer, Parameter, SideOutput
    from spmd_engine.layers.embedding import Embedding, Head, Positions
    from spmd_engine.layers.gated_mlp import GatedMLP
    from spmd_engine.layers.images.convolution import Conv2d
    from spmd_engine.layers.images.pooling import AveragePool, GlobalPool, MaxPool
    from spmd_engine.layers.images.reshard import Gather, Reshard
    from spmd_engine.layers.images.residual_block import ResidualBlock, Skip
    from spmd_engine.layers.images.windows import Window
    from spmd_engine.layers.layer import Extra, ForwardContext, GradientSums, Layer
    from spmd_engine.layers.linear import Linear, ReLU
    from spmd_engine.layers.mlp import MLP
    from spmd_engine.layers.moe.capacity import capacity_of, keep
    from spmd_engine.layers.moe.moe import MoE
    from spmd_engine.layers.moe.router_options import RouterOptions
    from spmd_engine.layers.moe.routing import Tokens, choose
    from spmd_engine.layers.norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
    from spmd_engine.layers.residual import Branch, Parallel, Residual

__all__ = [
    "Activation",
    "Attention",
    "AveragePool",
    "BatchNorm",
    "Branch",
    "Buffer",
    "Cache",
    "Chain",
    "ContextMethod",
    "Conv2d",
    "Embedding",
    "Extra",
    "ForwardContext",
    "GatedMLP",
    "Gather",
    "GatherKeys",
    "GlobalPool",
    "GradientSums",
    "GroupNorm",
    "Head",
    "Layer",
    "LayerNorm",
    "Linear",
    "MLP",
    "MaxPool",
    "MoE",
    "Parallel",
    "Parameter",
    "Positions",
    "RMSNorm",
    "ReLU",
    "Reshard",
    "Residual",
    "ResidualBlock",
    "RingAttention",
    "Rotary",
    "RotaryOptions",
    "RouterOptions",
    "SideOutput",
    "Skip",
    "Tokens",
    "Ulysses",
    "Window",
    "capacity_of",
    "choose",
    "context_method",
    "keep",
]

_PUBLIC = {
    "attention.attention": ("Attention",),
    "attention.context": (
        "ContextMethod",
        "GatherKeys",
    ),
    "attention.kv_cache": ("Cache",),
    "attention.methods": ("context_method",),
    "attention.ring_attention": ("RingAttention",),
    "attention.rotary": (
        "Rotary",
        "RotaryOptions",
    ),
    "attention.ulysses": ("Ulysses",),
    "chain": ("Chain",),
    "declarations": (
        "Activation",
        "Buffer",
        "Parameter",
        "SideOutput",
    ),
    "embedding": (
        "Embedding",
        "Head",
        "Positions",
    ),
    "gated_mlp": ("GatedMLP",),
    "images.convolution": ("Conv2d",),
    "images.pooling": (
        "AveragePool",
        "GlobalPool",
        "MaxPool",
    ),
    "images.reshard": (
        "Gather",
        "Reshard",
    ),
    "images.residual_block": (
        "ResidualBlock",
        "Skip",
    ),
    "images.windows": ("Window",),
    "layer": (
        "Extra",
        "ForwardContext",
        "GradientSums",
        "Layer",
    ),
    "linear": (
        "Linear",
        "ReLU",
    ),
    "mlp": ("MLP",),
    "moe.capacity": (
        "capacity_of",
        "keep",
    ),
    "moe.moe": ("MoE",),
    "moe.router_options": ("RouterOptions",),
    "moe.routing": (
        "Tokens",
        "choose",
    ),
    "norm": (
        "BatchNorm",
        "GroupNorm",
        "LayerNorm",
        "RMSNorm",
    ),
    "residual": (
        "Branch",
        "Parallel",
        "Residual",
    ),
}
__getattr__ = imported_when_asked(__name__, _PUBLIC)
