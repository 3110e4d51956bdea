"""Checkpoints: whole arrays by name in safetensors files, readable at any mesh, slice by slice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.agreement import on_rank_zero
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.errors import UsageError

PARAMETERS, OPTIMIZER = "parameters.safetensors", "optimizer.safetensors"
#: What the files call dtypes.
DTYPES = {
    "BOOL": np.bool_,
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "C64": np.complex64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


class Checkpoint(Mapping):
    """A safetensors file as a mapping of names to arrays that are read only where they are sliced.

    ``path`` may also be a folder that ``save_checkpoint`` wrote: its parameters. Raises UsageError if there is none.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        try:
            if self.path.is_dir():
                self.path /= PARAMETERS
            if not self.path.is_file():
                raise UsageError(f"{self.path}: no such checkpoint")
            self._file = safe_open(self.path, framework="numpy")
            self.metadata: dict[str, Any] = json.loads((self._file.metadata() or {}).get("facts", "{}"))
        except (SafetensorError, OSError, ValueError) as error:
            raise UsageError(f"{self.path} is damaged or cannot be read: {error}") from error

    def __getitem__(self, name: str) -> Sliceable:
        if name not in self:
            raise KeyError(name)
        return Sliceable(self._file.get_slice(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._file.keys()  # noqa: SIM118 (not a mapping)


class Sliceable:
    """An array on disk: a shape, a dtype, and parts of it, as NumPy's basic slicing gives them but always copies."""

    slices_are_copies = True

    def __init__(self, piece: Any) -> None:
        self._piece = piece
        self.shape: tuple[int, ...] = tuple(piece.get_shape())
        self.dtype = np.dtype(DTYPES[piece.get_dtype()])

    def __getitem__(self, index: Any) -> np.ndarray:
        """``self[...]``, ``self[2:5]``, ``self[-1, :, ::2]``, ...; only what lies between the ends is read.

        Raises IndexError as NumPy does, and for what is no basic slicing (lists, masks, None).
        """
        spans, wanted = [], []  # what is read, and what of that is asked for
        for part, length in zip(self._of_every_dim(index), self.shape, strict=True):
            if isinstance(part, slice):
                places = range(length)[part]
                first, last = sorted((places[0], places[-1])) if places else (0, -1)
                spans.append(slice(first, last + 1))
                wanted.append(slice(None, None, places.step))
            else:
                place = range(length)[part]  # raises IndexError
                spans.append(slice(place, place + 1))
                wanted.append(0)
        return self._read(tuple(spans))[tuple(wanted)]

    def _of_every_dim(self, index: Any) -> list[slice | int]:
        """An index with ``...``, and whatever dims it leaves out, written out."""
        parts = list(index) if isinstance(index, tuple) else [index]
        for part in parts:
            if part is not ... and not isinstance(part, (slice, int, np.integer)) or isinstance(part, bool):
                raise IndexError(f"an array on disk takes slices, whole numbers and ..., not {part!r}")
        if parts.count(...) > 1 or len(parts) - parts.count(...) > len(self.shape):
            raise IndexError(f"[{', '.join(map(str, parts))}] of an array of shape {self.shape}: too many indices")
        at = parts.index(...) if ... in parts else len(parts)
        missing = len(self.shape) - (len(parts) - parts.count(...))
        return [*parts[:at], *[slice(None)] * missing, *parts[at + 1 :]]

    def _read(self, spans: tuple[slice, ...]) -> np.ndarray:
        shape = [span.stop - span.start for span in spans]
        if 0 in shape:  # the library refuses empty slices, which ranks without a head or a word have
            return np.empty(shape, self.dtype)
        return self._piece[spans]


def save_checkpoint(
    folder: str | os.PathLike, engine: ShardedEngine, optimizer: Optimizer | None = None, **facts: Any
) -> None:
    """Gather every array and write it from rank 0, whole, under ``folder``. Collective.

    ``facts`` (JSON) are kept with the parameters. Each file appears under its name only once it is complete.
    """
    arrays = ((name, engine.gather(name, root=0)) for name in sorted(engine.names))
    buffers = ((name, engine.gather_buffer(name, root=0)) for name in sorted(engine.buffer_names))
    _save(Path(folder) / PARAMETERS, engine, chain(arrays, buffers), facts)
    if optimizer is not None:
        optimizer.prepare(engine)
        states = (
            (f"{kind}/{name}", engine.gather_owned(name, state, root=0))
            for kind, state in optimizer.state.items()
            for name in sorted(engine.names)
        )
        _save(Path(folder) / OPTIMIZER, engine, states, facts)


def _save(path: Path, engine: ShardedEngine, arrays: Iterable[tuple[str, Array | None]], facts: dict) -> None:
    """Write arrays that are gathered one after the other; only rank 0 gets, and holds, them whole."""
    whole = {}
    for name, array in arrays:
        if array is not None:
            whole[name] = np.asarray(backend_of(array).to_host(array), order="C")
    on_rank_zero(engine.group(), lambda: _write(path, whole, facts))


def _write(path: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    try:
        save_file(dict(arrays), unfinished, metadata={"facts": json.dumps(facts)})
    except SafetensorError as error:  # the library's own, for a full disk too
        raise OSError(f"{unfinished}: {error}") from error
    unfinished.chmod(0o666 & ~_umask())  # the library leaves files that only their owner may read
    os.replace(unfinished, path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def load_checkpoint(
    folder: str | os.PathLike, engine: ShardedEngine, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Load each rank's blocks into engine and optimizer; returns the ``facts`` that were saved."""
    parameters = Checkpoint(Path(folder) / PARAMETERS)
    engine.load_checkpoint(parameters)
    engine.after_update()
    if optimizer is not None:
        state = Checkpoint(Path(folder) / OPTIMIZER)
        if state.metadata != parameters.metadata:
            raise UsageError(
                f"{folder}: {PARAMETERS} is of {parameters.metadata} and {OPTIMIZER} of {state.metadata}; "
                "the run broke off between writing the two. Take both from a copy, or start again"
            )
        optimizer.prepare(engine)
        for kind, arrays in optimizer.state.items():
            for name, array in engine.named(arrays).items():
                if f"{kind}/{name}" not in state:
                    raise UsageError(f"{state.path} has no {kind}/{name}: it was saved with another optimizer")
                if engine.owned_index(name) is not None:  # of a number, others may be the owners
                    array[...] = engine.block(name, state[f"{kind}/{name}"], owned=True)
    return parameters.metadata
