"""The shape of a running job, and its changes: another composition, on all or some of the ranks of the world.

The engine's arrays, the optimizer's state if there is one, and what else moves with the engine go from one mesh to
another, in memory: between two steps of a training, or between two calls of a model that serves. Ranks outside the mesh
hold none of them; they compute the layers that the composition assigns to them, or are *idle*, and do what rank 0
orders until they are taken back or the job ends: see ``OtherRanks``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, Self

import numpy as np

from spmd_engine.arrays.memory import return_freed_memory
from spmd_engine.axes import MeshPosition, all_positions, axes_as_json, axes_text, count_ranks
from spmd_engine.comm import Communicator, Group
from spmd_engine.comm.agreement.rank_zero import on_all_ranks
from spmd_engine.comm.connections import connections_of
from spmd_engine.comm.mesh import Mesh, mesh_on, ranks_by_position
from spmd_engine.comm.shared_memory.arena import memory_here
from spmd_engine.comm.world import Port, merged, part
from spmd_engine.configuration import Configuration, setting
from spmd_engine.engine.batch import check_batch
from spmd_engine.engine.build import composed_layout
from spmd_engine.engine.helpers import AssignedLayers, passes_of
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.engine.state.assignment import PIPE, Assignment, overlaps, shares_text
from spmd_engine.engine.state.engine_state import Copies, EngineState, assigned
from spmd_engine.engine.state.moving_state import MovingState
from spmd_engine.engine.zero.compression import compression
from spmd_engine.errors import UsageError, counted, one_of
from spmd_engine.foreign import reading
from spmd_engine.models import Model
from spmd_engine.sharding import Layout
from spmd_engine.units import readable_bytes

#: How the arrays move: between two steps, in memory or by a checkpoint, or while steps go on (see ``migration``).
PROTOCOLS = ("stop-and-copy", "checkpoint-based", "live")


@dataclass(frozen=True)
class Shape:
    """How a job is spread over the world: a composition, and the ranks on its mesh, in ascending order."""

    composition: ParallelConfig
    ranks: tuple[int, ...]
    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  #: layer -> each expert's part: see ``Layout``

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.composition.mesh or {"data": len(self.ranks)})

    def changed(self, request: ShapeRequest, model: Model) -> tuple[Shape, list[str]]:
        """This shape as the request changes it, and a notice for each other option that does not fit the new mesh and
        becomes its default. By default the ranks are the present ones if the size of the mesh stays, else the first of
        the world.

        Raises UsageError for an unknown option, an invalid value, and options that contradict each other.
        """
        options, ranks = request.composition, request.ranks
        composition = ParallelConfig.from_json(options, "the requested shape", base=self.composition)
        if "mesh" not in options and ranks is not None and len(ranks) != len(self.ranks):
            composition = composition.changed(mesh={"data": len(ranks)})
        axes = dict(composition.mesh or self.axes)
        composition, notices = composition.changed(mesh=axes).fitted(axes, model, options)
        if ranks is None:
            size = count_ranks(axes)
            ranks = self.ranks if len(self.ranks) == size else range(size)
        if "assign" not in options and (taken := set(composition.ranks_outside) & set(ranks)):
            on_mesh = ", ".join(f"rank {rank}" for rank in sorted(taken))
            notices = [*notices, f"continues without --assign {composition.assign} ({on_mesh} is on the mesh)"]
            composition = composition.changed(assign=None)
        experts = self.experts if (axes, composition.expert_axes) == (self.axes, self.composition.expert_axes) else {}
        if request.experts is not None:
            experts = {layer: tuple(parts) for layer, parts in request.experts.items()}
        return Shape(composition, tuple(sorted(ranks)), experts), notices

    @property
    def request(self) -> ShapeRequest:
        """The request for exactly this shape."""
        return ShapeRequest(self.composition.as_json(), self.ranks, experts=self.experts or None)

    def __str__(self) -> str:
        usual = ParallelConfig().as_json()
        options = {name: value for name, value in self.composition.as_json().items() if value != usual[name]}
        options["mesh"] = axes_text(self.axes)
        if self.experts:
            options["experts"] = shares_text(self.experts)
        text = " ".join(f"{name} {value}" for name, value in options.items())
        listed = ",".join(map(str, self.ranks))
        return text if self.ranks == tuple(range(len(self.ranks))) else f"{text} on ranks {listed}"


@dataclass(frozen=True)
class ShapeRequest(Configuration):
    """The request that a running job changes its shape."""

    FILE: ClassVar = "reshape.json"  #: in the folder of a run, which removes it when it answers

    composition: Mapping[str, Any]  #: options by name; the others stay, or become their defaults if they do not fit
    ranks: Sequence[int] | None = None  #: ranks of the world on the new mesh; None: see ``Shape.changed``
    at: int = 0  #: the number of steps after which the change is due
    model: str | None = None  #: the model that the composition was made for; None: any
    id: str = ""  #: repeated in the answer
    protocol: str = setting("stop-and-copy", choices=PROTOCOLS)
    within: float | None = setting(None, least=0)  #: seconds after which an incomplete live migration is given up
    #: layer -> each expert's part; None: as it is if the axes stay, else even
    experts: Mapping[str, Sequence[int]] | None = None
    dry_run: bool = False  #: only estimate, by each protocol, what the change would move, and its time

    @classmethod
    def from_json(cls, content: Any, where: str = "", base: Self | None = None) -> Self:
        """The request that ``as_json`` describes; raises UsageError for anything else."""
        request = super().from_json(content, where, base)
        experts = {} if request.experts is None else request.experts
        fits = {
            "composition": isinstance(request.composition, Mapping),
            "ranks": request.ranks is None or _are_numbers(request.ranks),
            "experts": isinstance(experts, Mapping) and all(map(_are_numbers, experts.values())),
        }
        for name in (name for name, holds in fits.items() if not holds):
            raise UsageError(f"{where}: {name} is {getattr(request, name)!r}")
        return request

    def as_json(self) -> dict[str, Any]:
        """The input of ``from_json``."""
        composition = dict(self.composition)
        if isinstance(mesh := composition.get("mesh"), Mapping):  # it may also be text
            composition["mesh"] = axes_as_json(mesh)
        return {**super().as_json(), "composition": composition}

    @property
    def shape(self) -> Shape:
        """The shape of a request that has all options and the ranks."""
        experts = {layer: tuple(parts) for layer, parts in (self.experts or {}).items()}
        return Shape(ParallelConfig.from_json(self.composition, "the shape"), tuple(self.ranks or ()), experts)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(number) is int for number in value)


class Reshaper:
    """Changes the shape of an engine, on the ranks of the world that ``engine.mesh`` covers.

    With the engine move its ``optimizer``, unless it is not trained, and its ``states``, such as a cache of sequences.
    ``build`` returns the model with the layers of a composition. ``before``: on a rank that has joined, the world in
    which it was started. A new mesh has the options of the present one.
    """

    def __init__(
        self,
        engine: LayeredEngine,
        optimizer: Optimizer | None,
        shape: Shape,
        build: Callable[[ParallelConfig], Model],
        *,
        states: Sequence[MovingState] = (),
        before: Communicator | None = None,
    ) -> None:
        self.engine, self.optimizer, self.shape, self.states = engine, optimizer, shape, states
        self._build, self._ledger, self._options = build, engine.mesh.ledger, engine.mesh.options
        self.others, self.world = engine.mesh.others, engine.mesh.others.world
        #: from the first to the present, if ranks have joined
        self._worlds = [*([before] if before else []), self.world]
        self.all_ranks = Group(self.world, "world", self._ledger, **self._options)  #: also those outside the mesh

    @property
    def placed(self) -> LayeredEngine | None:
        """The engine, if this rank is on its mesh."""
        return self.engine if self.world.rank in self.shape.ranks else None

    def checked(
        self, request: ShapeRequest, batch_size: int | None = None, micro_batches: int = 1
    ) -> tuple[Shape, list[str]]:
        """The shape that is requested, and notices: see ``Shape.changed``. ``batch_size``: of a training. Collective
        over the world.

        Raises UsageError, the same on all ranks, if the job cannot go on in that shape. Until the ranks agree here,
        any error is such a refusal: what is requested may be anything, and nothing has moved.
        """

        def evaluate() -> tuple[Shape, list[str], int]:  # calls no collective
            with reading("the requested shape cannot be taken"):
                shape, notices = self.shape.changed(request, self.engine.model)
                return shape, notices, self._check(shape, batch_size, micro_batches)

        shape, notices, needed = on_all_ranks(self.all_ranks, evaluate)
        self._check_memory(needed)
        return shape, notices

    def _check(self, shape: Shape, batch_size: int | None, micro_batches: int) -> int:
        """The bytes that this rank needs to change to the shape. Raises UsageError if the job cannot go on in it."""
        world, axes, composition = range(self.world.size), shape.axes, shape.composition
        if not shape.ranks or shape.ranks[0] != 0 or len(set(shape.ranks)) < len(shape.ranks):
            raise UsageError(f"ranks {_listed(shape.ranks)}: name each once, and rank 0, which writes the run's files")
        if not set(shape.ranks) <= set(world) or count_ranks(axes) != len(shape.ranks):
            raise UsageError(
                f"mesh {axes_text(axes)} needs {counted(count_ranks(axes), 'rank')}; the job has {len(world)}"
                + (f", and {len(shape.ranks)} are named" if set(shape.ranks) <= set(world) else "")
            )
        if shape == self.shape:
            raise UsageError(f"the job has this shape: {shape}")
        for rank in composition.ranks_outside:
            if rank in shape.ranks or rank >= len(world):
                where = "on the mesh" if rank in shape.ranks else f"not in the job, of {len(world)} ranks"
                raise UsageError(f"--assign {composition.assign}: rank {rank} is {where}; name one outside the mesh")
        if composition.compress != self.shape.composition.compress:
            raise UsageError("compress changes the results of a run: it stays as it is")
        if compression(composition.compress).feeds_back:
            raise UsageError(
                f"compress {composition.compress} keeps what it omits on each rank, which has no place on another "
                "mesh: this run cannot change its shape"
            )
        model = self.model_in(composition)
        if _shapes(model) != _shapes(self.engine.model):
            raise UsageError(f"{model.name} has other parameters in this composition than the running model")
        position = all_positions(axes)[0]
        layout = self.layout_in(shape, model, position)
        counts = {name: layer.sizes["e"] for name, layer in model.layers if "e" in layer.sizes}
        for layer in shape.experts:
            if layer not in counts:
                raise UsageError(f"experts of {layer!r}: no layer has experts under this name; {one_of(layer, counts)}")
            layout.parts(layer, "e", counts[layer], position)  # raises MeshError for other experts or parts
        self._assigned(shape, model, position)
        passes_of(model, composition, axes).program(micro_batches, 0)
        if batch_size is not None:
            check_batch(batch_size, micro_batches, layout.spec(model.inputs), position)
        needed = 0
        if self.placed is not None:
            needed += self._bytes(self.shape, self.engine.assignment)
        if (mine := self.position_in(shape)) is not None:
            needed += self._bytes(shape, self._assigned(shape, model, mine)[1])
        return needed

    def _check_memory(self, needed: int) -> None:
        """Raise UsageError if the old and the new arrays of a node's ranks exceed its memory. Collective."""
        by_rank = self.all_ranks.all_gather(np.array([needed]), label="reshape")
        on_node = int(sum(by_rank[[host == self.world.node for host in self.world.hosts]]))

        def check() -> None:
            if on_node > (memory := memory_here()):
                raise UsageError(
                    "parameters, gradients and optimizer state in the old and the new shape are "
                    f"{readable_bytes(on_node)} on node {self.world.node}, which has {readable_bytes(memory)} of memory"
                )

        on_all_ranks(self.all_ranks, check)

    def _bytes(self, shape: Shape, assignment: Assignment) -> int:
        """Bytes in memory of a rank's parameters, gradients and optimizer state."""
        storage, total, trained = shape.composition.storage, 0, self.optimizer is not None
        kinds = len(self.optimizer.kinds) if self.optimizer else 0
        for group in assignment.groups:
            part = -(-group.size // prod(shape.axes[axis] for axis in group.summed.sharded))
            table = storage.table(shape.axes, group.summed.sharded, self.engine.dtype, trained=trained)
            total += sum(table.bytes_by_class(group.size, part, kinds).values())
        return total

    def position_in(self, shape: Shape) -> MeshPosition | None:
        """Where this rank is on the mesh of a shape; None if it is not on it."""
        if self.world.rank not in shape.ranks:
            return None
        order = ranks_by_position([self.world.hosts[rank] for rank in shape.ranks], shape.composition.order)
        return all_positions(shape.axes)[order.index(shape.ranks.index(self.world.rank))]

    def _assigned(self, shape: Shape, model: Model, position: MeshPosition) -> Any:
        how = shape.composition.changed(assign=None).how_on(shape.axes)
        return assigned(model, position, self.layout_in(shape, model, position), self.engine.dtype.itemsize, **how)

    def layout_in(self, shape: Shape, model: Model, place: MeshPosition) -> Layout:
        """The layout of the model in a shape."""
        return replace(composed_layout(model, place, shape.composition), experts=dict(shape.experts))

    def model_in(self, composition: ParallelConfig) -> Model:
        """The model for a composition: the present one if its layers do not differ."""
        present = self.shape.composition
        layers = [(one.context_method, one.reshard_after) for one in (composition, present)]
        return self.engine.model if layers[0] == layers[1] else self._build(composition)

    def at_once(self, shape: Shape) -> Shape:
        """The shape to take first on the way to this one: with the layers that stages hold now, if boundaries move only
        within these, which moves no parameters or state; else this shape."""
        moved, before, same = shape.composition, self.shape.composition, {"stages": None, "overlap_layers": None}
        rest, earlier = (replace(one, composition=one.composition.changed(**same)) for one in (shape, self.shape))
        if rest != earlier or not (moved.storage.overlap and before.storage.overlap and PIPE in shape.axes):
            return shape
        held, wanted = (
            overlaps(one.chunks_on(shape.axes, self.engine.model), one.storage.overlap) for one in (before, moved)
        )
        if held != wanted:
            with suppress(UsageError):  # the new boundaries are outside
                composition = moved.changed(overlap_layers=",".join(f"{first}:{end}" for first, end in held))
                composition.check(shape.axes, self.engine.model)
                return replace(shape, composition=composition)
        return shape

    def check_live(self, shape: Shape) -> None:
        """Raise UsageError if the arrays cannot move to the shape while steps go on."""
        if any(one.composition.storage.places.kinds for one in (shape, self.shape)):
            raise UsageError("a live migration cannot move what is offloaded: use --protocol stop-and-copy")

    def move(self, shape: Shape, copies: Copies | None = None, fill: Callable[[], Any] | None = None) -> None:
        """Continue in another shape. Collective over the world.

        ``copies`` and ``fill`` are those of ``LayeredEngine.reshard``. The old mesh is closed. Raises UsageError on all
        ranks if the model cannot be placed; nothing has moved then.
        """
        engine, old, model = self.engine, self.engine.mesh, self.model_in(shape.composition)
        mesh = on_all_ranks(self.all_ranks, lambda: self._open_mesh(shape))
        layout = self.layout_in(shape, model, mesh) if mesh else None
        moves = {"optimizer": self.optimizer, "states": self.states, "copies": copies, "fill": fill}
        how: dict[str, Any] = {"model": model, "among": self.all_ranks, **moves, **shape.composition.how_on(shape.axes)}
        try:
            engine.reshard(mesh, layout, **how)
        except UsageError:
            if mesh is not None:
                mesh.close()
            raise
        old.close()
        self.shape = shape
        if self.world.rank in shape.composition.ranks_outside:
            how = {"dtype": engine.dtype, "backend": engine.backend}
            engine.assigned = AssignedLayers(model, shape.composition, shape.ranks, old, **how)
        del old  # with what its groups keep
        gc.collect()
        return_freed_memory()  # that of the old shape
        for world in self._worlds:
            if (neighbours := connections_of(world).neighbours) is not None:
                neighbours.own.return_freed()

    def _open_mesh(self, shape: Shape) -> Mesh | None:
        """The mesh of a shape; None on ranks outside it."""
        options = {**self._options, "order": shape.composition.order}
        return mesh_on(shape.ranks, shape.axes, self.others, ledger=self._ledger, **options)

    def rehearse(self, shape: Shape) -> None:
        """Do what ``move`` does, but move nothing: open the mesh, make the arrays, and drop both. Collective over the
        world. Raises UsageError on all ranks if the model cannot be placed."""
        engine, model = self.engine, self.model_in(shape.composition)
        mesh = on_all_ranks(self.all_ranks, lambda: self._open_mesh(shape))
        how = {"dtype": engine.dtype, "backend": engine.backend, "trained": self.optimizer is not None}
        how |= shape.composition.how_on(shape.axes)

        def make() -> None:
            if mesh is not None and not shape.composition.storage.places.kinds:  # what is offloaded may be large files
                EngineState(model, mesh, self.layout_in(shape, model, mesh), **how)

        try:
            on_all_ranks(self.all_ranks, make, catch=Exception)
        finally:
            if mesh is not None:
                mesh.close()
        gc.collect()

    def rest(self) -> None:
        """From now on the ranks outside the mesh wait for orders, until ``others.wake``."""
        self.others.set([rank for rank in range(self.world.size) if rank not in self.shape.ranks])

    def grow(self, port: Port | None) -> None:
        """Merge the world, whose ranks are all awake, with that of ranks that join: see ``world.merged``. They have
        numbers after those of the others, and the mesh stays as it is. Collective over the world."""
        self.world = self.others.world = merged(self.world, port, joins=False)
        self._worlds.append(self.world)
        self.all_ranks = Group(self.world, "world", self._ledger, **self._options)

    def close(self, parts: bool) -> None:
        """Close the present mesh, and, if it ``parts``, which is collective over the world, the merged worlds."""
        self.engine.mesh.close()
        while parts and len(self._worlds) > 1:
            part(self._worlds.pop(), self._worlds[-1])


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in model.parameters()}


def _listed(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks)) or "none"
