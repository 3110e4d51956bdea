"""Arrays x and y of an .npz file as training data, for models and engines of the user's own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd_engine.arrays.precision import dtype_of
from spmd_engine.comm import Group
from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero, on_rank_zero, share_array
from spmd_engine.errors import UsageError
from spmd_engine.formats.array_files import npz_names, read_npz
from spmd_engine.training.data.array_data import ArrayData

HELD_OUT = 0.1  #: the fraction of the samples for validation, if the file does not name them
_PAIRS = (("x", "y"), ("x_validation", "y_validation"))


@dataclass(frozen=True)
class LabelledArrays:
    """Samples x[n ...] and their targets y[n ...], the same on every rank."""

    x: np.ndarray
    y: np.ndarray
    held_out: float | np.ndarray  #: the numbers of the samples for validation, or their fraction
    sha256: str  #: digest of dtypes, shapes and contents
    files: int = 1

    def __str__(self) -> str:
        return f"{len(self.x):,} samples, x {list(self.x.shape[1:])}, y {list(self.y.shape[1:])}"


def load_arrays(group: Group, path: str) -> LabelledArrays:
    """The arrays ``x`` and ``y`` of an .npz file and, if it has them, ``x_validation`` and ``y_validation``.

    Rank 0 reads and checks them, and shares one copy a node. Collective. Raises UsageError on every rank for arrays
    that are missing, damaged, of different lengths, or not finite.
    """
    arrays: dict[str, np.ndarray] | None = on_rank_zero(group, lambda: read_arrays(path))
    lengths, sha256 = json_from_rank_zero(group, lambda: _facts(arrays or {}))
    x, y = (
        share_array(group, [arrays[name] for name in pair if name in arrays] if arrays else None, label="arrays")
        for pair in zip(*_PAIRS, strict=True)
    )
    held_out = HELD_OUT if len(lengths) == 1 else np.arange(lengths[0], sum(lengths))
    return LabelledArrays(x, y, held_out, sha256)


class FileData(ArrayData):
    """The samples of a file, floats as ``dtype``; with ``all_floats``, whole numbers among the inputs, too."""

    def __init__(self, arrays: LabelledArrays, dtype: Any, all_floats: bool, seed: int = 0) -> None:
        super().__init__(arrays.x, arrays.y, validation=arrays.held_out, seed=seed)
        self.dtype, self.all_floats = dtype_of(dtype), all_floats

    def examples(self, numbers: np.ndarray, held_out: bool = False) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().examples(numbers, held_out)
        x = x.astype(self.dtype) if self.all_floats or x.dtype.kind == "f" else x
        return x, y.astype(self.dtype) if y.dtype.kind == "f" else y


def _facts(arrays: Mapping[str, np.ndarray]) -> tuple[list[int], str]:
    """Samples to learn from and, if there are any, for validation; the digest of all."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
        digest.update(array.tobytes())
    return [len(arrays[name]) for name, _ in _PAIRS if name in arrays], digest.hexdigest()


def read_arrays(path: str) -> dict[str, np.ndarray]:
    """The arrays of ``load_arrays``, on this process alone."""
    names = npz_names(path)
    if missing := [name for name in _PAIRS[0] if name not in names]:
        raise UsageError(f"--data {path}: it has no array {missing[0]}; save samples as x and targets as y")
    arrays: dict[str, Any] = {}
    for pair in _PAIRS:
        if not set(pair) <= set(names):
            continue
        for name in pair:
            stored = read_npz(path, name)
            array = np.ascontiguousarray(stored if isinstance(stored, np.ndarray) else stored.open())
            if array.dtype.kind not in "biuf" or not array.ndim:
                raise UsageError(
                    f"--data {path}: {name} is {array.dtype}{list(array.shape)}; save numbers, samples first"
                )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                sample = int(np.argwhere(~np.isfinite(array))[0][0])
                raise UsageError(f"--data {path}: {name}[{sample}] has numbers that are not finite; remove that sample")
            arrays[name] = array
        if len(arrays[pair[0]]) != len(arrays[pair[1]]):
            sizes = " and ".join(f"{name} has {len(arrays[name])} samples" for name in pair)
            raise UsageError(f"--data {path}: {sizes}; save one target for each")
    return arrays
