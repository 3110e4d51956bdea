"""Where a layer puts its gradients: sums over micro-batches, in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import Array
from spmd_engine.errors import UnknownParameter, UsageError


class GradientSums:
    """A layer's gradients by its own names, each to be added to.

    The first contribution of a step is written instead of added to zeros, which saves two passes over
    memory: ``untouched`` holds the full names of what has none yet, shared by all layers, since a tied
    parameter gets contributions from two of them. ``g["norm"]`` is the part of the names under ``norm/``.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        full_names: Mapping[str, str] | None = None,
        untouched: set[str] | None = None,
        prefix: str = "",
    ) -> None:
        self._arrays, self._prefix = arrays, prefix
        self._full_names = full_names if full_names is not None else {name: name for name in arrays}
        self._untouched = untouched if untouched is not None else set()

    def __getitem__(self, folder: str) -> GradientSums:
        return GradientSums(self._arrays, self._full_names, self._untouched, f"{self._prefix}{folder}/")

    def __setitem__(self, name: str, value: Array) -> None:
        raise UsageError(f"g[{name!r}] cannot be assigned: gradients are added up, by g.add(name, array) or g.einsum")

    def __iadd__(self, value: Array) -> GradientSums:
        name = self._prefix.rstrip("/")
        raise UsageError(f"g[{name!r}] += ...: write g.add({name!r}, array), or g.einsum")

    def einsum(self, name: str, pattern: str, *operands: Array) -> None:
        """Add ``einsum(pattern, *operands)`` to the gradient of ``name``."""
        array, first = self._take(name)
        einsum(pattern, *operands, out=array, accumulate=not first)

    def add(self, name: str, value: Array) -> None:
        """Add an array to the gradient of ``name``."""
        array, first = self._take(name)
        if (shape := getattr(value, "shape", ())) != array.shape and array.size:
            raise UsageError(f"g.add({name!r}): the array has shape {shape}, but the parameter {array.shape}")
        if first:
            array[...] = value
        else:
            array += value

    def open(self, name: str) -> Array:
        """The gradient of ``name`` itself, zero where nothing was added yet, to be added to in parts."""
        array, first = self._take(name)
        if first:
            array[...] = 0
        return array

    def untouched(self, names: Iterable[str]) -> list[str]:
        """Those of these names whose gradients are here and have no contribution yet."""
        full_names = {name: self._full_names.get(self._prefix + name) for name in names}
        return [name for name, full in full_names.items() if full in self._untouched]

    def _take(self, name: str) -> tuple[Array, bool]:
        name = self._prefix + name
        if name not in self._full_names:
            raise UnknownParameter(name, self._full_names, "layer")
        full = self._full_names[name]
        first = full in self._untouched
        self._untouched.discard(full)
        return self._arrays[name], first
