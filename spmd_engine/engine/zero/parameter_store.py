"""A model's parameters on one rank, in groups, some of them in parts: ZeRO behind names and rectangles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.shared_memory.arena import memory_here
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.state.assignment import PIPE, Assignment, Index, ZeroConfig
from spmd_engine.engine.zero.compression import compression
from spmd_engine.engine.zero.storage import GroupStorage
from spmd_engine.errors import UnknownParameter, UsageError
from spmd_engine.layers.declarations import Parameter
from spmd_engine.models.model import Model
from spmd_engine.sharding.groups import Member, ParameterGroup, Place, joined
from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.notation import Spec
from spmd_engine.sharding.placement import Placement, describe_held, placement_of_all
from spmd_engine.units import readable_bytes


class ParameterStore:
    """Parameters, gradients and what the optimizer updates, by name or by segment of a group; all zeros at first.

    ``described`` are all parameters of the model with their whole shapes, in the model's order, whether a part of
    them is here or not; ``assignment`` says which are, and in which groups. A *segment* is what lies together in a
    group's flat array and is, or is not, decayed: the optimizer works on whole segments.
    """

    def __init__(
        self,
        described: Mapping[str, tuple[Parameter, tuple[int, ...]]],
        assignment: Assignment,
        mesh: Mesh,
        layout: Layout,
        storage: ZeroConfig,
        dtype: np.dtype,
        backend: Backend,
    ) -> None:
        self.described, self.assignment, self._mesh, self._layout = described, assignment, mesh, layout
        zero = storage.stage(mesh.axes)
        self.feeds_back = compression(storage.compress).feeds_back  #: whether steps leave something for the next
        _check_room(assignment, mesh, zero, dtype, backend)
        self.storages = [
            GroupStorage(group, mesh, zero, dtype, backend, storage.compress) for group in assignment.groups
        ]
        #: this rank's blocks by name; fully sharded, some rows of them (none, perhaps)
        self.parameters: dict[str, Array] = self._by_name(
            lambda each: each.group.views(each.stored_parameters, each.stored)
        )
        self._stored_rows = self._by_name(lambda each: each.group.rows(each.stored))
        self._owned_rows = self._stored_rows
        if not self.owns_what_it_stores:
            self._owned_rows = self._by_name(lambda each: each.group.rows(each.interval))
        self.owned: dict[str, Array] = {}  #: what this rank updates, by segment
        self.gradients: dict[str, Array] = {}  #: like ``owned``, in the same memory in every step
        for each in self.storages:
            self.owned |= each.group.segments(each.own_parameters, each.interval)
            self.gradients |= each.group.segments(each.own_gradients, each.interval)
        self._members: dict[str, tuple[GroupStorage, Member]] = self._by_name(
            lambda each: {member.name: (each, member) for member in each.group.members}
        )
        self.placements: dict[bool, Placement] = {}  #: what ranks own (True) or store (False), once known
        self._cut = {member.name: member.summed.cut for member in assignment.members}
        self._places: dict[str, Place] = {}  # in segments, of those that were asked for
        self._blocks: dict[tuple[str, tuple[int, ...]], Index] = {}  # of what has these letters and this whole shape

    def sharding(self, name: str) -> Spec:
        """How a parameter is sharded while layers use it; stored in parts, this rank has rows of that: ``index``."""
        if name not in self.described:
            raise UnknownParameter(name, self.described)
        return self._layout.spec(self.described[name][0].dims)

    def index(self, name: str, owned: bool = False) -> Index | None:
        """Which part of a whole parameter is stored here, or is this rank's to update; None if nothing is."""
        rows = (self._owned_rows if owned else self._stored_rows).get(name)
        return None if rows is None else self._index_of_rows(name, rows)

    def _index_of_rows(self, name: str, rows: slice) -> Index | None:
        """Where in the whole parameter these rows of this rank's block lie."""
        block = self._block(name)
        if not block:  # a number has no rows: it is here, or it is not
            return () if rows.stop > rows.start else None
        return (slice(block[0].start + rows.start, block[0].start + rows.stop), *block[1:])

    def _block(self, name: str) -> Index:
        """Which part of a whole parameter layers use here; layers of a kind have the same."""
        parameter, shape = self.described[name]
        kind = parameter.dims, shape
        if kind not in self._blocks:
            self._blocks[kind] = self.sharding(name).block(shape, self._mesh)
        return self._blocks[kind]

    @property
    def owns_what_it_stores(self) -> bool:
        """Whether this rank updates all of each parameter that it stores."""
        return all(each.interval == each.stored for each in self.storages)

    def named(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Arrays by segment as arrays by name: views."""
        return _ByName(self._members, self._places, arrays)

    def fill(self, draw: Callable[[str, Array, Index | None], None]) -> None:
        """Fill all parameters here, by ``draw(name, array, where it lies in the whole)``. Collective.

        What several ranks of a node hold is drawn once.
        """

        def draw_part(group: ParameterGroup, interval: slice, flat: Array) -> None:
            rows = group.rows(interval)
            for name, part in group.views(flat, interval).items():
                if part.size:
                    draw(name, part, self._index_of_rows(name, rows[name]))

        for pending in [each.start_fill(partial(draw_part, each.group)) for each in self.storages]:
            if pending:
                pending.wait()

    def counts_here(self, name: str) -> bool:
        """Whether this rank is the one, of all that own the same part of a parameter, to count it in a sum."""
        if name not in self._cut or self._mesh.coordinates.get(PIPE, 0) != self.assignment.holders[name][0]:
            return False
        home = self.assignment.homes.get(name)  # along its axes, no other rank has it
        cut = {*self.sharding(name).axes, *self._cut[name], *(home.axes if home else ()), PIPE}
        return all(place == 0 for axis, place in self._mesh.coordinates.items() if axis not in cut)

    @cached_property
    def counts_all(self) -> bool:
        """Whether this rank has the whole gradient, and sums it up just as all others do."""
        # Processors of other kinds add up in another order, and replicas must be scaled by one number.
        if self._mesh.axes.get(PIPE, 1) > 1 or len(set(self._mesh.nodes)) > 1 or self.assignment.homes:
            return False
        cut = [axis for name in self.described for axis in (*self.sharding(name).axes, *self._cut[name])]
        return all(self._mesh.axes[axis] == 1 for axis in cut)

    @cached_property
    def counted_gradients(self) -> list[Array]:
        """Flat parts of ``gradients`` that this rank counts in their norm."""
        counts = (lambda name: True) if self.counts_all else self.counts_here
        runs = (each.group.runs(each.own_gradients, counts, each.interval) for each in self.storages)
        return [run for of_group in runs for run in of_group]

    def _by_name(self, of_group: Callable[[GroupStorage], Mapping[str, Any]]) -> dict[str, Any]:
        """What groups have by name, in the model's order, which is the same on all ranks: collectives follow it."""
        found = {name: each for storage in self.storages for name, each in of_group(storage).items()}
        return {name: found[name] for name in self.described if name in found}


def _check_room(assignment: Assignment, mesh: Mesh, zero: int, dtype: np.dtype, backend: Backend) -> None:
    """Raise UsageError if what this rank stores of the parameters is more than the memory of its node: a system that
    overcommits would end the process without a word."""
    if not isinstance(backend.empty(0, dtype), np.ndarray):  # on a device, or shapes alone
        return
    parts = [mesh.axis_size(group.summed.cut) if zero == 3 else 1 for group in assignment.groups]
    needed = sum(group.size // ranks for group, ranks in zip(assignment.groups, parts, strict=True)) * dtype.itemsize
    if needed > memory_here():
        raise UsageError(
            f"rank {mesh.rank}: its parameters alone are {readable_bytes(needed)}, and this node has "
            f"{readable_bytes(memory_here())} of memory; shard them over more ranks (--zero 3, or as 'plan' says), or "
            "choose a smaller model"
        )


class _ByName(Mapping[str, Array]):
    """Arrays by segment as arrays by name, each a view made when it is asked for: a checkpoint asks for one of many."""

    def __init__(
        self,
        members: Mapping[str, tuple[GroupStorage, Member]],
        places: dict[str, Place],
        arrays: Mapping[str, Array],
    ) -> None:
        """``places``: those of members in their segments that were asked for before."""
        self._members, self._places, self._arrays = members, places, dict(arrays)

    def __getitem__(self, name: str) -> Array:
        if name not in self._places:
            storage, member = self._members[name]
            self._places[name] = storage.group.place(member, storage.interval)
        return joined(self._places[name], self._arrays, self._members[name][0].own_parameters)

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


# --- Frozen weights in parts: each rank stores an interval of them, and has them whole only while a layer uses them


class FrozenStore:
    """The frozen buffers of this rank's layers that are stored in parts (ZeRO-3), at their initial values.

    ``arrays`` are the rows of each that are here, ``index`` says where in the whole buffer these lie.
    """

    def __init__(
        self, model: Model, assignment: Assignment, mesh: Mesh, layout: Layout, dtype: np.dtype, backend: Backend
    ) -> None:
        self.storages = [GroupStorage(group, mesh, 3, dtype, backend, trained=False) for group in assignment.frozen]
        self.arrays: dict[str, Array] = {}
        self.index: dict[str, Index] = {}
        described = dict(model.buffers())
        for storage in self.storages:
            rows = storage.group.rows(storage.interval)
            for name, array in storage.group.views(storage.own_parameters, storage.interval).items():
                buffer, whole = described[name]
                first, *others = layout.spec(buffer.dims).block(whole, mesh)
                here = slice(first.start + rows[name].start, first.start + rows[name].stop)
                array[...] = buffer.initial
                self.arrays[name], self.index[name] = array, (here, *others)


# --- StoredEngine: an engine whose parameters lie in a ParameterStore


Placements = dict[bool, Placement]  # by whether of what ranks own, or of what they store


class StoredEngine(ShardedEngine):
    """What ``ShardedEngine`` says of arrays by name, answered by the engine's ``store``."""

    store: ParameterStore

    _is_checked = True  # by what made the store

    @property
    def parameters(self) -> Mapping[str, Array]:  # type: ignore[override]
        return self.store.parameters

    @property
    def storages(self) -> Sequence[GroupStorage]:
        """Where each parameter group lives on this rank."""
        return self.store.storages

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.store.described)

    @property
    def shardings(self) -> Mapping[str, str]:  # type: ignore[override]
        return {name: str(self.sharding(name)) for name in self.names}

    def sharding(self, name: str) -> Spec:
        return self.store.sharding(name)

    def global_shape(self, name: str) -> tuple[int, ...]:
        return self.store.described[name][1]

    def index(self, name: str) -> Index | None:
        return self.store.index(name)

    def owned_index(self, name: str) -> Index | None:
        return self.store.index(name, owned=True)

    def placement(self, owned: bool = False) -> Placement:
        """As ``ShardedEngine.placement``, but exchanged once: a store does not change."""
        if not self.store.placements:
            self.store.placements |= read_placements(gather_json(self.group(), describe_parts(self), "placement"))
        return self.store.placements[owned]

    @property
    def owned(self) -> Mapping[str, Array]:
        return self.store.owned

    def decays(self, key: str) -> bool:
        return key.endswith("/decayed")  # the name of a segment

    def named(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return self.store.named(arrays)

    def after_update(self) -> None:
        """Send the updated parts to the ranks that hold copies of the whole. Collective."""
        for pending in [storage.start_refresh() for storage in self.storages]:
            if pending:
                pending.wait()

    def update_skipped(self) -> None:
        for storage in self.storages:
            storage.compression.forget()

    @property
    def residues(self) -> Mapping[str, Array] | None:  # type: ignore[override]
        if not self.store.feeds_back:
            return None
        return {
            f"{each.group.members[0].name}/{kind}": array
            for each in self.storages
            for kind, array in each.compression.residues.items()
        }

    def take_residues(self, residues: Mapping[str, Array]) -> bool:
        fit = True
        for each in self.storages:
            begins = f"{each.group.members[0].name}/"
            own = {key.removeprefix(begins): array for key, array in residues.items() if key.startswith(begins)}
            fit &= each.compression.take({kind: self.backend.asarray(array) for kind, array in own.items()})
        agreed = bool(self.group().all_reduce(np.array(fit, np.int64), "min", label="residues"))
        if not agreed:  # what ranks have in common must stay so
            self.update_skipped()
        return agreed

    def counts_here(self, name: str) -> bool:
        return self.store.counts_here(name)

    @property
    def _counts_all(self) -> bool:
        return self.store.counts_all

    def _counted_gradients(self) -> Sequence[Array]:
        return self.store.counted_gradients

    def _index_in(self, name: str, array: Any, owned: bool) -> Index:
        index = self.store.index(name, owned)
        if index is None:
            raise UsageError(f"rank {self.mesh.rank} holds no part of {name!r}: other ranks do")
        return index

    def _ask_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape) in self.store.described.items()}  # every rank knows them


