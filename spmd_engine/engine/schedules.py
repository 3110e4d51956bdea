"""Schedules as data: what a rank does with its micro-batches, in order. An engine executes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """One thing to do with micro-batch ``m``."""

    m: int


class Forward(Instruction):
    """Run this rank's layers forward, and the loss if they are the last."""


class Backward(Instruction):
    """Run them backward, layer by layer: the input's gradient first, since somebody may be waiting for it."""


def sequential(micro_batches: int) -> Iterator[Instruction]:
    """One micro-batch after the other: one is under way at a time."""
    for m in range(micro_batches):
        yield Forward(m)
        yield Backward(m)
