"""Layers as plain functions of arrays: the same code runs on every mesh."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.layers.attention.attention import Attention
    from spmd_engine.layers.attention.attention_config import AttentionConfig, RotaryOptions
    from spmd_engine.layers.attention.context import ContextMethod, GatherKeys, RingAttention, Ulysses, context_method
    from spmd_engine.layers.attention.kv_cache import Cache
    from spmd_engine.layers.attention.qk_norm_rope import Rotary
    from spmd_engine.layers.containers import Branch, Chain, Parallel, Residual, ResidualBlock, Skip
    from spmd_engine.layers.convolution import Conv2d
    from spmd_engine.layers.declarations import Activation, Buffer, Parameter, SideOutput
    from spmd_engine.layers.embedding import Embedding, Head, Positions
    from spmd_engine.layers.images import AveragePool, Gather, GlobalPool, MaxPool, Reshard, Window
    from spmd_engine.layers.layer import Extra, ForwardContext, GradientSums, Layer
    from spmd_engine.layers.linear import Linear, ReLU
    from spmd_engine.layers.mlp import MLP, GatedMLP
    from spmd_engine.layers.moe.dispatch import capacity_of, keep
    from spmd_engine.layers.moe.moe import MoE
    from spmd_engine.layers.moe.routing import RouterOptions, Tokens, choose
    from spmd_engine.layers.norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm

__all__ = [
    "Activation", "Attention", "AttentionConfig", "AveragePool", "BatchNorm", "Branch", "Buffer", "Cache", "Chain",
    "ContextMethod", "Conv2d", "Embedding", "Extra", "ForwardContext", "GatedMLP", "Gather", "GatherKeys",
    "GlobalPool", "GradientSums", "GroupNorm", "Head", "Layer", "LayerNorm", "Linear", "MLP", "MaxPool", "MoE",
    "Parallel", "Parameter", "Positions", "RMSNorm", "ReLU", "Reshard", "Residual", "ResidualBlock",
    "RingAttention", "Rotary", "RotaryOptions", "RouterOptions", "SideOutput", "Skip", "Tokens", "Ulysses",
    "Window", "capacity_of", "choose", "context_method", "keep",
]  # fmt: skip

__getattr__ = imported_when_asked(__name__)
