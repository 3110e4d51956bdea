"""Dtypes as texts, from which other ranks restore them, with byte order, fields and offsets."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from spmd_engine.errors import UsageError

LONGEST = 2048  # bytes of a text: some 60 fields

_Plain = str | list | dict  # what JSON can hold


def describe(dtype: np.dtype) -> str:
    """The text from which ``described`` restores ``dtype``; raises UsageError if there is none."""
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise UsageError("arrays of Python objects cannot be sent; give numbers, or bytes made by pickle")
    try:
        plain = _plain(dtype)
        text = plain if isinstance(plain, str) else json.dumps(plain, separators=(",", ":"))
        same = described(text) == dtype
    except (TypeError, ValueError, AttributeError):  # a field's title that is no text, or a dtype of another package
        same = False
    if not same or dtype.itemsize == 0:
        raise UsageError(f"dtype {dtype} cannot be described to other ranks; send arrays of plain numbers")
    if len(text) > LONGEST:
        raise UsageError(
            f"a dtype of {len(dtype.names or ())} fields that takes {len(text):,} letters is too long to describe to "
            f"other ranks, {LONGEST:,} at most; send its fields one by one"
        )
    return text


def described(text: str) -> np.dtype:
    """The dtype that ``describe`` turned into this text."""
    return _dtype(json.loads(text) if text.startswith("{") else text)


def _plain(dtype: np.dtype) -> _Plain:
    """A name; the dtype and shape of a field that is an array, in a list; or what ``numpy.dtype`` takes for fields."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_plain(base), *shape]
    if dtype.names is None:
        return dtype.name if dtype.isbuiltin == 2 else dtype.str  # 2: ml_dtypes, whose str is ambiguous
    by_name: Any = dtype.fields
    fields = [by_name[name] for name in dtype.names]  # (dtype, offset), and perhaps a title
    plain = {
        "names": dtype.names,
        "formats": [_plain(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }
    if any(len(field) > 2 for field in fields):
        plain["titles"] = [field[2] if len(field) > 2 else None for field in fields]
    return plain


def _dtype(plain: Any) -> np.dtype:
    if isinstance(plain, list):
        return np.dtype((_dtype(plain[0]), tuple(plain[1:])))
    if isinstance(plain, dict):
        fields: Any = {**plain, "formats": [_dtype(format_) for format_ in plain["formats"]]}
        return np.dtype(fields)
    try:
        return np.dtype(plain)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, plain))
