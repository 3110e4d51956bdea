"""One micro-batch under way at a time: what an engine without a pipeline does, and the pipeline to beat."""

from __future__ import annotations

from typing import ClassVar

from spmd_engine.engine.schedules.instructions import Backward, Compute, Forward
from spmd_engine.engine.schedules.schedule import Schedule, staggered
from spmd_engine.errors import UsageError


class Naive(Schedule):
    """A micro-batch goes forward through all stages and back before the next begins. One stage works at a time."""

    name: ClassVar[str] = "naive"

    def order(self, stages: int, micro_batches: int, stage: int) -> list[Compute]:
        """F0 B0 F1 B1 ..."""
        forwards = [Forward(m, stage) for m in range(micro_batches)]
        backwards = [Backward(m, stage) for m in range(micro_batches)]
        return staggered((forwards, 0), (backwards, 0))

    def expected_bubble(self, stages: int, micro_batches: int) -> float:
        """1 - 1/p."""
        return 1 - 1 / stages


class Sequential(Naive):
    """The same on one stage, where nothing is idle: gradients of several micro-batches are accumulated."""

    name: ClassVar[str] = "sequential"

    def order(self, stages: int, micro_batches: int, stage: int) -> list[Compute]:
        """F0 B0 F1 B1 ...; raises UsageError if there are several stages."""
        if stages != 1:
            known = "naive, gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-h2"
            raise UsageError(f"sequential runs on 1 stage, not {stages}; schedules of pipelines are: {known}")
        return super().order(stages, micro_batches, stage)
