"""Values that ranks send each other in a verification, as bytes: JSON for their structure, then the arrays.

Reading a message runs no code that it names: it makes only records of this package, which are dataclasses, named tuples
and enumerations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any

import numpy as np

from spmd_engine.arrays.dtypes import describe, described

_LENGTH = 8  # bytes of the length of the JSON


def packed(value: Any) -> np.ndarray:
    """The bytes of a value that consists of plain values, arrays, collections, and records of this package."""
    arrays: list[np.ndarray] = []
    head = json.dumps(_as_json(value, arrays)).encode()
    parts = [len(head).to_bytes(_LENGTH, "little"), head, *(np.ascontiguousarray(x).tobytes() for x in arrays)]
    return np.frombuffer(b"".join(parts), np.uint8)


def unpacked(message: np.ndarray) -> Any:
    """The value that ``packed`` turned into these bytes. Raises ValueError for other bytes."""
    data = message.tobytes()
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    rest = memoryview(data)[end:]

    def array(dtype: str, shape: list[int]) -> np.ndarray:
        nonlocal rest
        x = np.empty(shape, described(dtype))
        x.reshape(-1).view(np.uint8)[...] = np.frombuffer(rest[: x.nbytes], np.uint8)
        rest = rest[x.nbytes :]
        return x

    def value(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        kind, *parts = content
        if kind == "array":
            return array(*parts)
        if kind == "number":
            return array(*parts)[()]
        if kind == "dtype":
            return described(*parts)
        values = [value(part) for part in parts]
        if kind == "dict":
            return dict(zip(values[::2], values[1::2], strict=True))
        return _COLLECTIONS[kind](values) if kind in _COLLECTIONS else _record(kind)(*values)

    return value(json.loads(data[_LENGTH:end]))


_COLLECTIONS = {"list": list, "tuple": tuple, "set": set}


def _as_json(value: Any, arrays: list[np.ndarray]) -> Any:
    """The structure of a value: a list of its kind and its parts, or a plain value. Its arrays are appended."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        arrays.append(np.asarray(value))
        return ["array" if isinstance(value, np.ndarray) else "number", describe(value.dtype), list(value.shape)]
    if isinstance(value, np.dtype):
        return ["dtype", describe(value)]
    if isinstance(value, Mapping):
        parts = [part for item in value.items() for part in item]
        return ["dict", *(_as_json(part, arrays) for part in parts)]
    if kind.__name__ in _COLLECTIONS:
        return [kind.__name__, *(_as_json(part, arrays) for part in value)]
    if isinstance(value, Enum):
        parts = [value.value]
    else:
        parts = [getattr(value, entry.name) for entry in fields(value)] if is_dataclass(value) else list(value)
    return [f"{kind.__module__}:{kind.__name__}", *(_as_json(part, arrays) for part in parts)]


def _record(kind: str) -> Any:
    """The class of a record. Raises ValueError for a class that is none of this package's records."""
    module, _, name = kind.partition(":")
    record = getattr(import_module(module), name, None) if module.startswith(f"{__package__}.") else None
    if isinstance(record, type) and (is_dataclass(record) or issubclass(record, (Enum, tuple))):
        return record
    raise ValueError(f"a message has a value of {kind}, which is no record of a verification")
