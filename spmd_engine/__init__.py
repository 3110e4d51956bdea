"""spmd_engine: neural networks sharded over any number of ranks, in NumPy or CuPy and MPI."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmd_engine.comm import Ledger, Mesh, run, world
    from spmd_engine.engine import ShardedEngine, as_distributed
    from spmd_engine.training import ArrayData, Job, Run, train

__version__ = "0.1.0"
__all__ = [
    "ArrayData",
    "Job",
    "Ledger",
    "Mesh",
    "Run",
    "ShardedEngine",
    "as_distributed",
    "run",
    "train",
    "world",
]

_PUBLIC = {
    "comm": ("Ledger", "Mesh", "run", "world"),
    "engine": ("ShardedEngine", "as_distributed"),
    "training": ("ArrayData", "Job", "Run", "train"),
}


def __getattr__(name: str) -> Any:
    """Floors are imported when something of theirs is first asked for: a command begins, and can be interrupted in
    good order, before NumPy is loaded."""
    for floor, names in _PUBLIC.items():
        if name == floor or name in names:
            module = import_module(f"spmd_engine.{floor}")
            return module if name == floor else getattr(module, name)
    raise AttributeError(f"module 'spmd_engine' has no attribute {name!r}")
