"""Layers as plain functions of arrays: one forward and backward pair a file, one text for every mesh."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.layers.attention import Attention
    from spmd_engine.layers.batch_norm import BatchNorm
    from spmd_engine.layers.branch import Branch
    from spmd_engine.layers.chain import Chain
    from spmd_engine.layers.context import ContextMethod
    from spmd_engine.layers.convolution import Conv2d
    from spmd_engine.layers.declarations import Activation, Buffer, Parameter, SideOutput
    from spmd_engine.layers.embedding import Embedding, Positions
    from spmd_engine.layers.gated_mlp import GatedMLP
    from spmd_engine.layers.gather_keys import GatherKeys
    from spmd_engine.layers.gradients import GradientSums
    from spmd_engine.layers.group_norm import GroupNorm
    from spmd_engine.layers.head import Head
    from spmd_engine.layers.image_windows import Window
    from spmd_engine.layers.layer import Extra, ForwardContext, Layer
    from spmd_engine.layers.linear import Linear
    from spmd_engine.layers.loss import cross_entropy, mean_squared_error
    from spmd_engine.layers.metrics import right_classes
    from spmd_engine.layers.mlp import MLP
    from spmd_engine.layers.moe import MoE
    from spmd_engine.layers.names import context_method
    from spmd_engine.layers.norm import LayerNorm, RMSNorm
    from spmd_engine.layers.pooling import AveragePool, GlobalPool, MaxPool
    from spmd_engine.layers.recut import Gather, Recut
    from spmd_engine.layers.relu import ReLU
    from spmd_engine.layers.residual import Parallel, Residual
    from spmd_engine.layers.residual_block import ResidualBlock
    from spmd_engine.layers.ring_attention import RingAttention
    from spmd_engine.layers.rotary import Rotary, RotaryOptions
    from spmd_engine.layers.router_options import RouterOptions
    from spmd_engine.layers.skip import Skip
    from spmd_engine.layers.ulysses import Ulysses

__all__ = [
    "MLP",
    "Activation",
    "Attention",
    "AveragePool",
    "BatchNorm",
    "Branch",
    "Buffer",
    "Chain",
    "ContextMethod",
    "Conv2d",
    "Embedding",
    "Extra",
    "ForwardContext",
    "GatedMLP",
    "GatherKeys",
    "Gather",
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
    "Recut",
    "Residual",
    "ResidualBlock",
    "RingAttention",
    "Rotary",
    "RotaryOptions",
    "RouterOptions",
    "SideOutput",
    "Skip",
    "Ulysses",
    "Window",
    "context_method",
    "cross_entropy",
    "mean_squared_error",
    "right_classes",
]

_PUBLIC = {
    "attention": ("Attention",),
    "batch_norm": ("BatchNorm",),
    "branch": ("Branch",),
    "chain": ("Chain",),
    "context": ("ContextMethod",),
    "convolution": ("Conv2d",),
    "declarations": ("Activation", "Buffer", "Parameter", "SideOutput"),
    "embedding": ("Embedding", "Positions"),
    "gated_mlp": ("GatedMLP",),
    "gather_keys": ("GatherKeys",),
    "gradients": ("GradientSums",),
    "group_norm": ("GroupNorm",),
    "head": ("Head",),
    "image_windows": ("Window",),
    "layer": ("Extra", "ForwardContext", "Layer"),
    "linear": ("Linear",),
    "loss": ("cross_entropy", "mean_squared_error"),
    "metrics": ("right_classes",),
    "mlp": ("MLP",),
    "moe": ("MoE",),
    "names": ("context_method",),
    "norm": ("LayerNorm", "RMSNorm"),
    "pooling": ("AveragePool", "GlobalPool", "MaxPool"),
    "recut": ("Gather", "Recut"),
    "relu": ("ReLU",),
    "residual": ("Parallel", "Residual"),
    "residual_block": ("ResidualBlock",),
    "ring_attention": ("RingAttention",),
    "rotary": ("Rotary", "RotaryOptions"),
    "router_options": ("RouterOptions",),
    "skip": ("Skip",),
    "ulysses": ("Ulysses",),
}
__getattr__ = imported_when_asked(__name__, _PUBLIC)
