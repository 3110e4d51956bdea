"""Checkpoints: whole arrays by name in safetensors files, readable at any mesh, slice by slice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.agreement import on_rank_zero
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.errors import UsageError

PARAMETERS, OPTIMIZER = "parameters.safetensors", "optimizer.safetensors"


class Checkpoint(Mapping):
    """A safetensors file as a mapping of names to arrays that are read only where they are sliced."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise UsageError(f"{self.path}: no such checkpoint")
        self._file = safe_open(self.path, framework="numpy")
        self.metadata: dict[str, Any] = json.loads((self._file.metadata() or {}).get("facts", "{}"))

    def __getitem__(self, name: str) -> Sliceable:
        try:
            return Sliceable(self._file.get_slice(name))
        except Exception as error:
            raise KeyError(name) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._file.keys()  # noqa: SIM118 (not a mapping)


class Sliceable:
    """An array on disk: a shape, and blocks of it when sliced."""

    def __init__(self, piece: Any) -> None:
        self._piece = piece
        self.shape = tuple(piece.get_shape())

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._piece[index]


def save_checkpoint(
    folder: str | os.PathLike, engine: ShardedEngine, optimizer: Optimizer | None = None, **facts: Any
) -> None:
    """Gather every array and write it from rank 0, whole, under ``folder``. Collective.

    ``facts`` (JSON) are kept with the parameters. Each file appears under its name only once it is complete.
    """
    _save(Path(folder) / PARAMETERS, engine, {"": engine.parameters}, facts)
    if optimizer is not None:
        optimizer.prepare(engine)
        kinds = {f"{kind}/": engine.named(arrays) for kind, arrays in optimizer.state.items()}
        _save(Path(folder) / OPTIMIZER, engine, kinds, facts)


def _save(path: Path, engine: ShardedEngine, kinds: Mapping[str, Mapping[str, Array]], facts: dict) -> None:
    """Write arrays that are cut as the parameters of their names are; only rank 0 holds them whole."""
    whole = {}
    for prefix, arrays in kinds.items():
        for name, array in arrays.items():
            gathered = engine.sharding(name).gather(array, engine.mesh, label="checkpoint")
            if engine.device_id == 0:
                whole[prefix + name] = gathered
    on_rank_zero(engine.group(), lambda: _write(path, whole, facts))


def _write(path: Path, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
    host = {name: np.ascontiguousarray(backend_of(array).to_host(array)) for name, array in arrays.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    save_file(host, unfinished, metadata={"facts": json.dumps(facts)})
    os.replace(unfinished, path)


def load_checkpoint(
    folder: str | os.PathLike, engine: ShardedEngine, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Load each rank's blocks into engine and optimizer; returns the ``facts`` that were saved."""
    parameters = Checkpoint(Path(folder) / PARAMETERS)
    engine.load_checkpoint(parameters)
    engine.after_update()
    if optimizer is not None:
        state = Checkpoint(Path(folder) / OPTIMIZER)
        optimizer.prepare(engine)
        for kind, arrays in optimizer.state.items():
            for name, array in engine.named(arrays).items():
                array[...] = engine.block(name, state[f"{kind}/{name}"])
    return parameters.metadata
