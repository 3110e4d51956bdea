"""Engines: the abstract ShardedEngine, the layered engine, schedules and optimizers."""

from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, MicroBatch
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.optimizers import SGD, AdamW

__all__ = ["AdamW", "Batch", "LayeredEngine", "MicroBatch", "SGD", "ShardedEngine"]
