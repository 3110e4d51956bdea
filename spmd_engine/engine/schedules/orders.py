"""The schedules, and a schedule by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spmd_engine.axes import PIPE
from spmd_engine.engine.schedules.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Schedule,
    staggered,
)
from spmd_engine.errors import UsageError, one_of
from spmd_engine.requirements import Case, effect_along, requirement


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
    """``Naive`` on one stage, where nothing is idle: gradients of several micro-batches are accumulated."""

    name: ClassVar[str] = "sequential"

    def order(self, stages: int, micro_batches: int, stage: int) -> list[Compute]:
        """F0 B0 F1 B1 ...; raises UsageError if there are several stages."""
        if stages != 1:
            names = "naive, gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-h2"
            raise UsageError(f"sequential runs on 1 stage, not {stages}; schedules of pipelines are: {names}")
        return super().order(stages, micro_batches, stage)

    def _repr_html_(self) -> str:
        return self.picture(stages=1)._repr_html_()


# --- The two plain pipelines. They take the same time; they differ in when backwards begin, and so in memory


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

    Stage i holds min(m, p - i) micro-batches: those between it and the last stage, and on the way back. Narayanan
    et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021, section 3.2 (PipeDream-Flush); Megatron-LM.
    """

    name: ClassVar[str] = "1f1b"

    def order(self, stages: int, micro_batches: int, stage: int) -> list[Compute]:
        """On the second-last stage: F0, F1 B0, F2 B1, ..."""
        forwards = [Forward(m, stage) for m in range(micro_batches)]
        backwards = [Backward(m, stage) for m in range(micro_batches)]
        return staggered((forwards, 0), (backwards, stages - 1 - stage))

    def expected_bubble(self, stages: int, micro_batches: int) -> float:
        """(p - 1)/(m + p - 1), as GPipe's: p - 1 of m + p - 1 turns. Megatron-LM's papers give idle/busy, (p - 1)/m."""
        return (stages - 1) / (micro_batches + stages - 1)


# --- Several chunks of layers on each stage: the last stage starts earlier, so less time is idle


@dataclass(frozen=True)
class Interleaved(Schedule):
    """1F1B over v chunks of layers a stage; filling the pipeline takes 1/v of the time, for v times the transfers.

    Micro-batches go through in groups: a group through a stage's first chunk, then through its second, and so on.
    In a group of at least p, the first micro-batch reaches the second chunk in time, and no stage waits. So where p
    does not divide m, groups are somewhat larger than p, and as even as possible.

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
        stage_chunks = [stage + stages * i for i in range(self.chunks)]
        groups = self._groups(stages, micro_batches)
        forwards = [Forward(m, chunk) for group in groups for chunk in stage_chunks for m in group]
        backwards = [Backward(m, chunk) for group in groups for chunk in reversed(stage_chunks) for m in group]
        late = 2 * (stages - 1 - stage) + (self.chunks - 1) * max(map(len, groups))
        return staggered((forwards, 0), (backwards, late))

    def sends_unfinished(self, stages: int, micro_batches: int) -> int:
        """In a group larger than p, micro-batches that reach the next chunk wait for the rest of the group."""
        return 2 + max(max(map(len, self._groups(stages, micro_batches))) - stages, 0)

    @staticmethod
    def _groups(stages: int, micro_batches: int) -> list[range]:
        """As many groups as can have at least p micro-batches each, or one; sizes differ by at most one."""
        count = max(micro_batches // stages, 1)
        return [range(micro_batches * i // count, micro_batches * (i + 1) // count) for i in range(count)]

    def expected_bubble(self, stages: int, micro_batches: int) -> float | None:
        """(p - 1)/(v m + p - 1) if m >= p. Narayanan et al. give idle/busy, (p - 1)/(v m), where p divides m."""
        if micro_batches < stages:
            return None
        return (stages - 1) / (self.chunks * micro_batches + stages - 1)


# --- The backward in two parts: the weights' gradients, for which no stage waits, fill idle time


class ZeroBubble(Schedule):
    """ZB-H1: 1F1B with delayed weight parts: the fewer forwards a stage is ahead, the longer the delay.

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
        # Forwards come before weight parts, which wait for no more forwards than there are.
        latest = max(late, min(self.ahead * (stages - 1), micro_batches - 1))
        return staggered((forwards, 0), (inputs, late), (weights, latest))

    def expected_bubble(self, stages: int, micro_batches: int) -> float | None:
        """(p - 1)/(3m + p - 1) if m >= p and forward, input part and weight part cost the same.

        Qi et al., section 2: the idle time is (p - 1)(forward + input part - weight part).
        """
        return (stages - 1) / (3 * micro_batches + stages - 1) if micro_batches >= stages else None


class ZeroBubbleH2(ZeroBubble):
    """ZB-H2: twice as many forwards ahead, so that each input's gradient comes back before a stage runs out of work.

    From its first instruction to its last no stage is idle if m >= 2p - 1 and the three parts cost the same; up
    to min(m, 2p - 1) micro-batches are held. Stages begin and end one after the other: one step alone takes as long
    as with ZB-H1, and time is saved only where stages begin the next step without a synchronization.
    Qi et al., section 2.2.
    """

    name: ClassVar[str] = "zero-bubble-h2"
    ahead: ClassVar[int] = 2


# --- Schedules by name


SCHEDULES: dict[str, type[Schedule]] = {
    kind.name: kind for kind in (Sequential, Naive, GPipe, OneForwardOneBackward, Interleaved, ZeroBubble, ZeroBubbleH2)
}


def named(name: str, chunks: int | None = None) -> Schedule:
    """The schedule ``name``, with ``chunks`` chunks of layers on each stage (None: its default).

    Raises UsageError for an unknown name, and for a number of chunks that the schedule cannot have.

    >>> named("interleaved", chunks=4)
    Interleaved(chunks=4)
    """
    if name not in SCHEDULES:
        raise UsageError(f"no schedule {name!r}; {one_of(name, SCHEDULES)}")
    return SCHEDULES[name]() if chunks is None else SCHEDULES[name](chunks)


def chosen(schedule: Schedule | str | None, stages: int) -> Schedule:
    """``schedule``, or the schedule of that name (None: 1f1b); for one stage, ``sequential`` instead of a name."""
    if isinstance(schedule, Schedule):
        return schedule
    by_name = named("1f1b" if schedule is None else schedule)
    return by_name if stages > 1 else named("sequential")


@requirement("chunks", "schedule", nearest="Add --schedule interleaved", left_out=("chunks",))
def _interleaved_chunks(case: Case) -> bool:
    """several chunks a stage are interleaved"""
    return (case.options.chunks or 1) > 1 and case.options.schedule != "interleaved"


REQUIREMENTS = (
    _interleaved_chunks,
    *(effect_along(option, PIPE, least=2, listed="pipe of 2 or more") for option in ("schedule", "chunks")),
)
