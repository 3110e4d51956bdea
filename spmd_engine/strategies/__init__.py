"""Sharding strategies, one page each: hand-written einsums with explicit collectives.

Read ``single_device`` first, then any other page: it shards the same model, unless it names another.
"""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.strategies.attention_heads import AttentionHeads
    from spmd_engine.strategies.channel_split import ChannelSplit
    from spmd_engine.strategies.column_parallel import ColumnParallel
    from spmd_engine.strategies.data_parallel import DataParallel
    from spmd_engine.strategies.expert_parallel import ExpertParallel
    from spmd_engine.strategies.fully_sharded import FullySharded
    from spmd_engine.strategies.hybrid import Hybrid
    from spmd_engine.strategies.hybrid_cnn import HybridCNN
    from spmd_engine.strategies.names import STRATEGIES, default_axes, strategy_named
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

__all__ = [
    "STRATEGIES",
    "AttentionHeads",
    "ChannelSplit",
    "ColumnParallel",
    "DataParallel",
    "ExpertParallel",
    "FullySharded",
    "Hybrid",
    "HybridCNN",
    "Pipeline",
    "ReplicateShard",
    "RingAttention",
    "SequenceParallel",
    "ShardedGradients",
    "ShardedOptimizer",
    "SingleDevice",
    "Spatial",
    "TensorParallel",
    "TwoDimensional",
    "VerticalCNN",
    "default_axes",
    "strategy_named",
]

__getattr__ = imported_when_asked(__name__)
