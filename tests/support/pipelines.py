"""All small sizes of pipelines, executed without computation."""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import ClassVar

import pytest

from spmd_engine.engine.schedules import Schedule
from spmd_engine.engine.schedules.orders import (
    GPipe,
    Interleaved,
    Naive,
    OneForwardOneBackward,
    ZeroBubble,
    ZeroBubbleH2,
)
from spmd_engine.engine.schedules.schedule import StartReceiveInput, StartSendOutput, timeline

INTERLEAVED = [Interleaved(2), Interleaved(3)]
ZERO_BUBBLE = [ZeroBubble(), ZeroBubbleH2()]
PIPELINES = [Naive(), GPipe(), OneForwardOneBackward(), *INTERLEAVED, *ZERO_BUBBLE]
CASES = list(product((1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 8, 12)))  # stages, micro-batches
OTHER_CASES = [case for case in product(range(1, 9), range(1, 17)) if case not in CASES]
#: In ``soak``, also all sizes in between.
each_case = pytest.mark.parametrize(
    "cases", [CASES, pytest.param(OTHER_CASES, marks=pytest.mark.soak)], ids=["most sizes", "other sizes"]
)
every_pipeline = pytest.mark.parametrize("schedule", PIPELINES, ids=str)
equal = pytest.approx


@cache
def executed(schedule, stages, micro_batches):
    """Execute the schedule. Transfers are synchronous, so this also proves that it does not deadlock."""
    return timeline(schedule, stages, micro_batches)


@dataclass(frozen=True)
class Written(Schedule):
    """Programs written by hand."""

    name: ClassVar[str] = "written"
    programs: tuple = ()

    def __post_init__(self):
        """Allow any number of chunks."""

    def order(self, stages, micro_batches, stage):
        raise NotImplementedError

    def program(self, stages, micro_batches, stage):
        return list(self.programs[stage])


SEND, RECEIVE = StartSendOutput(0, 0), StartReceiveInput(0, 1)
