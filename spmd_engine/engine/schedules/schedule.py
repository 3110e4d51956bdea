"""A schedule: pure data, which stage does what with which micro-batch, and in which order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from spmd_engine.engine.schedules.instructions import Compute, Program
from spmd_engine.engine.schedules.transfers import with_transfers
from spmd_engine.errors import UsageError


@dataclass(frozen=True)
class Schedule(ABC):
    """What each stage of a pipeline computes, in order. An engine, or a timeline, executes its ``program``.

    A schedule of one's own gives ``name`` and ``order``. Each chunk must run its backwards in the order of the
    micro-batches, as all of these do: gradients are then summed in one order, and have the same bits in all.
    """

    name: ClassVar[str]
    chunks: int = 1  #: chunks of layers on each stage

    def __post_init__(self) -> None:
        if self.chunks != 1:
            raise UsageError(f"{self.name}: one chunk of layers a stage, not {self.chunks}; interleaved has several")

    @abstractmethod
    def order(self, stages: int, micro_batches: int, stage: int) -> list[Compute]:
        """What ``stage`` of ``stages`` computes, in order."""

    def program(self, stages: int, micro_batches: int, stage: int) -> Program:
        """``order``, and the transfers between stages. Raises UsageError if there is no such stage."""
        if not 0 <= stage < stages or micro_batches < 1:
            raise UsageError(f"{self.name}: no stage {stage} of {stages} with {micro_batches} micro-batches")
        order = self.order(stages, micro_batches, stage)
        if stages == 1:
            return list(order)
        unfinished = self.sends_unfinished(stages, micro_batches)
        return with_transfers(order, stages * self.chunks - 1, sends_unfinished=unfinished)

    def sends_unfinished(self, stages: int, micro_batches: int) -> int:
        """How many outputs, and how many gradients, may be on their way from a stage while it goes on.

        Each holds an array. With fewer than the turns that a stage may be ahead of its neighbour, it would wait.
        """
        return 2

    def expected_bubble(self, stages: int, micro_batches: int) -> float | None:
        """Idle time / all stages' time, where a formula is known: see each schedule. None where none is.

        It holds if all stages have the same costs and transfers take no time.
        """
        return None


def staggered(*parts: tuple[Sequence[Compute], int]) -> list[Compute]:
    """Sequences of work side by side, one of each a round; each begins so many rounds late.

    Forwards, and backwards two rounds late: F0, F1, F2 B0, F3 B1, B2, B3.
    """
    rounds = range(max(late + len(work) for work, late in parts))
    turns = ((work, r - late) for r in rounds for work, late in parts)
    return list(chain.from_iterable(work[i : i + 1] for work, i in turns if i >= 0))
