"""Bytes and seconds as people write and read them."""

from __future__ import annotations

import re

from spmd_engine.errors import UsageError

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def bytes_of(text: str, where: str = "memory") -> int:
    """Bytes of ``"2GiB"``, ``"1.5 GB"`` or ``"1000000"``; raises UsageError for anything else, and for none.

    >>> bytes_of("2GiB"), bytes_of("1.5kb")
    (2147483648, 1500)
    """
    found = _SIZE.fullmatch(text)
    if not found or (found[2].upper() or "B") not in _UNITS:
        raise UsageError(f"{where}: cannot read {text!r} as bytes; write it as in 2GiB or 500MB")
    size = round(float(found[1]) * _UNITS[found[2].upper() or "B"])
    if size < 1:
        raise UsageError(f"{where} is {text}: it must be above 0")
    return size


def readable_bytes(count: float) -> str:
    """Bytes in the largest binary unit of which there is one at least.

    >>> readable_bytes(3 << 29)
    '1.50 GiB'
    """
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def readable_seconds(seconds: float) -> str:
    """Seconds with three digits in the unit that suits them.

    >>> readable_seconds(0.01234)
    '12.3 ms'
    """
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