def describe_parts(engine: StoredEngine | None) -> dict[str, Any]:
    """The parts of all arrays that a rank stores and owns, as JSON; None has none."""
    stored = engine._held_here(False) if engine else {}
    owned = stored
    if engine and (engine.buffer_names or not engine.store.owns_what_it_stores):
        owned = engine._held_here(True)
    return {"stored": describe_held(stored), "owned": describe_held(owned) if owned != stored else None}


def read_placements(ranks: Sequence[Mapping[str, Any]]) -> Placements:
    """Placements from ``describe_parts`` of all ranks. Where all own just what they store, the two are one object."""
    of_stored = placement_of_all([said["stored"] for said in ranks])
    if all(said["owned"] is None for said in ranks):
        return {False: of_stored, True: of_stored}
    of_owned = placement_of_all([said["stored"] if said["owned"] is None else said["owned"] for said in ranks])
    return {False: of_stored, True: of_owned}


def check_shapes(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UsageError unless ``params``, of a checkpoint, have all of these arrays, in these shapes."""
    for name, shape in shapes.items():
        if name not in params:
            raise UsageError(f"the checkpoint has no {name!r}; it has: {', '.join(sorted(params))}")
        if tuple(params[name].shape) != shape:
            raise UsageError(f"{name}: the checkpoint has shape {tuple(params[name].shape)}, the model {shape}")
