"""Blocks of a model, named by their numbers in a text that JSON and a command line can hold."""

from __future__ import annotations

from collections.abc import Iterable

from spmd_engine.errors import UsageError


def block_numbers(text: str, what: str, blocks: int | None = None) -> tuple[int, ...]:
    """The numbers in "0,5"; raises UsageError, which says ``what`` it is, for anything else, and for numbers that a
    model of so many ``blocks`` has not."""
    numbers = [number.strip() for number in text.split(",")] if text.strip() else []
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"{what} is {text!r}: it is numbers of blocks, as in 0,5")
    found = tuple(map(int, numbers))
    if blocks is not None and max(found, default=0) >= blocks:
        raise UsageError(f"{what} {text}: blocks are from 0 to {blocks - 1}")
    return found


def as_text(numbers: Iterable[int]) -> str:
    """The inverse, in ascending order."""
    return ",".join(map(str, sorted(numbers)))
