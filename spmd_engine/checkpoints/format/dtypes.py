"""What safetensors files call the dtypes of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from spmd_engine.arrays.dtypes import described
from spmd_engine.errors import CheckpointError

_NAMES = {  # in files, by their names in NumPy and in ml_dtypes
    "bool": "BOOL",
    **{f"{kind}{8 * size}": f"{kind[0].upper()}{8 * size}" for kind in ("int", "uint") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": f"F{8 * size}" for size in (2, 4, 8)},
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class _Dtypes(Mapping[str, np.dtype]):
    """By their names in files. Those of ml_dtypes are made when they are asked for: few files have any."""

    _described = {name: text for text, name in _NAMES.items()}

    def __init__(self) -> None:
        self._made: dict[str, np.dtype] = {}

    def __getitem__(self, name: str) -> np.dtype:
        if name not in self._made:
            self._made[name] = described(self._described[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def __contains__(self, name: object) -> bool:
        return name in self._described


DTYPES: Mapping[str, np.dtype] = _Dtypes()


def dtype_name(dtype: np.dtype, of: str) -> str:
    """What files call a dtype, in whatever byte order; raises CheckpointError where the format has none for it."""
    dtype = np.dtype(dtype)
    if dtype.fields is not None or dtype.name not in _NAMES:
        raise CheckpointError(f"{of} is of dtype {dtype}, which safetensors files do not know")
    return _NAMES[dtype.name]
