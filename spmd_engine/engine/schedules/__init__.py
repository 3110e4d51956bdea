"""Schedules as data: what each stage does with its micro-batches, in order. An engine executes them."""

from spmd_engine.engine.schedules.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Program,
    StartReceiveGradient,
    StartReceiveInput,
    StartSendGradient,
    StartSendOutput,
    Transfer,
    Wait,
)
from spmd_engine.engine.schedules.interleaved import Interleaved
from spmd_engine.engine.schedules.names import SCHEDULES, chosen, named
from spmd_engine.engine.schedules.one_at_a_time import Naive, Sequential
from spmd_engine.engine.schedules.pipelined import GPipe, OneForwardOneBackward
from spmd_engine.engine.schedules.schedule import Schedule
from spmd_engine.engine.schedules.timeline import (
    COSTS,
    Slot,
    idle_fraction,
    idle_inside,
    makespan,
    peak_activations,
    timeline,
)
from spmd_engine.engine.schedules.transfers import other_end, with_transfers
from spmd_engine.engine.schedules.zero_bubble import ZeroBubble, ZeroBubbleH2

__all__ = [
    "COSTS",
    "SCHEDULES",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Compute",
    "Forward",
    "GPipe",
    "Instruction",
    "Interleaved",
    "Naive",
    "OneForwardOneBackward",
    "Program",
    "Schedule",
    "Sequential",
    "Slot",
    "StartReceiveGradient",
    "StartReceiveInput",
    "StartSendGradient",
    "StartSendOutput",
    "Transfer",
    "Wait",
    "ZeroBubble",
    "ZeroBubbleH2",
    "chosen",
    "idle_fraction",
    "idle_inside",
    "makespan",
    "named",
    "other_end",
    "peak_activations",
    "timeline",
    "with_transfers",
]
