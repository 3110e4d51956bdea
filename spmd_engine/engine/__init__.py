"""Engines: the abstract ShardedEngine, the layered engine with its storage and schedules, and optimizers."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.engine.base import ShardedEngine, making_on
    from spmd_engine.engine.batch import Batch, MicroBatch, batch_of, make_batch
    from spmd_engine.engine.build import build_engine
    from spmd_engine.engine.distributed import as_distributed
    from spmd_engine.engine.layered import LayeredEngine
    from spmd_engine.engine.model_config import ModelConfig
    from spmd_engine.engine.optimizers import SGD, AdamW
    from spmd_engine.engine.parallel_config import ParallelConfig
    from spmd_engine.engine.pipeline import Recompute
    from spmd_engine.engine.state.assignment import ZeroConfig

__all__ = [
    "AdamW",
    "Batch",
    "LayeredEngine",
    "MicroBatch",
    "ModelConfig",
    "ParallelConfig",
    "Recompute",
    "SGD",
    "ShardedEngine",
    "ZeroConfig",
    "as_distributed",
    "batch_of",
    "build_engine",
    "make_batch",
    "making_on",
]

__getattr__ = imported_when_asked(__name__)
