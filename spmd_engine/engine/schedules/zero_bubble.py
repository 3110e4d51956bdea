"""The backward in two parts: weights' gradients, for which nobody waits, fill what would be idle time."""

from __future__ import annotations

from typing import ClassVar

from spmd_engine.engine.schedules.instructions import BackwardInput, BackwardWeight, Compute, Forward
from spmd_engine.engine.schedules.schedule import Schedule, staggered


class ZeroBubble(Schedule):
    """ZB-H1: 1F1B whose weight parts come later, and the later the fewer forwards a stage is ahead.

    All stages then hold as many micro-batches as the first stage of 1F1B, min(m, p), from the forward to the
    weight part. Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.1.
    """

    name: ClassVar[str] = "zero-bubble"
    ahead: ClassVar[int] = 1  #: forwards that a stage is ahead of the next one when its backwards begin

    def order(self, stages: int, micro_batches: int, stage: int) -> list[Compute]:
        """Three stages, the second one: F0, F1 I0, F2 I1 W0, F3 I2 W1, ..."""
        forwards = [Forward(m, stage) for m in range(micro_batches)]
        inputs = [BackwardInput(m, stage) for m in range(micro_batches)]
        weights = [BackwardWeight(m, stage) for m in range(micro_batches)]
        late = self.ahead * (stages - 1 - stage)
        # Weights let forwards go first, but do not wait for more of them than there are.
        latest = max(late, min(self.ahead * (stages - 1), micro_batches - 1))
        return staggered((forwards, 0), (inputs, late), (weights, latest))

    def expected_bubble(self, stages: int, micro_batches: int) -> float | None:
        """(p - 1)/(3m + p - 1) if m >= p and forward, input part and weight part cost the same.

        Qi et al., section 2: the idle time is (p - 1)(forward + input part - weight part).
        """
        return (stages - 1) / (3 * micro_batches + stages - 1) if micro_batches >= stages else None


class ZeroBubbleH2(ZeroBubble):
    """ZB-H2: twice as many forwards ahead, so that every input's gradient comes back before the work runs out.

    From its first instruction to its last no stage is idle if m >= 2p - 1 and the three parts cost the same; up
    to min(m, 2p - 1) micro-batches are held. Stages begin one after the other and end so: one step alone takes
    as long as ZB-H1's, and what is gained is gained where stages begin the next step without meeting first.
    Qi et al., section 2.2.
    """

    name: ClassVar[str] = "zero-bubble-h2"
    ahead: ClassVar[int] = 2
