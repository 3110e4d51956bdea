"""Strategies by name, and the mesh that each wants of so many ranks."""

from __future__ import annotations

from spmd_engine.errors import UsageError
from spmd_engine.strategies.attention_heads import AttentionHeads
from spmd_engine.strategies.channel_split import ChannelSplit
from spmd_engine.strategies.column_parallel import ColumnParallel
from spmd_engine.strategies.data_parallel import DataParallel
from spmd_engine.strategies.fully_sharded import FullySharded
from spmd_engine.strategies.hybrid import Hybrid
from spmd_engine.strategies.hybrid_cnn import HybridCNN
from spmd_engine.strategies.page import Page
from spmd_engine.strategies.pipeline import Pipeline
from spmd_engine.strategies.replicate_shard import ReplicateShard
from spmd_engine.strategies.ring_attention import RingAttention
from spmd_engine.strategies.sequence_parallel import SequenceParallel
from spmd_engine.strategies.sharded_gradients import ShardedGradients
from spmd_engine.strategies.sharded_optimizer import ShardedOptimizer
from spmd_engine.strategies.single_device import SingleDevice
from spmd_engine.strategies.spatial import Spatial
from spmd_engine.strategies.tensor_parallel import TensorParallel
from spmd_engine.strategies.two_dimensional import TwoDimensional
from spmd_engine.strategies.vertical_cnn import VerticalCNN

STRATEGIES: dict[str, type[Page]] = {
    "single-device": SingleDevice,
    "data-parallel": DataParallel,
    "sharded-optimizer": ShardedOptimizer,
    "sharded-gradients": ShardedGradients,
    "fully-sharded": FullySharded,
    "replicate-shard": ReplicateShard,
    "column-parallel": ColumnParallel,
    "tensor-parallel": TensorParallel,
    "attention-heads": AttentionHeads,
    "two-dimensional": TwoDimensional,
    "sequence-parallel": SequenceParallel,
    "ring-attention": RingAttention,
    "pipeline": Pipeline,
    "hybrid": Hybrid,
    "channel-split": ChannelSplit,
    "spatial": Spatial,
    "vertical-cnn": VerticalCNN,
    "hybrid-cnn": HybridCNN,
}


def strategy_named(name: str) -> type[Page]:
    """The strategy of that name; raises UsageError, with the names there are, for another."""
    if name not in STRATEGIES:
        raise UsageError(f"unknown strategy {name!r}; there are {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def default_axes(strategy: type[Page], ranks: int) -> dict[str, int]:
    """Sizes of the strategy's mesh axes, as near to each other as they can be; later axes are not smaller.

    Those that talk most are last, and so stay inside a node. A strategy without axes gets none: each of the ranks
    then computes the same. Raises UsageError for fewer ranks than one.

    >>> default_axes(STRATEGIES["hybrid"], 12)
    {'pipe': 2, 'data': 2, 'model': 3}
    >>> default_axes(STRATEGIES["two-dimensional"], 6)
    {'row': 2, 'col': 3}
    """
    if ranks < 1:
        raise UsageError(f"a mesh of {ranks} ranks; at least one is needed")
    sizes, left = [], ranks
    for remaining in range(len(strategy.axes), 0, -1):
        sizes.append(max(size for size in range(1, left + 1) if left % size == 0 and size**remaining <= left))
        left //= sizes[-1]
    return dict(zip(strategy.axes, sorted(sizes), strict=True))
