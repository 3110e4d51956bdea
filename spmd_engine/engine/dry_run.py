"""A dry run of a rank's step: when it moves what, as data, found without arrays, ranks or messages.

The engine's own text runs (chunks, storage, the gathering of parameters, the reducer, the pipeline's program), on
layers that compute nothing, arrays without memory and groups without ranks, which write down what begins and what is
waited for. So the schedule is a pure function of the plan, and what the engine does cannot differ from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import CPU
from spmd_engine.arrays.meter import Meter, metered
from spmd_engine.arrays.shaped import ShapedArray
from spmd_engine.arrays.shapes import on_shapes
from spmd_engine.comm.mesh_position import MeshPosition
from spmd_engine.engine.chunk import Chunk, Segment
from spmd_engine.engine.execution import Execution, Neighbours
from spmd_engine.engine.plan import PIPE, Plan
from spmd_engine.engine.reducer import Reducer
from spmd_engine.engine.schedules.instructions import Program
from spmd_engine.engine.storage import GroupStorage
from spmd_engine.engine.unsharder import Unsharder
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import ForwardContext, Layer


@dataclass
class Communication:
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
class DryRun:
    """One step of one rank: what it computes, in order, and what it sends meanwhile."""

    computations: list[str] = field(default_factory=list)
    communications: list[Communication] = field(default_factory=list)

    def begin(self, operation: str, what: str, over: Sequence[str], elements: int, result: Any) -> _Pending:
        """Write down that a communication begins now, of which ``result`` is to come."""
        communication = Communication(operation, what, tuple(over), elements, len(self.computations))
        self.communications.append(communication)
        return _Pending(self, communication, result)


def dry_run(
    plan: Plan,
    names: Sequence[str],
    program: Program,
    segments: Mapping[int, Sequence[Segment]],
    *,
    place: MeshPosition,
    zero: int,
    micro_batches: int,
    dtype: Any = np.float32,
    compress: str = "none",
) -> DryRun:
    """The step of the rank at ``place`` with this ``plan`` and ``program``, of a model whose layers have these names.

    ``segments`` are those of each chunk here; ``zero`` is the stage of ZeRO of groups whose state is cut. Raises
    UsageError for a compression that looks at values, of which there are none here.
    """
    if compress.startswith(("top-k", "powersgd")):
        raise UsageError(f"compression {compress!r} sends what it finds in gradients: that shows only in a real step")
    with on_shapes(), metered(Meter()):
        return _run(plan, names, program, segments, place, zero, micro_batches, dtype, compress)


def _run(plan, names, program, segments, place, zero, micro_batches, dtype, compress) -> DryRun:
    run = DryRun()
    storages = [
        GroupStorage(group, _Mesh(place, run, group.name, group.size), zero, np.dtype(dtype), CPU, compress)
        for group in plan.groups
    ]
    unsharder = Unsharder(storages, plan.uses)
    reducer = Reducer(storages, plan.uses, [plan.chunks[number] for number in plan.mine])
    layers = [(name, _Layer(name, run)) for name in names]
    chunks = {number: Chunk(segments[number], layers, layers, unsharder, reducer) for number in plan.mine}
    reducer.begin(micro_batches)
    neighbours = _Neighbours(run, place.axes.get(PIPE, 1), place.coordinates.get(PIPE, 0), len(plan.chunks))
    nothing = ShapedArray((0,), dtype)  # what layers that compute nothing pass on
    contexts = [ForwardContext(nothing, nothing, training=True)] * micro_batches
    Execution(chunks, neighbours, contexts, [nothing] * micro_batches, lambda m, y: y).run(program)
    reducer.finish()
    unsharder.release()
    run.computations.append("update")
    for pending in [pending for storage in storages if (pending := storage.start_refresh())]:
        pending.wait()
    return run


class _Pending:
    """A communication under way."""

    def __init__(self, run: DryRun, communication: Communication, result: Any) -> None:
        self._run, self._communication, self._result = run, communication, result

    def wait(self) -> Any:
        if self._communication.ends is None:
            self._communication.ends = len(self._run.computations)
        return self._result


class _Layer(Layer):
    """Computes nothing, but is seen to."""

    def __init__(self, name: str, run: DryRun) -> None:
        self._name, self._run = name, run

    def forward(self, sh, p, x, ctx):
        self._run.computations.append(f"{self._name} forward")
        return x, None

    def backward_input(self, sh, p, saved, dy):
        self._run.computations.append(f"{self._name} backward (input)")
        return dy, None

    def backward_weight(self, sh, rest, g):
        self._run.computations.append(f"{self._name} backward (weights)")


class _Mesh:
    """What storage asks of a mesh, for one parameter group: memory that is none, and groups without ranks."""

    def __init__(self, place: MeshPosition, run: DryRun, what: str, elements: int) -> None:
        self._place, self._run, self._what, self._elements = place, run, what, elements

    def empty(self, size: int, dtype: Any) -> ShapedArray:
        return ShapedArray((size,), dtype)

    def group(self, over: Sequence[str], *, among: Mapping[str, Sequence[int]] | None = None) -> _Group:
        sizes, rank = [], 0
        for axis in over:
            places = list((among or {}).get(axis, range(self._place.axes[axis])))
            sizes.append(len(places))
            rank = rank * len(places) + places.index(self._place.coordinates[axis])
        return _Group(self, tuple(over), prod(sizes), rank)

    def begin(self, operation: str, over: tuple[str, ...], result: ShapedArray) -> _Pending:
        return self._run.begin(operation, self._what, over, self._elements, result)


@dataclass(frozen=True)
class _Group:
    """Ranks along mesh axes, of which none but this one is there."""

    mesh: _Mesh
    axes: tuple[str, ...]
    size: int
    rank: int

    def start_all_gather(self, x: ShapedArray, *, sizes: Sequence[int], out: ShapedArray, label: str) -> _Pending:
        return self.mesh.begin("all_gather", self.axes, out)

    def start_all_reduce(self, x: ShapedArray, *, out: ShapedArray, label: str) -> _Pending:
        return self.mesh.begin("all_reduce", self.axes, out)

    def start_reduce_scatter(
        self, x: ShapedArray, *, sizes: Sequence[int], out: ShapedArray | None = None, label: str
    ) -> _Pending:
        result = out if out is not None else ShapedArray((sizes[self.rank],), x.dtype)
        return self.mesh.begin("reduce_scatter", self.axes, result)


class _Neighbours(Neighbours):
    """The same neighbours, but no messages."""

    def __init__(self, run: DryRun, stages: int, stage: int, chunks: int) -> None:
        self._run, self.stages, self.stage, self.chunks = run, stages, stage, chunks

    def start_send(self, x: Any, m: int, chunk: int, to: int) -> _Pending:
        what = "outputs" if to > chunk else "gradients"
        return self._run.begin("send", f"{what} {m} to stage {to % self.stages}", (PIPE,), 0, x)

    def start_receive(self, m: int, chunk: int, source: int) -> _Pending:
        what = "outputs" if source < chunk else "gradients"
        result = ShapedArray((0,), np.float32)
        return self._run.begin("receive", f"{what} {m} from stage {source % self.stages}", (PIPE,), 0, result)
