"""A model placed on a mesh: all that follows from the two and from how the model is to be computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.pipeline.chunk import Chunk, Recompute, check, segments
from spmd_engine.engine.pipeline.executor import Execution, PipelineNeighbours
from spmd_engine.engine.pipeline.stages import Division, parse_division
from spmd_engine.engine.schedules import Program, Schedule, chosen
from spmd_engine.engine.state.assignment import PIPE, ZeroConfig, assign
from spmd_engine.engine.state.buffers_and_side_outputs import Buffers, Extras, SideOutputs
from spmd_engine.engine.zero.parameter_store import FrozenStore, ParameterStore
from spmd_engine.engine.zero.reducer import Reducer
from spmd_engine.engine.zero.unsharder import Unsharder
from spmd_engine.layers.layer import ForwardContext, Layer
from spmd_engine.models import Model
from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.shards import Shards


@dataclass(frozen=True)
class EngineState:
    """Where a model's parts are, and who works on them when; made anew for another mesh."""

    mesh: Mesh
    layout: Layout
    schedule: Schedule
    store: ParameterStore
    extras: Extras
    unsharder: Unsharder
    reducer: Reducer
    neighbours: PipelineNeighbours
    chunks: Mapping[int, Chunk]  #: on this rank, by number
    program: Callable[[int], Program]  #: this rank's, for so many micro-batches
    positions: Callable[[int], tuple[Array, Array]]  #: this rank's, of a sequence: inside layers, and between them
    frozen: FrozenStore

    def execution(
        self, contexts: Sequence[ForwardContext], inputs: Sequence[Array], loss_gradient: Callable[[int, Array], Any]
    ) -> Execution:
        """To carry out a program on these micro-batches: see there."""
        return Execution(self.chunks, self.neighbours, contexts, inputs, loss_gradient)


def place(
    model: Model,
    mesh: Mesh,
    layout: Layout,
    *,
    dtype: np.dtype,
    backend: Backend,
    storage: ZeroConfig = ZeroConfig(),  # noqa: B008 (immutable)
    schedule: Schedule | str | None = None,
    stages: Division = "even",
    recompute: Recompute | str = Recompute.NONE,
) -> EngineState:
    """The model on this mesh; its parameters are zeros. Options are those of ``LayeredEngine``. Collective.

    Raises NotationError for a layout under which a layer cannot work, UsageError for a schedule or a recomputation
    that the model has not enough layers for.
    """
    for name, layer in model.layers:
        _check_layout(name, layer, layout)
    recompute, stages = Recompute(recompute), parse_division(stages) if isinstance(stages, str) else stages
    check(model, recompute)
    pipe = mesh.group(PIPE) if mesh.axes.get(PIPE, 1) > 1 else None
    schedule = chosen(schedule, mesh.axes.get(PIPE, 1))
    assignment = assign(
        model, mesh, layout, dtype.itemsize, storage=storage, stages=stages, chunks_per_stage=schedule.chunks
    )
    neighbours = PipelineNeighbours(pipe, len(assignment.chunks), backend)
    program = lru_cache(partial(schedule.program, neighbours.stages, stage=neighbours.stage))
    program(1)  # raises if the schedule has no such stages
    store = ParameterStore(dict(model.parameters()), assignment, mesh, layout, storage, dtype, backend)
    frozen = FrozenStore(model, assignment, mesh, layout, dtype, backend)
    buffers = Buffers(model, sorted(assignment.uses), mesh, layout, dtype, backend, frozen.arrays)
    extras = Extras(buffers, SideOutputs(model, mesh, layout))
    unsharder = Unsharder(
        [*store.storages, *frozen.storages],
        {layer: {**names, **assignment.frozen_uses.get(layer, {})} for layer, names in assignment.uses.items()},
        {layer: buffers.of_layer(layer) for layer in assignment.uses},
    )
    passes = [assignment.chunks[number] for number in assignment.mine]
    reducer = Reducer(store.storages, assignment.uses, passes)
    shards = [Shards(mesh, layout, name, takes_data=not n) for n, (name, _) in enumerate(model.layers)]
    chunks = {
        number: Chunk(segments(model, layers, recompute), model.layers, shards, unsharder, reducer, extras)
        for number, layers in zip(assignment.mine, passes, strict=True)
    }
    positions = lru_cache(maxsize=8)(partial(_positions, layout, mesh, backend))
    return EngineState(
        mesh, layout, schedule, store, extras, unsharder, reducer, neighbours, chunks, program, positions, frozen
    )


def _check_layout(name: str, layer: Layer, layout: Layout) -> None:
    stream = dict.fromkeys("bs")
    for each in (layer.inputs, layer.outputs):
        if each.where == "residual":
            stream |= dict.fromkeys(letter for letter in each.dims.split() if letter not in each.whole)
    letters = {*stream, *layer.inputs.dims.split(), *layer.outputs.dims.split(), *layer.sizes}
    if "b" not in layer.inputs.dims + layer.outputs.dims:  # its samples have another letter
        letters.discard("b")
    for part in layer.side_by_side:
        others = letters if part is layer else letters & {*stream, *part.sizes}
        layout.check(name, others, part.may_cut, part.across, "".join(stream))


def _positions(layout: Layout, mesh: Mesh, backend: Backend, length: int) -> tuple[Any, Any]:
    inside, residual = (layout.positions(length, mesh, where) for where in ("inside", "residual"))
    return backend.xp.asarray(inside), backend.xp.asarray(residual)
