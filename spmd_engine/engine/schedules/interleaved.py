"""Several chunks of layers on each stage: a shorter way to the last stage, so less time idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spmd_engine.engine.schedules.instructions import Backward, Compute, Forward
from spmd_engine.engine.schedules.schedule import Schedule, staggered
from spmd_engine.errors import UsageError


@dataclass(frozen=True)
class Interleaved(Schedule):
    """1F1B over v chunks of layers a stage; filling the pipeline takes 1/v of the time, for v times the transfers.

    Micro-batches go through in groups: a group through a stage's first chunk, then through its second, and so on.
    In a group of at least p, the first has come round to the second chunk by then, and nobody waits; so where p
    does not divide m, groups are not p but somewhat larger, and as even as can be.

    With groups of g, stage i holds (2(p - 1 - i) + (v - 1)g + 1)/v micro-batches' activations, in units of one
    stage's, or all m: the first stage p + (p - 1)/v if p divides m, and more, up to all of them, if m < 2p.
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
    section 2.2.2, where p divides m.
    """

    name: ClassVar[str] = "interleaved"
    chunks: int = 2

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise UsageError(f"interleaved: at least 2 chunks of layers a stage, not {self.chunks}; 1f1b has one")

    def order(self, stages: int, micro_batches: int, stage: int) -> list[Compute]:
        """Group by group; in each, chunk by chunk; of a chunk, a group's micro-batches one after the other."""
        here = [stage + stages * i for i in range(self.chunks)]
        groups = self._groups(stages, micro_batches)
        forwards = [Forward(m, chunk) for group in groups for chunk in here for m in group]
        backwards = [Backward(m, chunk) for group in groups for chunk in reversed(here) for m in group]
        late = 2 * (stages - 1 - stage) + (self.chunks - 1) * max(map(len, groups))
        return staggered((forwards, 0), (backwards, late))

    def sends_unfinished(self, stages: int, micro_batches: int) -> int:
        """What has come round in a larger group than p waits for the rest of the group."""
        return 2 + max(max(map(len, self._groups(stages, micro_batches))) - stages, 0)

    @staticmethod
    def _groups(stages: int, micro_batches: int) -> list[range]:
        """As many as have at least p micro-batches each, or one; sizes differ by one at most."""
        count = max(micro_batches // stages, 1)
        return [range(micro_batches * i // count, micro_batches * (i + 1) // count) for i in range(count)]

    def expected_bubble(self, stages: int, micro_batches: int) -> float | None:
        """(p - 1)/(v m + p - 1) if m >= p. Narayanan et al. say idle/busy, (p - 1)/(v m), where p divides m."""
        if micro_batches < stages:
            return None
        return (stages - 1) / (self.chunks * micro_batches + stages - 1)
