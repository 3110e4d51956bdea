"""spmd_engine: neural networks sharded over any number of ranks, in NumPy or CuPy and MPI."""

from typing import TYPE_CHECKING

from spmd_engine.importing import imported_when_asked

if TYPE_CHECKING:
    from spmd_engine import layers, losses, optim
    from spmd_engine.checkpoints import load_checkpoint, load_pretrained, save_checkpoint
    from spmd_engine.comm import Ledger, Mesh, run_threads, world
    from spmd_engine.engine import LayeredEngine, ParallelConfig, ShardedEngine, as_distributed, batch_of
    from spmd_engine.jobs import train
    from spmd_engine.models import Model
    from spmd_engine.planning import plan
    from spmd_engine.serving import generate
    from spmd_engine.training import ArrayData, Run, TrainConfig, Trainer
    from spmd_engine.verification import verify

__version__ = "0.2.0"
__all__ = [
    "ArrayData",
    "LayeredEngine",
    "Ledger",
    "Mesh",
    "Model",
    "ParallelConfig",
    "Run",
    "ShardedEngine",
    "TrainConfig",
    "Trainer",
    "as_distributed",
    "batch_of",
    "generate",
    "layers",
    "load_checkpoint",
    "load_pretrained",
    "losses",
    "optim",
    "plan",
    "run_threads",
    "save_checkpoint",
    "train",
    "verify",
    "world",
]

#: A package is imported when one of its names is first used. So a command starts, and can be interrupted cleanly,
#: before NumPy is loaded.
__getattr__ = imported_when_asked(__name__)
