"""spmd_engine: neural networks sharded over any number of ranks, in NumPy or CuPy and MPI."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine.comm import Ledger, Mesh, run_threads, world
    from spmd_engine.engine import ShardedEngine, as_distributed
    from spmd_engine.training import ArrayData, Run, TrainConfig, train

__version__ = "0.1.0"
__all__ = [
    "ArrayData",
    "TrainConfig",
    "Ledger",
    "Mesh",
    "Run",
    "ShardedEngine",
    "as_distributed",
    "run_threads",
    "train",
    "world",
]

_PUBLIC = {
    "comm": ("Ledger", "Mesh", "run_threads", "world"),
    "engine": ("ShardedEngine", "as_distributed"),
    "training": ("ArrayData", "TrainConfig", "Run", "train"),
}

#: Floors are imported when something of theirs is first asked for: a command begins, and can be interrupted in good
#: order, before NumPy is loaded.
__getattr__ = imported_when_asked(__name__, _PUBLIC)
