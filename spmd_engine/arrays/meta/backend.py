"""A backend of meta arrays, on which the code of layers and engines runs and is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, register_backend, unregister_backend
from spmd_engine.arrays.meta.array import ShapedArray, count
from spmd_engine.arrays.meta.functions import FUNCTIONS
from spmd_engine.arrays.meta.meter import CONVOLUTION, CONVOLUTION_WEIGHTS, meter
from spmd_engine.arrays.numba.functions import FastFunctions, loops_are_there
from spmd_engine.arrays.numba.images import FastImages


class ShapedModule:
    """NumPy, but new arrays of floating-point numbers, and of bytes, are meta arrays. Indices stay NumPy arrays."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        setattr(self, name, value)  # found without this method the next time
        return value

    __name__ = "numpy"

    def empty(self, shape: Any, dtype: Any = np.float64) -> Array:
        return ShapedArray.new(shape, dtype) if _is_data(dtype) else np.empty(shape, dtype)

    def zeros(self, shape: Any, dtype: Any = np.float64) -> Array:
        return self.full(shape, 0, dtype)

    def ones(self, shape: Any, dtype: Any = np.float64) -> Array:
        return self.full(shape, 1, dtype)

    def full(self, shape: Any, value: Any, dtype: Any = None) -> Array:
        dtype = np.asarray(value).dtype if dtype is None else dtype
        if not _is_data(dtype):
            return np.full(shape, value, dtype)
        array = ShapedArray.new(shape, dtype)
        count(array.size, (), (array,))
        return array

    def asarray(self, x: Any, dtype: Any = None, **options: Any) -> Array:
        if isinstance(x, ShapedArray):
            return x if dtype is None else x.astype(dtype, copy=False)
        x = np.asarray(x, dtype, **options)
        return ShapedArray(x.shape, x.dtype) if _is_data(x.dtype) and x.ndim else x

    array = asarray

    def ascontiguousarray(self, x: Any) -> Array:
        if not isinstance(x, ShapedArray):
            return np.ascontiguousarray(x)
        return x if x.flags.c_contiguous else x.copy()


def _is_data(dtype: Any) -> bool:
    """Whether arrays of this dtype hold data, and not indices, whose values are known and needed."""
    dtype = np.dtype(dtype)
    return dtype.kind in "fcV" or dtype == np.uint8


class Shapes(Backend):
    """The host's backend with meta arrays; compiled loops are counted if the host has them."""

    name = "shapes"
    xp: Any = ShapedModule()
    functions = FUNCTIONS  #: NumPy's that accept meta arrays

    def __init__(self) -> None:
        self.kernels = FastFunctions(_Loops(), self.xp.empty) if loops_are_there() else None

    @cached_property
    def image_kernels(self) -> FastImages | None:  # type: ignore[override]
        """Separate, since only models of images need them, and loading them takes a while."""
        if self.kernels is None:
            return None
        return FastImages(_Loops(), _CountedPlaces(import_module("spmd_engine.arrays.numba.places")))

    def owns(self, x: Array) -> bool:
        return isinstance(x, ShapedArray)

    def errstate(self, **kinds: str):
        return nullcontext()

    def empty(self, shape: Any, dtype: Any) -> ShapedArray:
        return ShapedArray.new(shape, dtype)

    def asarray(self, x: Array) -> Array:
        return x if isinstance(x, ShapedArray) else self.xp.asarray(x)

    def to_host(self, x: Array) -> Array:
        """Zeros without memory for the values of a meta array, such as an auxiliary loss, on which no step depends."""
        return np.broadcast_to(np.zeros((), x.dtype), x.shape) if self.owns(x) else x

    def pinned_empty(self, shape: Any, dtype: Any) -> ShapedArray:
        return ShapedArray.new(shape, dtype)


class _CountedPlaces:
    """The module ``places``; the memory of the arrays that it caches is counted."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not name.startswith("places_"):
            return value

        def counted(*args: Any) -> Any:
            places = value(*args)
            arrays = {id(array): array.nbytes for array in places if isinstance(array, np.ndarray)}
            meter().constants[name, args] = sum(arrays.values())
            return places

        return counted


class _Loops:
    """Replaces compiled loops, and counts their arrays as read and written; convolutions count as products."""

    def __getattr__(self, name: str) -> Any:
        return _counted

    def correlate(self, x, w, y, b, p, q, o, *others) -> None:
        groups, _, inside = w.shape[:3]
        meter().product(groups, b * p * q, o, inside, 4, kernel=CONVOLUTION)

    def correlate_weights(self, x, dy, dw, *others) -> None:
        groups, _, inside = dw.shape[:3]
        b, p, q, f = dy.shape
        meter().product(groups, inside, f // groups, b * p * q, 4, kernel=CONVOLUTION_WEIGHTS)


def _counted(*args: Any) -> None:
    arrays = [x for x in args if isinstance(x, ShapedArray)]
    if not all(x.flags.c_contiguous for x in arrays):
        raise TypeError("a loop wants contiguous arrays")  # as compiled loops do
    size = max((x.size for x in arrays), default=0)
    meter().elementwise(size, sum(x.nbytes for x in arrays[:-1]), arrays[-1].nbytes if arrays else 0)


@contextmanager
def on_shapes(backend: Shapes | None = None) -> Iterator[Shapes]:
    """Inside the context, ``backend_of`` recognises meta arrays, as those of the host or of another ``backend``."""
    backend = backend or Shapes()
    register_backend(backend)
    try:
        yield backend
    finally:
        unregister_backend(backend)
