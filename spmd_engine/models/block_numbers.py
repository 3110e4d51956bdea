"""Blocks of a model, named by their numbers in a text that JSON and a command line can hold."""

from __future__ import annotations

from collections.abc import Iterable

from spmd_engine.errors import UsageError


def block_numbers(text: str, what: str) -> tuple[int, ...]:
    """The numbers in "0,5"; raises UsageError, which says ``what`` it is, for anything else."""
    numbers = [number.strip() for number in text.split(",")] if text.strip() else []
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"{what} is {text!r}: it is numbers of blocks, as in 0,5")
    return tuple(map(int, numbers))


def as_text(numbers: Iterable[int]) -> str:
    """The inverse, in ascending order."""
    return ",".join(map(str, sorted(numbers)))
