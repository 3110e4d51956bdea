"""Frozen weights in parts: each rank stores an interval of them, and has them whole only while a layer uses them."""

from __future__ import annotations

import numpy as np

from spmd_engine.arrays.backend import Array, Backend
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.assignment import Assignment
from spmd_engine.engine.parameter_store import Index
from spmd_engine.engine.storage import GroupStorage
from spmd_engine.models.model import Model
from spmd_engine.sharding.layout import Layout


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
