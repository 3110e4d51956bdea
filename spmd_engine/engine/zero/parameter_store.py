"""A model's parameters on one rank, in groups that ZeRO may shard, by name and rectangle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.arrays.meta.array import has_shapes_only
from spmd_engine.comm import Mesh
from spmd_engine.comm.agreement.rank_zero import on_all_ranks
from spmd_engine.comm.notation import Spec
from spmd_engine.comm.shared_memory.arena import memory_here
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.offload.config import ArrayPlaces
from spmd_engine.engine.state.array_table import MEMORY, STATE, ArrayTable, array_table
from spmd_engine.engine.state.assignment import PIPE, Assignment, Index, ZeroConfig
from spmd_engine.engine.uneven_stages import sum_over_stages
from spmd_engine.engine.zero.compression import compression
from spmd_engine.engine.zero.storage import GroupStorage, wait_for_all
from spmd_engine.errors import UnknownParameter, UsageError, described, one_of
from spmd_engine.layers import Parameter
from spmd_engine.models import Model
from spmd_engine.sharding import Layout
from spmd_engine.sharding.groups import Member, ParameterGroup, Place, joined
from spmd_engine.sharding.placement import Held, Placement, exchange_placements
from spmd_engine.units import readable_bytes


class ParameterStore:
    """Parameters, gradients and what the optimizer updates, by name or by segment of a group; all zeros at first.
    Unless they are ``trained``, it updates none of them, and there are no gradients.

    ``described`` are all parameters of the model with their whole shapes, in the model's order; ``assignment`` has
    those of this rank, and their groups. A *segment* is a contiguous part of a group's flat array with or
    without weight decay: the optimizer updates whole segments.

    Raises UsageError for a share that this rank cannot store; on all ranks of the mesh with ``together``, by which they
    make their stores at the same time. Without it, nothing is sent.
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
        *,
        together: bool = False,
        trained: bool = True,
    ) -> None:
        self.described, self.assignment, self._mesh, self._layout = described, assignment, mesh, layout
        self.feeds_back = compression(storage.compress).feeds_back  #: whether steps leave residues for the next
        tables = [storage.table(mesh.axes, g.summed.sharded, dtype, trained=trained) for g in assignment.groups]

        def open_places() -> ArrayPlaces:
            _check_share(assignment, tables, mesh, storage, dtype, backend)
            return storage.places.open(backend)

        together = together and not has_shapes_only(backend)  # a dry run may be of one rank alone
        #: where this rank's arrays live that do not live in memory
        self.places = on_all_ranks(mesh.group(), open_places) if together else open_places()
        self.storages = [
            GroupStorage(
                group,
                mesh,
                table,
                backend,
                storage.compress,
                self.places.zeros,
                sum_over_stages(group, described, mesh, layout, storage, dtype),
            )
            for group, table in zip(assignment.groups, tables, strict=True)
        ]
        #: this rank's blocks by name; if fully sharded, some rows of them (perhaps none)
        self.parameters: dict[str, Array] = self._collect(lambda s: s.group.views(s.stored_parameters, s.stored))
        self._stored_rows = self._collect(lambda s: s.group.rows(s.stored))
        self._owned_rows = self._stored_rows
        if not self.owns_what_it_stores:
            self._owned_rows = self._collect(lambda s: s.group.rows(s.interval))
        self.owned: dict[str, Array] = {}  #: what this rank updates, by segment
        self.gradients: dict[str, Array] = {}  #: like ``owned``, in the same memory in every step
        for s in self.storages if trained else ():
            self.owned |= s.group.segments(s.own_parameters, s.interval)
            self.gradients |= s.group.segments(s.own_gradients, s.interval)
        self._members: dict[str, tuple[GroupStorage, Member]] = self._collect(
            lambda s: {member.name: (s, member) for member in s.group.members}
        )
        self.placements: dict[bool, Placement] = {}  #: what ranks own (True) or store (False), once known
        self._sharded_axes = {member.name: member.summed.sharded for member in assignment.members}
        self._places: dict[str, Place] = {}  # cache: the place of a member in segments
        self._blocks: dict[tuple[str, tuple[int, ...]], Index] = {}  # cache: by letters and whole shape

    def sharding(self, name: str) -> Spec:
        """The sharding of a parameter while layers use it; if fully sharded, this rank has rows of it: ``index``."""
        if name not in self.described:
            raise UnknownParameter(name, self.described)
        return self._layout.spec(self.described[name][0].dims)

    def index(self, name: str, owned: bool = False) -> Index | None:
        """The part of a whole parameter that this rank stores or, if ``owned``, updates; None if none."""
        rows = (self._owned_rows if owned else self._stored_rows).get(name)
        return None if rows is None else self._index_of_rows(name, rows)

    def _index_of_rows(self, name: str, rows: slice) -> Index | None:
        """The index in the whole parameter of these rows of this rank's block."""
        block = self._block(name)
        if not block:  # a scalar has no rows: this rank has it, or not
            return () if rows.stop > rows.start else None
        return (slice(block[0].start + rows.start, block[0].start + rows.stop), *block[1:])

    def _block(self, name: str) -> Index:
        """The part of a whole parameter that this rank's layers use; the same for layers of one kind."""
        parameter, shape = self.described[name]
        kind = parameter.dims, shape
        if kind not in self._blocks:
            self._blocks[kind] = self.sharding(name).block(shape, self._mesh)
        return self._blocks[kind]

    @property
    def owns_what_it_stores(self) -> bool:
        """Whether this rank updates all of each parameter that it stores."""
        return all(storage.interval == storage.stored for storage in self.storages)

    def named(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Arrays by segment as arrays by name: views."""
        return _NamedArrays(self._members, self._places, arrays)

    def fill(self, draw: Callable[[str, Array, Index | None], None]) -> None:
        """Fill this rank's parameters, by ``draw(name, array, index in the whole)``. Collective.

        Arrays that several ranks of a node hold are drawn once.
        """

        def draw_part(group: ParameterGroup, interval: slice, flat: Array) -> None:
            rows = group.rows(interval)
            for name, part in group.views(flat, interval).items():
                if part.size:
                    draw(name, part, self._index_of_rows(name, rows[name]))

        wait_for_all(storage.start_fill(partial(draw_part, storage.group)) for storage in self.storages)
        self.publish()

    def publish(self) -> None:
        """After a fill of ``parameters`` that are masters: give them to layers, on all ranks. Collective."""
        wait_for_all(storage.start_refresh() for storage in self.storages if storage.table.rounds)

    def counts_here(self, name: str) -> bool:
        """Whether a sum counts this rank's part of a parameter: on one of the ranks that own the same part."""
        if name not in self._sharded_axes or self._mesh.coordinates.get(PIPE, 0) != self.assignment.holders[name][0]:
            return False
        home = self.assignment.homes.get(name)  # along its axes, no other rank has it
        sharded_axes = {*self.sharding(name).axes, *self._sharded_axes[name], *(home.axes if home else ()), PIPE}
        return all(coordinate == 0 for axis, coordinate in self._mesh.coordinates.items() if axis not in sharded_axes)

    @cached_property
    def counts_all(self) -> bool:
        """Whether this rank has the whole gradient, and sums it like all others."""
        # Nodes may have different processors, which add in different orders; replicas must be scaled by one number.
        if self._mesh.axes.get(PIPE, 1) > 1 or len(set(self._mesh.nodes)) > 1 or self.assignment.homes:
            return False
        sharded = [axis for name in self.described for axis in (*self.sharding(name).axes, *self._sharded_axes[name])]
        return all(self._mesh.axes[axis] == 1 for axis in sharded)

    @cached_property
    def counted_gradients(self) -> list[Array]:
        """Flat parts of ``gradients`` that this rank counts in their norm."""
        counts = (lambda name: True) if self.counts_all else self.counts_here
        runs = (storage.group.runs(storage.own_gradients, counts, storage.interval) for storage in self.storages)
        return [run for group_runs in runs for run in group_runs]

    def _collect(self, items_of: Callable[[GroupStorage], Mapping[str, Any]]) -> dict[str, Any]:
        """The named items of all groups, in the model's order, equal on all ranks, which collectives require."""
        items = {name: item for storage in self.storages for name, item in items_of(storage).items()}
        return {name: items[name] for name in self.described if name in items}


def _check_share(
    assignment: Assignment,
    tables: Sequence[ArrayTable],
    mesh: Mesh,
    storage: ZeroConfig,
    dtype: np.dtype,
    backend: Backend,
) -> None:
    """Raise UsageError if this rank cannot store its share: other ranks' shares may differ.

    Parameters beyond the memory of the node are refused, since a system that overcommits would kill the process
    without an error message.
    """
    zero, groups = storage.stage(mesh.axes), assignment.groups
    in_parts = zero and any(group.summed.sharded for group in groups)
    if in_parts and not compression(storage.compress).in_parts:
        raise UsageError(f"compression {storage.compress!r} needs whole gradients on every rank, not parts (ZeRO)")
    if "parameters" in storage.places.kinds and in_parts and zero < 3:
        raise UsageError(f"--offload parameters with --zero {zero}: every rank holds them whole; choose --zero 3")
    if not isinstance(backend.empty(0, dtype), np.ndarray):  # on a device, or meta arrays
        return
    needed = 0
    for group, table in zip(groups, tables, strict=True):
        over = group.summed.sharded
        part = group.intervals(mesh.axis_size(over))[mesh.index(over)]
        needed += table.bytes_by_class(group.size, part.stop - part.start)["parameters"]
    if needed > memory_here():
        raise UsageError(
            f"its parameters alone are {readable_bytes(needed)}, and this node has "
            f"{readable_bytes(memory_here())} of memory; shard them over more ranks (--zero 3, or as 'plan' says), or "
            "choose a smaller model"
        )


class _NamedArrays(Mapping[str, Array]):
    """Arrays by segment as arrays by name: views made on access, since a checkpoint reads only one at a time."""

    def __init__(
        self,
        members: Mapping[str, tuple[GroupStorage, Member]],
        places: dict[str, Place],
        arrays: Mapping[str, Array],
    ) -> None:
        """``places`` caches the places of members in their segments."""
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


# --- Sharded frozen weights: each rank stores an interval of them, and gathers them only while a layer uses them


class FrozenStore:
    """The sharded frozen buffers of this rank's layers (ZeRO-3), at their initial values.

    ``arrays`` are this rank's rows of each, ``index`` their index in the whole buffer.
    """

    def __init__(
        self, model: Model, assignment: Assignment, mesh: Mesh, layout: Layout, dtype: np.dtype, backend: Backend
    ) -> None:
        self.storages = [
            GroupStorage(group, mesh, array_table(3, group.summed.sharded, dtype, trained=False), backend)
            for group in assignment.frozen
        ]
        self.arrays: dict[str, Array] = {}
        self.index: dict[str, Index] = {}
        described = dict(model.buffers())
        for storage in self.storages:
            rows = storage.group.rows(storage.interval)
            for name, array in storage.group.views(storage.own_parameters, storage.interval).items():
                buffer, shape = described[name]
                first, *others = layout.spec(buffer.dims).block(shape, mesh)
                row_slice = slice(first.start + rows[name].start, first.start + rows[name].stop)
                array[...] = buffer.initial
                self.arrays[name], self.index[name] = array, (row_slice, *others)


# --- StoredEngine: an engine whose parameters lie in a ParameterStore


Placements = dict[bool, Placement]  # what ranks own (True), and what they store (False)


class StoredEngine(ShardedEngine):
    """A ``ShardedEngine`` with its arrays in a ``ParameterStore``."""

    store: ParameterStore

    _is_checked = True  # by the code that makes the store

    @property
    def parameters(self) -> Mapping[str, Array]:  # type: ignore[override]
        return self.store.parameters

    @property
    def storages(self) -> Sequence[GroupStorage]:
        """The storage of each parameter group on this rank."""
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
            self.store.placements |= placements_of(exchange_placements(self.group(), parts_of(self)))
        return self.store.placements[owned]

    @property
    def owned(self) -> Mapping[str, Array]:
        return self.store.owned

    def new_state(self, like: Array) -> Array:
        row = self.storages[0].table[STATE]
        in_memory = backend_of(self.storages[0].own_gradients).xp  # in a dry run, not that of the engine's backend
        zeros = in_memory.zeros if row.place == MEMORY else self.store.places.zeros
        return zeros(like.shape, row.dtype)

    def decays(self, key: str) -> bool:
        return key.endswith("/decayed")  # the name of a segment

    def named(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return self.store.named(arrays)

    def after_update(self) -> None:
        """Send the updated parts to the ranks that hold replicas of the whole. Collective."""
        wait_for_all(storage.start_refresh() for storage in self.storages)

    def update_skipped(self) -> None:
        for storage in self.storages:
            storage.compression.forget()

    @property
    def residues(self) -> Mapping[str, Array] | None:  # type: ignore[override]
        if not self.store.feeds_back:
            return None
        return {
            f"{storage.group.members[0].name}/{kind}": array
            for storage in self.storages
            for kind, array in storage.compression.residues.items()
        }

    def take_residues(self, residues: Mapping[str, Array]) -> bool:
        fit = True
        for storage in self.storages:
            prefix = f"{storage.group.members[0].name}/"
            arrays = {key.removeprefix(prefix): array for key, array in residues.items() if key.startswith(prefix)}
            fit &= storage.compression.take({kind: self.backend.asarray(array) for kind, array in arrays.items()})
        agreed = bool(self.group().all_reduce(np.array(fit, np.int64), "min", label="residues"))
        if not agreed:  # replicas must stay equal
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


def parts_of(engine: StoredEngine | None, when: str = "") -> dict[str, Held]:
    """The parts of all arrays that a rank stores and owns, ``when`` it does, for ``exchange_placements``; no parts for
    None."""
    stored = engine._held_here(False) if engine else {}
    owned = stored
    if engine and (engine.buffer_names or not engine.store.owns_what_it_stores):
        owned = engine._held_here(True)
    return {f"{when}stored": stored, f"{when}owned": owned}


def placements_of(exchanged: Mapping[str, Placement], when: str = "") -> Placements:
    """The placements that ``exchange_placements`` returns for ``parts_of``. If all own just what they store, both are
    one object."""
    return {False: exchanged[f"{when}stored"], True: exchanged[f"{when}owned"]}


def check_shapes(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UsageError unless ``params``, of a checkpoint, have all of these arrays, in these shapes."""
    if not isinstance(params, Mapping):
        raise UsageError(f"load_checkpoint: params is {described(params)}; give a mapping from names to whole arrays")
    for name, shape in shapes.items():
        if name not in params:
            raise UsageError(f"the checkpoint has no {name!r}; {one_of(name, sorted(params))}")
        if tuple(params[name].shape) != shape:
            raise UsageError(f"{name}: the checkpoint has shape {tuple(params[name].shape)}, the model {shape}")
