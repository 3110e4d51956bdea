"""What safetensors files call the dtypes of arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from spmd_engine.errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for kind in "IU" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: np.dtype, of: str) -> str:
    """What files call a dtype, in whatever byte order; raises CheckpointError where the format has none for it."""
    little = np.dtype(dtype)
    little = little.newbyteorder("<") if little.byteorder in "<>" else little
    if little not in _NAMES:
        raise CheckpointError(f"{of} is of dtype {dtype}, which safetensors files do not know")
    return _NAMES[little]
