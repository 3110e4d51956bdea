"""StoredEngine: an engine whose parameters lie in a ParameterStore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.zero.parameter_store import Index, ParameterStore
from spmd_engine.engine.zero.storage import GroupStorage
from spmd_engine.errors import UsageError
from spmd_engine.sharding.notation import Spec
from spmd_engine.sharding.placement import Placement, describe_held, placement_of_all

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
        return self.store.shardings

    def sharding(self, name: str) -> Spec:
        return self.store.sharding(name)

    def global_shape(self, name: str) -> tuple[int, ...]:
        return self.store.described[name][1]

    def index(self, name: str) -> Index | None:
        return self.store.index(name)

    def owned_index(self, name: str) -> Index | None:
        return self.store.index(name, owned=True)

    def placement(self, owned: bool = False) -> Placement:
        """As ``ShardedEngine`` says; of a store, which does not change, ranks tell each other all, once."""
        if not self.store.placements:
            self.store.placements |= placements_said(gather_json(self.group(), said_of(self), "placement"))
        return self.store.placements[owned]

    @property
    def owned(self) -> Mapping[str, Array]:
        return self.store.owned

    def decays(self, key: str) -> bool:
        return self.store.decays(key)

    def named(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return self.store.named(arrays)

    def after_update(self) -> None:
        self.store.refresh()

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


def said_of(engine: StoredEngine | None) -> dict[str, Any]:
    """What a rank tells others, in JSON, of which part of every array it has; None has none."""
    stored = engine._held_here(False) if engine else {}
    owned = stored
    if engine and (engine.buffer_names or not engine.store.owns_what_it_stores):
        owned = engine._held_here(True)
    return {"stored": describe_held(stored), "owned": describe_held(owned) if owned != stored else None}


def placements_said(everyone: Sequence[Mapping[str, Any]]) -> Placements:
    """By what all have told. Where all own just what they store, the two are one object."""
    of_stored = placement_of_all([said["stored"] for said in everyone])
    if all(said["owned"] is None for said in everyone):
        return {False: of_stored, True: of_stored}
    of_owned = placement_of_all([said["stored"] if said["owned"] is None else said["owned"] for said in everyone])
    return {False: of_stored, True: of_owned}


def check_shapes(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UsageError unless ``params``, of a checkpoint, have all of these arrays, in these shapes."""
    for name, shape in shapes.items():
        if name not in params:
            raise UsageError(f"the checkpoint has no {name!r}; it has: {', '.join(sorted(params))}")
        if tuple(params[name].shape) != shape:
            raise UsageError(f"{name}: the checkpoint has shape {tuple(params[name].shape)}, the model {shape}")
