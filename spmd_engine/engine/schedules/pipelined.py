"""The two plain pipelines. They take the same time; what differs is when the backwards begin, and so the memory."""

from __future__ import annotations

from typing import ClassVar

from spmd_engine.engine.schedules.instructions import Backward, Compute, Forward
from spmd_engine.engine.schedules.schedule import Schedule, staggered


class GPipe(Schedule):
    """All forwards, then all backwards: the activations of all m micro-batches are held.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019, section
    2.3. The backwards here begin with the first micro-batch, so that gradients are summed as in other schedules.
    """

    name: ClassVar[str] = "gpipe"

    def order(self, stages: int, micro_batches: int, stage: int) -> list[Compute]:
        """F0 F1 F2 ... B0 B1 B2 ..."""
        forwards = [Forward(m, stage) for m in range(micro_batches)]
        backwards = [Backward(m, stage) for m in range(micro_batches)]
        return staggered((forwards, 0), (backwards, micro_batches))

    def expected_bubble(self, stages: int, micro_batches: int) -> float:
        """(p - 1)/(m + p - 1): Huang et al., section 2.3."""
        return (stages - 1) / (micro_batches + stages - 1)


class OneForwardOneBackward(Schedule):
    """Backwards begin as soon as they can; after that each stage does one forward, one backward in turn.

    Stage i holds min(m, p - i) micro-batches: those that are on their way to the last stage and back. Narayanan
    et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021, section 3.2 (PipeDream-Flush); Megatron-LM.
    """

    name: ClassVar[str] = "1f1b"

    def order(self, stages: int, micro_batches: int, stage: int) -> list[Compute]:
        """On the second-last stage: F0, F1 B0, F2 B1, ..."""
        forwards = [Forward(m, stage) for m in range(micro_batches)]
        backwards = [Backward(m, stage) for m in range(micro_batches)]
        return staggered((forwards, 0), (backwards, stages - 1 - stage))

    def expected_bubble(self, stages: int, micro_batches: int) -> float:
        """(p - 1)/(m + p - 1), as GPipe's: p - 1 of m + p - 1 turns. Megatron-LM's papers say idle/busy, (p - 1)/m."""
        return (stages - 1) / (micro_batches + stages - 1)
