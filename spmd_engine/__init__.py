"""spmd_engine: neural networks sharded over any number of ranks, in NumPy or CuPy and MPI."""

__version__ = "0.1.0"

from spmd_engine.comm import Ledger, Mesh, run, world
from spmd_engine.engine import ShardedEngine, as_distributed

__all__ = ["Ledger", "Mesh", "ShardedEngine", "as_distributed", "run", "world"]
