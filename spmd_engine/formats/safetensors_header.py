"""The header of safetensors files: names of dtypes, and the places of tensors. Every run that saves imports it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

#: The names of dtypes in the format, and in NumPy or ml_dtypes. F8_E8M0 is never read: only its size counts.
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "uint8",
}  # fmt: skip


def dtype_named(name: str) -> np.dtype:
    """The dtype of a name in NumPy or in ml_dtypes, which is imported only for its own names, as that is slow."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def dtype_of(name: str) -> np.dtype:
    """The dtype with this name in the format."""
    return dtype_named(DTYPES[name])


def header(tensors: Sequence[tuple[str, str, Sequence[int]]], facts: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """The header of a file with these names, dtypes and shapes, in the order of the file.

    Also returns the first byte of each tensor in the file, and the file's size.
    """
    content: dict[str, object] = {"__metadata__": dict(facts)}
    ends = [0]
    for name, dtype, shape in tensors:
        ends.append(ends[-1] + prod(shape) * dtype_of(dtype).itemsize)
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends[-2:]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    head = len(text).to_bytes(8, "little") + text
    return head, [len(head) + end for end in ends]
