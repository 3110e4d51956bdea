"""Parameters of models in groups, numbers with exact sums, and references to memory."""

import weakref

import numpy as np
import pytest

from spmd_engine.arrays.backend import CPU
from spmd_engine.engine.state.assignment import assign
from spmd_engine.engine.zero.storage import GroupStorage
from spmd_engine.models import gpt
from spmd_engine.sharding import Layout
from support import tiny

FLOAT = np.dtype(np.float64)
every_stage_of_zero = pytest.mark.parametrize("zero", [0, 1, 2, 3])


def integers(size, *seed):
    """Integers as floats: their sums are exact."""
    return np.random.default_rng(seed).integers(-99, 99, size).astype(float)


UNTIED, TIED = (gpt(tiny.GPTSize(**{**tiny.SIZE.__dict__, "tied": tied})) for tied in (False, True))
#: bytes: one group per parameter, one group per few layers, one group
thresholds = pytest.mark.parametrize("threshold", [0, 1500, 1 << 20], ids=["many groups", "some groups", "one group"])


class Parts:
    """Storages of a model on a mesh. The values of parameters depend only on their name and index."""

    def __init__(self, model, mesh, storage, *, kind=GroupStorage):
        self.model, self.layers = model, range(len(model.layers))
        self.assignment = assign(model, mesh, Layout.for_mesh(mesh), FLOAT.itemsize, storage=storage)
        self.storages = [
            kind(group, mesh, storage.table(mesh.axes, group.summed.sharded, FLOAT), CPU)
            for group in self.assignment.groups
        ]
        self.whole = {n: integers(shape, i) for i, (n, (_, shape)) in enumerate(model.parameters())}
        for each in self.storages:
            flat = np.zeros(each.group.size)
            for name, view in each.group.views(flat).items():
                view[...] = self.whole[name]
            each.own_parameters[...] = flat[each.interval]
            if each.whole_parameters is not None:
                each.whole_parameters[...] = flat
        self.of_name = {name: each for each in self.storages for name in each.group.spans}

    def used(self, *layers):
        """The groups that these layers use, in the order of use."""
        names = [full for layer in layers for full in self.assignment.uses[layer].values()]
        return list(dict.fromkeys(self.of_name[name] for name in names))

    def gathered(self):
        return {each for each in self.storages if each.whole_parameters is not None}


def memory_of(array):
    """A weak reference to the array that owns the memory of all views."""
    return weakref.ref(array.base if isinstance(array.base, np.ndarray) else array)


def pair_bytes(width):
    """Bytes of the parameters of one layer of a deep MLP."""
    return 2 * (width * width + width) * FLOAT.itemsize
