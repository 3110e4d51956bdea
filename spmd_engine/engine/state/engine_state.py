"""A model placed on a mesh: its storage and execution, and its move to another mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.axes import MeshPosition, uneven_axes
from spmd_engine.comm import Group, Mesh
from spmd_engine.comm.agreement.rank_zero import on_all_ranks
from spmd_engine.engine.helpers import Assigned, HelpedNeighbours, PartedPasses, parse_assign
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.engine.pipeline import Chunk, Execution, PipelineNeighbours, Recompute, check_recompute, segments
from spmd_engine.engine.schedules import Schedule
from spmd_engine.engine.schedules.orders import chosen
from spmd_engine.engine.schedules.schedule import Compute, Program
from spmd_engine.engine.state.assignment import PIPE, Assignment, Division, ZeroConfig, assign, parse_division
from spmd_engine.engine.state.buffers_and_side_outputs import Buffers, Extras, SideOutputs
from spmd_engine.engine.uneven_stages import UnevenNeighbours
from spmd_engine.engine.zero.parameter_store import FrozenStore, ParameterStore, Placements, parts_of, placements_of
from spmd_engine.engine.zero.reducer import Reducer
from spmd_engine.engine.zero.unsharder import Unsharder
from spmd_engine.errors import UsageError
from spmd_engine.layers import ForwardContext, Layer
from spmd_engine.models import Model
from spmd_engine.sharding import Layout, Shards
from spmd_engine.sharding.placement import Placement, exchange_placements
from spmd_engine.sharding.routes import Blocks
from spmd_engine.sharding.transfer import PIECE, plan_transfer

if TYPE_CHECKING:
    from spmd_engine.engine.layered import LayeredEngine


@dataclass(frozen=True)
class Passes:
    """What executes forwards and backwards on this rank."""

    chunks: Mapping[int, Chunk]  #: by number
    neighbours: PipelineNeighbours
    _parted: PartedPasses

    def program(self, micro_batches: int) -> Program:
        """That of a step."""
        return self._parted.program(micro_batches, self.neighbours.stage)

    def one_pass(self, kind: type[Compute]) -> Program:
        """Forwards or backwards of one micro-batch."""
        return self._parted.one_pass(kind, self.neighbours.stage)

    def begin(
        self,
        what: str,
        contexts: Sequence[ForwardContext],
        inputs: Sequence[Array],
        loss_gradient: Callable[[int, Array], Any],
    ) -> Execution:
        """Begin a "step" or a "forward" of these micro-batches."""
        number = self.neighbours.order(what, contexts)
        return Execution(self.chunks, self.neighbours, contexts, inputs, loss_gradient, number)


class EngineState:
    """A model placed on a mesh: its storage, with parameters of zeros, and what executes it. Another mesh needs a new
    one.

    Options are those of ``LayeredEngine``, and ``together``. Raises the errors of ``assigned``, of ``ParameterStore``
    and of ``HelpedNeighbours``.
    """

    def __init__(
        self,
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
        assign: str | None = None,
        trained: bool = True,
        together: bool = False,
    ) -> None:
        how: dict[str, Any] = {"storage": storage, "schedule": schedule, "stages": stages, "recompute": recompute}
        self.mesh, self.layout = mesh, layout
        self.schedule, assignment = assigned(model, mesh, layout, dtype.itemsize, **how)
        described = dict(model.parameters())
        how = {"together": together, "trained": trained}
        self.store = ParameterStore(described, assignment, mesh, layout, storage, dtype, backend, **how)
        self.frozen = FrozenStore(model, assignment, mesh, layout, dtype, backend)
        table = storage.table(mesh.axes, (), dtype, trained=trained)
        buffers = Buffers(model, assignment.held, mesh, layout, table, backend, self.frozen.arrays)
        self.extras = Extras(buffers, SideOutputs(model, mesh, layout))
        self.unsharder = Unsharder(
            [*self.store.storages, *self.frozen.storages],
            {layer: {**names, **assignment.frozen_uses.get(layer, {})} for layer, names in assignment.uses.items()},
            {layer: buffers.of_layer(layer) for layer in assignment.uses},
        )
        passes = [assignment.chunks[number] for number in assignment.mine]
        self.reducer = Reducer(self.store.storages, assignment.uses, passes, trained)
        shards = [Shards(mesh, layout, name, takes_data=not n) for n, (name, _) in enumerate(model.layers)]
        own_storage = self.unsharder, self.reducer, self.extras

        def chunk_of(layers: range) -> Chunk:
            parts = segments(model, layers, Recompute(recompute))
            return Chunk(parts, model.layers, shards, *own_storage, self.store.places.stash, dtype)

        def passes_with(assigned_layers: Sequence[Assigned]) -> Passes:
            parted = PartedPasses(model, assigned_layers, assignment.chunks, mesh.axes.get(PIPE, 1), self.schedule)
            if uneven_axes(mesh.all_axes):
                neighbours: PipelineNeighbours = UnevenNeighbours(mesh, parted, backend, layout)
            else:
                neighbours = PipelineNeighbours(mesh.group(PIPE) if parted.stages > 1 else None, parted.places, backend)
            chunks = {number: chunk_of(parted.parts[number].layers) for number in parted.on_place(neighbours.stage)}
            if assigned_layers:
                neighbours = HelpedNeighbours(neighbours, parted, mesh, *own_storage, backend)
            return Passes(chunks, neighbours, parted)

        #: those of the mesh alone, where helper ranks have a part in ``passes``
        self.own_passes = passes_with(())
        self.passes = passes_with(parse_assign(assign)) if assign else self.own_passes
        #: this rank's positions, by length: inside layers, and between
        self.positions = lru_cache(maxsize=8)(partial(_positions, layout, mesh, backend))


def assigned(
    model: Model,
    position: MeshPosition,
    layout: Layout,
    itemsize: int,
    *,
    storage: ZeroConfig,
    schedule: Schedule | str | None,
    stages: Division,
    recompute: Recompute | str,
) -> tuple[Schedule, Assignment]:
    """The schedule of a model on a mesh, which need not exist, and the share of the rank at this ``position``.

    Raises NotationError for a layout under which a layer cannot work, UsageError if the model has too few layers for
    the schedule, or none to recompute.
    """
    for name, layer in model.layers:
        _check_layout(name, layer, layout)
    check_recompute(model, Recompute(recompute))
    stages = parse_division(stages) if isinstance(stages, str) else stages
    count, stage = position.axes.get(PIPE, 1), position.coordinates.get(PIPE, 0)
    schedule = chosen(schedule, count)
    assignment = assign(
        model, position, layout, itemsize, storage=storage, stages=stages, chunks_per_stage=schedule.chunks
    )
    schedule.program(count, 1, stage=stage)  # raises if the schedule has no such stages
    return schedule, assignment


def _check_layout(name: str, layer: Layer, layout: Layout) -> None:
    stream = dict.fromkeys("bs")
    for activation in (layer.inputs, layer.outputs):
        if activation.where == "residual":
            stream |= dict.fromkeys(letter for letter in activation.dims.split() if letter not in activation.whole)
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


@dataclass(frozen=True)
class Copies:
    """What a rank has of the arrays of its next placement, in addition to those of the present one."""

    placements: Placements  #: on all ranks: of state (True), and of parameters and buffers (False)
    blocks: Mapping[str | None, Blocks]  #: the optimizer's state, by kind; None: parameters and buffers


class StateReshard:
    """The move of an engine and its optimizer to another mesh: made before the new placement, finished after it.

    Every element is sent once to each rank that needs it (see ``plan_transfer``), in pieces, so that a rank holds at
    most two of them in addition to its old and new blocks. ``finish`` is collective over ``group``, by default the
    ranks of the old mesh; a rank of it whose engine is not placed holds nothing yet. With ``copies``, which have all
    that ranks lack, nothing is sent.
    """

    def __init__(
        self,
        engine: LayeredEngine,
        optimizer: Optimizer | None = None,
        group: Group | None = None,
        copies: Copies | None = None,
    ) -> None:
        self._engine, holds = engine, engine.is_placed
        self._copies = copies
        self.group = group if group is not None else engine.group()
        self._nodes = list(self.group.comm.hosts)
        #: empty unless they were exchanged before, among the same ranks
        self._old_placements = {}
        if holds and self.group.comm is engine.group().comm:
            self._old_placements = engine.store.placements
        self._old_parts = {} if self._old_placements else parts_of(engine if holds else None, "old ")
        self._arrays = {**engine.parameters, **engine.buffers} if holds else {}
        self._state, self._optimizer_state = {}, {}
        if optimizer is not None:
            if holds:
                optimizer.prepare(engine)
            self._optimizer_state = optimizer.state
            kinds = optimizer.state if holds else dict.fromkeys(optimizer.kinds, {})
            self._state = {kind: engine.named(arrays) if holds else {} for kind, arrays in kinds.items()}

    def finish(self, engine: LayeredEngine | None, fill: Callable[[], Any] | None = None) -> None:
        """Fill the new arrays of the engine, which is placed on another mesh of all ranks of the group, or of some of
        them, in any order; None on a rank outside the new mesh, which sends its blocks to the ranks that need them.

        Only by copies, or by ``fill`` instead of a transfer, a failure of one rank is UsageError on all.
        """
        order = self._find_old_ranks(engine.group() if engine else None)
        # By ranks of the old group, exchanged together: each waits for the slowest.
        exchanged = exchange_placements(self.group, {**self._old_parts, **parts_of(engine, "new ")})
        old, new = self._old_placements or placements_of(exchanged, "old "), placements_of(exchanged, "new ")
        if engine and order == list(range(self.group.size)):
            engine.store.placements |= new
        targets = {**engine.parameters, **engine.buffers} if engine else {}
        if fill is not None:
            self._optimizer_state |= {kind: {} for kind in self._state}
            on_all_ranks(self.group, fill if engine else lambda: None)
        elif self._copies is not None:
            on_all_ranks(self.group, lambda: self._fill(old, new, targets), catch=Exception)
        else:
            self._fill(old, new, targets)

    def _find_old_ranks(self, after: Group | None) -> list[int]:
        """The rank in the old group of each rank of the group ``after``, which is None on ranks that are not in it.

        Raises UsageError on all ranks unless ``after`` is one group, of ranks of the old one.
        """
        if after is not None and after.comm is self.group.comm:  # then it is so on all ranks
            return list(range(after.size))
        mine = np.array([[after.rank, after.size] if after else [-1, 0]])
        numbers = self.group.all_gather(mine, label="placement")
        members = np.flatnonzero(numbers[:, 0] >= 0)
        order = members[np.argsort(numbers[members, 0], kind="stable")]
        if numbers[order, 0].tolist() != list(range(numbers[:, 1].max())):
            raise UsageError(
                "reshard: all ranks must pass the same new mesh, of these ranks only, or None if they leave; here "
                f"{len(order)} of {len(numbers)} pass a mesh of {numbers[:, 1].max()} ranks, as its ranks "
                f"{numbers[order, 0].tolist()}"
            )
        return order.tolist()

    def _fill(self, old: Placements, new: Placements, targets: Arrays) -> None:
        """Transfer the model to ``targets``, and the optimizer state that this rank now owns to the optimizer."""
        model, states = [(None, self._arrays, targets)], []
        for kind, before in self._state.items():  # the transfer fills all of it
            state = {key: self._engine.new_state(x) for key, x in self._engine.owned.items()} if targets else {}
            self._optimizer_state[kind] = state
            states.append((kind, before, self._engine.named(state) if targets else {}))
        if all(placements[True] is placements[False] for placements in (old, new)):
            self._execute(False, old, new, model + states)
            return
        self._execute(False, old, new, model)
        if states:
            self._execute(True, old, new, states)

    def _execute(
        self,
        owned: bool,
        old: Placements,
        new: Placements,
        several: Sequence[tuple[str | None, Arrays, Arrays]],
    ) -> None:
        """Transfer several sets of arrays, each with the kind of its copies, its old and its new arrays."""
        rank, source, target = self.group.rank, old[owned], new[owned]

        def held(placement: Placement, arrays: Arrays) -> dict[str, list[Array]]:
            return {name: [arrays[name]] if entry.held[rank] else [] for name, entry in placement.items()}

        blocks = [(held(source, before), held(target, after)) for _, before, after in several]
        if self._copies:
            source = source.joined(self._copies.placements[owned])
            for (kind, _, _), (before, _) in zip(several, blocks, strict=True):
                for name, more in self._copies.blocks[kind].items():
                    before[name] = [*before.get(name, ()), *more]
        plan = plan_transfer(source, target, nodes=self._nodes, piece_bytes=PIECE // len(several))
        if self._copies and any(plan.rounds.values()):
            raise UsageError(f"the copies lack elements of {', '.join(target)[:200]}")
        plan.execute_all(self.group, blocks, label="reshard")
