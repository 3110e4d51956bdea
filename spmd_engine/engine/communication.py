"""When a rank's step moves what, as data: found by rehearsing it without arrays, ranks or messages.

The rehearsal runs the engine's own text (chunks, the opening of parameters, the reducer, the pipeline's program) on
layers that compute nothing and storage that holds nothing, and writes down what begins and what is waited for. So
the schedule is a pure function of the plan, and what the engine does cannot differ from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from spmd_engine.engine.chunk import Chunk, Segment
from spmd_engine.engine.execution import Execution, Neighbours
from spmd_engine.engine.gathering import OpenParameters
from spmd_engine.engine.plan import Plan
from spmd_engine.engine.reducer import Reducer
from spmd_engine.engine.schedules.instructions import Program
from spmd_engine.layers.layer import ForwardContext, Layer
from spmd_engine.sharding.groups import ParameterGroup

NOTHING = np.empty(0)


@dataclass
class Transfer:
    """Something that is sent while a rank computes.

    ``begins`` and ``ends`` are numbers of computations (of the list that comes along): it begins before the one, and
    is waited for before the other; both may be one more than the last. The sooner it is waited for the more urgent it
    is: ``priority`` counts the computations that may hide it, 0 where nothing does.
    """

    operation: str  #: all_gather, reduce_scatter, all_reduce, send or receive
    what: str  #: a parameter group, or what a pipeline's neighbours exchange of a micro-batch
    over: tuple[str, ...]  #: mesh axes
    elements: int  #: of the whole group; 0 where only the samples know it
    begins: int
    ends: int | None = None

    @property
    def priority(self) -> int:
        return (self.begins if self.ends is None else self.ends) - self.begins


@dataclass
class Step:
    """One step of one rank: what it computes, in order, and what it sends meanwhile."""

    computations: list[str] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)

    def begin(self, operation: str, what: str, over: Sequence[str], elements: int = 0) -> _Promise:
        """Write down that a transfer begins now."""
        transfer = Transfer(operation, what, tuple(over), elements, len(self.computations))
        self.transfers.append(transfer)
        return _Promise(self, transfer)


def rehearse(
    plan: Plan,
    names: Sequence[str],
    program: Program,
    segments: Mapping[int, Sequence[Segment]],
    *,
    zero: int,
    micro_batches: int,
    stages: int = 1,
    stage: int = 0,
) -> Step:
    """The step of the rank with this ``plan`` and ``program``, of a model whose layers have these ``names``.

    ``segments`` are those of each chunk here; ``zero`` is the stage of ZeRO of groups whose state is cut.
    """
    step = Step()
    storages = [_Storage(group, zero if group.summed.cut else 0, step) for group in plan.groups]
    opened = OpenParameters(storages, plan.uses)
    reducer = Reducer(storages, plan.uses, [plan.chunks[number] for number in plan.mine])
    layers = [(name, _Layer(name, step)) for name in names]
    chunks = {number: Chunk(segments[number], layers, layers, opened, reducer) for number in plan.mine}
    ctx = ForwardContext(NOTHING, NOTHING, training=True)
    reducer.begin(micro_batches)
    neighbours = _Neighbours(step, stages, stage, len(plan.chunks))
    inputs = [NOTHING] * micro_batches
    Execution(chunks, neighbours, [ctx] * micro_batches, inputs, lambda m, y: y).run(program)
    reducer.finish()
    opened.close()
    step.computations.append("update")
    for pending in [pending for storage in storages if (pending := storage.start_refresh())]:
        pending.wait()
    return step


class _Promise:
    """A transfer under way."""

    def __init__(self, step: Step, transfer: Transfer) -> None:
        self._step, self._transfer = step, transfer

    def wait(self) -> np.ndarray:
        if self._transfer.ends is None:
            self._transfer.ends = len(self._step.computations)
        return NOTHING


class _Layer(Layer):
    """Computes nothing, but is seen to."""

    def __init__(self, name: str, step: Step) -> None:
        self._name, self._step = name, step

    def forward(self, sh, p, x, ctx):
        self._step.computations.append(f"{self._name} forward")
        return x, None

    def backward_input(self, sh, p, saved, dy):
        self._step.computations.append(f"{self._name} backward (input)")
        return dy, None

    def backward_weight(self, sh, rest, g):
        self._step.computations.append(f"{self._name} backward (weights)")


class _Storage:
    """What GroupStorage does, but for the arrays."""

    def __init__(self, group: ParameterGroup, zero: int, step: Step) -> None:
        self.group, self.zero, self._step = group, zero, step
        self.own_gradients = NOTHING
        self.parameters = self.gradients = dict.fromkeys(group.spans, NOTHING)
        self._gathering: _Promise | None = None
        summed = group.summed
        self._rest = tuple(axis for axis in summed.over if axis not in summed.cut or not zero)
        self._shared = len(summed.stages) > 1
        if self._shared:
            self._rest = ("pipe", *self._rest)

    def start_gather(self) -> None:
        if self._gathering is None:
            self._gathering = self._begin("all_gather", self.group.summed.cut)

    def finish_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()

    def release(self) -> None:
        self.finish_gather()
        self._gathering = None

    def start_refresh(self) -> _Promise | None:
        return self._begin("all_gather", self.group.summed.cut) if self.zero in (1, 2) else None

    def start_reduce(self) -> _Promise | None:
        if self.zero:
            return self._begin("reduce_scatter", self.group.summed.cut)
        return None if self._shared else self._all_reduce()

    def start_reduce_rest(self) -> _Promise | None:
        return self._all_reduce() if self.zero or self._shared else None

    def _all_reduce(self) -> _Promise | None:
        return self._begin("all_reduce", self._rest) if self._rest else None

    def _begin(self, operation: str, over: tuple[str, ...]) -> _Promise:
        return self._step.begin(operation, self.group.name, over, self.group.size)


class _Neighbours(Neighbours):
    """The same neighbours, but no messages."""

    def __init__(self, step: Step, stages: int, stage: int, chunks: int) -> None:
        self._step, self.stages, self.stage, self.chunks = step, stages, stage, chunks

    def start_send(self, x: np.ndarray, m: int, chunk: int, to: int) -> _Promise:
        what = "outputs" if to > chunk else "gradients"
        return self._step.begin("send", f"{what} {m} to stage {to % self.stages}", ("pipe",))

    def start_receive(self, m: int, chunk: int, source: int) -> _Promise:
        what = "outputs" if source < chunk else "gradients"
        return self._step.begin("receive", f"{what} {m} from stage {source % self.stages}", ("pipe",))
