"""Bytes, seconds and lists of numbers as texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta

from spmd_engine.errors import UsageError

BYTES, SECONDS = "bytes", "seconds"
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SECONDS = {"S": 1.0, "MS": 1e-3, "US": 1e-6, "NS": 1e-9, "MIN": 60.0, "H": 3600.0}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def bytes_of(text: str, where: str = "memory", least: int = 1) -> int:
    """Bytes of ``"2GiB"``, ``"1.5 GB"`` or ``"1000000"``; raises UsageError for other texts and below ``least``.

    >>> bytes_of("2GiB"), bytes_of("1.5kb")
    (2147483648, 1500)
    """
    size = _quantity(text, where, _BYTES, "bytes; write it as in 2GiB or 500MB")
    if size > 1 << 62:
        raise UsageError(f"{where} is {text}: that is more bytes than any memory has")
    if round(size) < least:
        raise UsageError(f"{where} is {text}: it must be {f'from {least}' if least != 1 else 'above 0'}")
    return round(size)


def seconds_of(text: str, where: str = "time") -> float:
    """Seconds of ``"30s"``, ``"100 ms"``, ``"2min"`` or ``"1.5"``; raises UsageError for other texts.

    >>> seconds_of("100ms"), seconds_of("2min"), seconds_of("1.5")
    (0.1, 120.0, 1.5)
    """
    return _quantity(text, where, _SECONDS, "seconds; write it as in 30s or 100ms")


def _quantity(text: str, where: str, units: Mapping[str, float], wanted: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if not match or match[2] and match[2].upper() not in units:
        raise UsageError(f"{where}: cannot read {text!r} as {wanted}")
    return float(match[1]) * units.get(match[2].upper(), 1)


def numbers_of(text: str, where: str, wanted: str, least: int = 0) -> tuple[int, ...]:
    """The whole numbers of ``"16,8"``; raises UsageError, which says what is ``wanted``, for other texts and below
    ``least``.

    >>> numbers_of("16,8", "--shape", "whole numbers, as in 16,8")
    (16, 8)
    """
    if not all(number.strip().isdecimal() for number in text.split(",")):
        raise UsageError(f"{where} {text}: write {wanted}")
    numbers = tuple(map(int, text.split(",")))
    if min(numbers) < least:
        raise UsageError(f"{where} {text}: sizes must be from {least}")
    return numbers


def exact_bytes(count: int) -> str:
    """Bytes as a whole number of the largest possible binary unit; the inverse of ``bytes_of``.

    >>> exact_bytes(32 << 20), exact_bytes(1500)
    ('32MiB', '1500')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def readable_bytes(count: float) -> str:
    """Bytes in the largest binary unit that is not larger than them.

    >>> readable_bytes(3 << 29)
    '1.50 GiB'
    """
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def readable_rate(rate: float) -> str:
    """Bytes a second in the largest decimal unit that is not larger, as links are described.

    >>> readable_rate(1.2e9)
    '1.2 GB/s'
    """
    return _in_largest(rate, {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3, "B/s": 1.0})


def readable_seconds(seconds: float) -> str:
    """Seconds with three digits, in the largest unit that gives at least 1.

    >>> readable_seconds(0.01234)
    '12.3 ms'
    """
    return _in_largest(seconds, {"h": 3600.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})


def _in_largest(number: float, units: Mapping[str, float]) -> str:
    """A number with three digits, in the first unit that is not larger, or in the last one."""
    unit = next((unit for unit, size in units.items() if number >= size), [*units][-1])
    return f"{number / units[unit]:.3g} {unit}"


def readable_loss(loss: float) -> str:
    """A loss with four decimals; of five digits or more, with four of them.

    >>> readable_loss(2.06413), readable_loss(3.2e200)
    ('2.0641', '3.2e+200')
    """
    return f"{loss:.4f}" if abs(loss) < 1e4 else f"{loss:.4g}"


def clock_time(seconds: float) -> str:
    """Seconds as hours, minutes and seconds: ``0:01:12``."""
    return str(timedelta(seconds=round(seconds)))
