"""What a rank holds of a model's arrays: how they are cut, which part is here, and how the whole is put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.arrays.updates import sum_of_squares
from spmd_engine.comm.mesh import Collectives, Mesh
from spmd_engine.engine.assembly import assemble
from spmd_engine.errors import UsageError
from spmd_engine.sharding.asking import ask_placement, ask_shapes
from spmd_engine.sharding.notation import Spec
from spmd_engine.sharding.placement import Placement
from spmd_engine.sharding.rectangles import Rectangle

Index = tuple[slice, ...]  # a rectangle of a whole array


@dataclass(frozen=True)
class Shard:
    """A rank's part of an array: ``data`` is ``whole[index]``."""

    index: Index
    data: Array


class Holdings(Collectives):
    """Arrays by name, each cut over the mesh. See ``ShardedEngine`` for what a subclass may define."""

    parameters: Mapping[str, Array] = MappingProxyType({})
    shardings: Mapping[str, str] = MappingProxyType({})
    gradients: Mapping[str, Array] = MappingProxyType({})  #: of the last step, like ``owned``
    buffers: Mapping[str, Array] = MappingProxyType({})  #: this rank's blocks of state without a gradient
    backend: Backend = CPU
    mesh: Mesh
    _told_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # of whole arrays, while all are asked for

    @property
    def buffer_names(self) -> Sequence[str]:
        """All buffers of the model, in the same order on every rank, whether a part is here or not."""
        return tuple(self.buffers)

    def buffer_index(self, name: str) -> Index | None:
        """Which part of a whole buffer is stored here; None if nothing is. By default, all of it."""
        return tuple(slice(0, n) for n in self.buffers[name].shape) if name in self.buffers else None

    def gather_buffer(self, name: str, *, root: int | None = None) -> Array | None:
        """As ``gather``, of a buffer."""
        return assemble(self, name, self.buffers.get(name), False, root)

    @property
    def names(self) -> Sequence[str]:
        """All parameters of the model, in the same order on every rank, whether a part is here or not."""
        return tuple(self.parameters)

    @property
    def owned(self) -> Mapping[str, Array]:
        """What this rank's optimizer updates: by default every parameter stored here."""
        return self.parameters

    def named(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Arrays like ``owned`` (gradients, optimizer state) as arrays by parameter name."""
        return arrays

    def decays(self, key: str) -> bool:
        """Whether weight decay applies to this key of ``owned``: by default, to what has two dims or more."""
        return self.owned[key].ndim > 1

    def after_update(self) -> None:
        """Called when the optimizer has changed ``owned``."""

    def sharding(self, name: str) -> Spec:
        """How a parameter is cut."""
        if name in self.shardings:
            return Spec.parse(self.shardings[name])
        if name not in self.parameters:
            raise UsageError(f"no parameter {name!r}; this engine has: {', '.join(self.names)}")
        return Spec.parse(" ".join("ijklmnop"[: np.ndim(self.parameters[name])]))

    def owned_sharding(self, name: str) -> Spec:
        """How gradients and optimizer state of a parameter are cut: by default, as the parameter is."""
        return self.sharding(name)

    def index(self, name: str) -> Index | None:
        """Which part of a whole parameter is stored here; None if nothing is. Collective if sizes are not known."""
        return self.sharding(name).block(self.global_shape(name), self.mesh)

    def owned_index(self, name: str) -> Index | None:
        """Which part of a whole parameter this rank updates, and holds gradients and optimizer state of."""
        return self.owned_sharding(name).block(self.global_shape(name), self.mesh)

    def addressable_shard(self, name: str) -> Shard | None:
        """The part of a parameter that is stored here, and where it lies in the whole; None if nothing is.

        Raises UsageError if the model has no such parameter.
        """
        if name not in self.names:
            raise UsageError(f"no parameter {name!r}; this engine has: {', '.join(self.names)}")
        index = self.index(name)
        return None if index is None else Shard(index, self.parameters[name])

    def block(self, name: str, array: Any, owned: bool = False) -> Array:
        """This rank's (or only its owned) part of a whole array, which is read by slices alone.

        A contiguous copy, since it will be updated in place. An array whose slices are copies already says so by an
        attribute ``slices_are_copies``, as those of a ``Checkpoint`` do, and is not copied twice.
        """
        part = array[self._index_in(name, array, owned)]
        return _own(part, self.backend, fresh=getattr(array, "slices_are_copies", False))

    def _index_in(self, name: str, array: Any, owned: bool) -> Any:
        """Where this rank's part lies in a whole array."""
        if name not in self.shardings and not owned:
            return tuple(slice(0, length) for length in array.shape)
        # By the array's own shape: while loading, the engine may not know its parameters' yet.
        spec = self.owned_sharding(name) if owned else self.sharding(name)
        return spec.block(tuple(array.shape), self.mesh)

    def global_shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a parameter. Collective over the axes that cut it."""
        if name not in self.parameters:
            raise UsageError(f"no parameter {name!r}; this engine has: {', '.join(self.names)}")
        if name in self._told_shapes:
            return self._told_shapes[name]
        shape = list(self.parameters[name].shape)
        for dim, (_, axes) in enumerate(self.sharding(name)):
            for axis in reversed(axes):
                shape[dim] = int(self.all_reduce(np.array(shape[dim]), over=axis, label="shape"))
        return tuple(shape)

    def placement(self, owned: bool = False) -> Placement:
        """Which part of every array each rank stores, or (``owned``) of every parameter updates.

        Ranks are those of ``group()``.
        Collective over the world: two all_gathers for all arrays together, whatever their number.
        """
        self._told_shapes = self._ask_shapes()
        try:
            indices = {name: (self.owned_index if owned else self.index)(name) for name in self.names}
        finally:
            del self._told_shapes
        indices |= {name: self.buffer_index(name) for name in self.buffer_names if not owned}
        here = {name: Rectangle.of(index) for name, index in indices.items() if index is not None}
        arrays = {**self.parameters, **self.buffers}
        return ask_placement(self.group(), {name: (arrays[name].dtype, part) for name, part in here.items()})

    def _ask_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shapes of parameters, from everyone's blocks. Collective over the world."""
        blocks = {name: (self.sharding(name), np.shape(block)) for name, block in self.parameters.items()}
        return ask_shapes(self.group(), self.mesh, blocks)

    def gather(self, name: str, *, root: int | None = None) -> Array | None:
        """The whole parameter, on every rank or only on ``root``. Collective over the world.

        A rank that ends instead, or gathers something else, turns it into a MismatchError on all, never a hang.
        """
        return assemble(self, name, self.parameters.get(name), False, root)

    def gather_owned(self, name: str, arrays: Mapping[str, Array], *, root: int | None = None) -> Array | None:
        """As ``gather``, of arrays like ``owned`` (``gradients``, a kind of optimizer state)."""
        return assemble(self, name, self.named(arrays).get(name), True, root)

    def counts_here(self, name: str) -> bool:
        """Whether this rank is the one, among those that own the same part of a parameter, to count it in a sum."""
        cut = self.owned_sharding(name).axes
        return all(place == 0 for axis, place in self.mesh.coordinates.items() if axis not in cut)

    def gradient_norm(self) -> float:
        """The 2-norm of the whole gradient, each element counted once. Collective over the world."""
        total = sum(sum_of_squares(g) for g in self._counted_gradients())
        if not self._counts_all:
            total = float(self.all_reduce(np.array(total, np.float64), label="gradient norm"))
        return total**0.5

    @property
    def _counts_all(self) -> bool:
        """Whether every rank counts the whole gradient, and so needs no other's part."""
        return False

    def _counted_gradients(self) -> Iterable[Array]:
        """Flat gradients that this rank, of all that have them, counts."""
        named = self.named(self.gradients).items()
        return (backend_of(g).xp.ravel(g) for name, g in named if self.counts_here(name))


def _own(part: Any, backend: Backend, fresh: bool) -> Array:
    """``part`` as a contiguous array of the backend's own; copied unless it is ``fresh``, nobody else's, already."""
    if backend.on_device and backend.owns(part):
        return part if fresh and part.flags.c_contiguous else part.copy()
    part = backend_of(part).to_host(part)
    if backend.on_device:  # moving it is the copy
        return backend.asarray(np.asarray(part, order="C"))
    return np.array(part, order="C", copy=None if fresh else True)  # of a memory map, too, an ordinary array
