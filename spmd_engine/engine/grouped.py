"""Holdings in parameter groups, some of them in parts: ZeRO's bookkeeping behind names and rectangles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.holdings import Holdings, Index
from spmd_engine.engine.plan import PIPE, Plan, Storage
from spmd_engine.engine.storage import GroupStorage
from spmd_engine.errors import UsageError
from spmd_engine.layers.declarations import Parameter
from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.notation import Spec


class GroupedHoldings(Holdings):
    """A model's parameters by name, stored in groups as a plan says."""

    layout: Layout

    def _store(
        self,
        described: Mapping[str, tuple[Parameter, tuple[int, ...]]],
        plan: Plan,
        mesh: Mesh,
        storage: Storage,
        dtype: np.dtype,
        backend: Backend,
    ) -> None:
        """Make the arrays, all zeros, of parameters ``described`` by name with their whole shapes."""
        self.plan, self._described = plan, described
        zero = storage.stage(mesh.axes)
        self._storages = [
            GroupStorage(group, mesh, zero, dtype, backend, storage.compress) for group in plan.groups
        ]
        #: blocks, and fully sharded some rows of them (none, perhaps)
        self.parameters = self._by_name(lambda each: each.group.views(each.stored_parameters, each.stored))
        self._stored_rows = self._by_name(lambda each: each.group.rows(each.stored))
        self._owned_rows = self._by_name(lambda each: each.group.rows(each.interval))
        self._gradients: dict[str, Array] = {}  # like ``owned``, in the same memory in every step
        self._owned: dict[str, Array] = {}
        for each in self._storages:
            self._owned |= each.group.segments(each.own_parameters, each.interval)
            self._gradients |= each.group.segments(each.own_gradients, each.interval)
        self._counted: list[Array] | None = None
        self._cut = {member.name: member.summed.cut for member in plan.members}

    @property
    def storages(self) -> list[GroupStorage]:
        """Where each parameter group lives on this rank."""
        return self._storages

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._described)

    @property
    def shardings(self) -> dict[str, str]:  # type: ignore[override]
        return {name: str(self.sharding(name)) for name in self._described}

    def sharding(self, name: str) -> Spec:
        """How a parameter is cut while layers use it; stored in parts, this rank has rows of that: ``index``."""
        if name not in self._described:
            raise UsageError(f"no parameter {name!r}; this engine has: {', '.join(self.names)}")
        return self.layout.spec(self._described[name][0].dims)

    def global_shape(self, name: str) -> tuple[int, ...]:
        return self._described[name][1]

    def _ask_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape) in self._described.items()}  # every rank knows them

    def index(self, name: str) -> Index | None:
        return self._rectangle(name, self._stored_rows.get(name))

    def owned_index(self, name: str) -> Index | None:
        return self._rectangle(name, self._owned_rows.get(name))

    def _rectangle(self, name: str, rows: slice | None) -> Index | None:
        """Rows of this rank's block, as part of the whole array."""
        if rows is None:
            return None
        block = self.sharding(name).block(self.global_shape(name), self.mesh)
        if not block:  # a number has no rows: it is here, or it is not
            return () if rows.stop > rows.start else None
        return (slice(block[0].start + rows.start, block[0].start + rows.stop), *block[1:])

    def _index_in(self, name: str, array: Any, owned: bool) -> Index:
        index = self.owned_index(name) if owned else self.index(name)
        if index is None:
            raise UsageError(f"rank {self.mesh.rank} holds no part of {name!r}: another stage does, or another owner")
        return index

    @property
    def owned(self) -> dict[str, Array]:
        return self._owned

    def decays(self, key: str) -> bool:
        return key.endswith("/decayed")

    def named(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return self._by_name(lambda storage: storage.group.join(arrays, storage.own_parameters, storage.interval))

    def after_update(self) -> None:
        """Tell the updated parts to those who hold copies of the whole."""
        for pending in [pending for storage in self._storages if (pending := storage.start_refresh())]:
            pending.wait()

    def _by_name(self, of_group: Callable[[GroupStorage], Mapping[str, Any]]) -> dict[str, Any]:
        """What groups have by name, in the model's order, which is the same on all ranks: collectives follow it."""
        found = {name: each for storage in self._storages for name, each in of_group(storage).items()}
        return {name: found[name] for name in self._described if name in found}

    def counts_here(self, name: str) -> bool:
        cut = {*self.sharding(name).axes, *self._cut[name], PIPE}
        first = self.mesh.coordinates.get(PIPE, 0) == self.plan.holders[name][0]
        return first and all(place == 0 for axis, place in self.mesh.coordinates.items() if axis not in cut)

    @cached_property
    def _counts_all(self) -> bool:
        # Processors of other kinds add up in another order, and replicas must be scaled by one number.
        if self.mesh.axes.get(PIPE, 1) > 1 or len(set(self.mesh.nodes)) > 1:
            return False
        cut = [axis for name in self._described for axis in (*self.sharding(name).axes, *self._cut[name])]
        return all(self.mesh.axes[axis] == 1 for axis in cut)

    def _counted_gradients(self) -> list[Array]:
        if self._counted is None:
            counts = (lambda name: True) if self._counts_all else self.counts_here
            runs = (each.group.runs(each.own_gradients, counts, each.interval) for each in self._storages)
            self._counted = [run for of_group in runs for run in of_group]
        return self._counted
