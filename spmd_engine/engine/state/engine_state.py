"""A model placed on a mesh: all that follows from the two and from how the model is to be computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.comm.group import Group
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.engine.pipeline import Chunk, Execution, PipelineNeighbours, Recompute, check_recompute, segments
from spmd_engine.engine.schedules import Schedule
from spmd_engine.engine.schedules.orders import chosen
from spmd_engine.engine.schedules.schedule import Program
from spmd_engine.engine.state.assignment import PIPE, Division, ZeroConfig, assign, parse_division
from spmd_engine.engine.state.buffers_and_side_outputs import Buffers, Extras, SideOutputs
from spmd_engine.engine.zero.parameter_store import (
    FrozenStore,
    ParameterStore,
    Placements,
    StoredEngine,
    describe_parts,
    read_placements,
)
from spmd_engine.engine.zero.reducer import Reducer
from spmd_engine.engine.zero.unsharder import Unsharder
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import ForwardContext, Layer
from spmd_engine.models import Model
from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.placement import Placement
from spmd_engine.sharding.shards import Shards
from spmd_engine.sharding.transfer import PIECE, plan_transfer


@dataclass(frozen=True)
class EngineState:
    """A model placed on a mesh: its storage and what executes it. Another mesh needs a new one."""

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
    check_recompute(model, recompute)
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


# --- Moving a model in mid-training: parameters, buffers and optimizer state from one placement to another


Arrays = Mapping[str, Array]


class StateReshard:
    """What an engine, and its optimizer, have before they are placed anew: made before, ``finish`` is called after.

    Every element travels once to each rank that will hold it and has it not, as ``plan_transfer`` says; in pieces, so
    that beside its old and new blocks no rank holds more than two of them. Both are collective over the mesh before.
    """

    def __init__(self, engine: StoredEngine, optimizer: Optimizer | None = None) -> None:
        self._engine = engine
        self._group, self._nodes = engine.group(), engine.mesh.nodes_by_rank
        self._known = engine.store.placements  #: empty unless they were exchanged before
        self._old_parts = None if self._known else describe_parts(engine)
        self._arrays = {**engine.parameters, **engine.buffers}
        self._state, self._optimizer_state = {}, {}
        if optimizer is not None:
            optimizer.prepare(engine)
            self._optimizer_state = optimizer.state
            self._state = {kind: engine.named(arrays) for kind, arrays in optimizer.state.items()}

    def finish(self) -> None:
        """Fill the arrays that the engine has now: on another mesh of all ranks, or of some of them, in any order."""
        engine = self._engine
        order = self._numbers_before(engine.group())
        old, new = self._ask(engine)
        if order == list(range(self._group.size)):
            engine.store.placements |= new
        self._fill(old, new, {**engine.parameters, **engine.buffers})

    def leave(self) -> None:
        """What ``finish`` is for a rank that is not on the new mesh: others get what they lack of what it has."""
        self._numbers_before(None)
        self._fill(*self._ask(None), {})

    def _ask(self, engine: StoredEngine | None) -> tuple[Placements, Placements]:
        """Where all is before and after, by ranks of the group before. One all_gather: each waits for the slowest."""
        ranks = gather_json(self._group, {"old": self._old_parts, "new": describe_parts(engine)}, "placement")
        old = self._known or read_placements([parts["old"] for parts in ranks])
        return old, read_placements([parts["new"] for parts in ranks])

    def _numbers_before(self, after: Group | None) -> list[int]:
        """The number in the old group of each rank of the group ``after``, which is None on ranks that are not in it.

        Raises UsageError on all, unless that is one group, of ranks of the old one.
        """
        if after is not None and after.comm is self._group.comm:  # on all ranks then
            return list(range(after.size))
        mine = np.array([[after.rank, after.size] if after else [-1, 0]])
        numbers = self._group.all_gather(mine, label="placement")
        before = np.flatnonzero(numbers[:, 0] >= 0)
        order = before[np.argsort(numbers[before, 0], kind="stable")]
        if numbers[order, 0].tolist() != list(range(numbers[:, 1].max())):
            raise UsageError(
                "reshard: all ranks that call it go on on one new mesh, of no others, or pass None for it; here "
                f"{len(order)} of {len(numbers)} are on a mesh of {numbers[:, 1].max()}, as its "
                f"{numbers[order, 0].tolist()}"
            )
        return order.tolist()

    def _fill(self, old: Placements, new: Placements, here: Arrays) -> None:
        """Bring to ``here`` what is placed there, and to the optimizer's state what this rank owns now."""
        model, states = [(self._arrays, here)], []
        for kind, before in self._state.items():  # all of it comes: no need of zeros
            made = {key: backend_of(x).xp.empty_like(x) for key, x in self._engine.owned.items()} if here else {}
            self._optimizer_state[kind] = made
            states.append((before, self._engine.named(made) if here else {}))
        if all(placements[True] is placements[False] for placements in (old, new)):
            self._execute(old[False], new[False], model + states)
            return
        self._execute(old[False], new[False], model)
        if states:
            self._execute(old[True], new[True], states)

    def _execute(self, source: Placement, target: Placement, several: Sequence[tuple[Arrays, Arrays]]) -> None:
        rank = self._group.rank

        def held(placement: Placement, arrays: Arrays) -> dict[str, list[Array]]:
            return {name: [arrays[name]] if each.held[rank] else [] for name, each in placement.items()}

        plan = plan_transfer(source, target, nodes=self._nodes, piece_bytes=PIECE // len(several))
        plan.execute_all(
            self._group, [(held(source, before), held(target, after)) for before, after in several], label="reshard"
        )
