"""Meta arrays: a shape, strides and a dtype without memory, on which code for arrays runs to be measured.

NumPy's functions and operators accept a ``ShapedArray`` in the place of an array. Views, reshapes and transpositions
are NumPy's own, of an array whose elements are never read; results have the shapes and dtypes that NumPy's would have;
the meter of this thread counts memory and work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.lib.stride_tricks import as_strided

from spmd_engine.arrays.meta import meter as metering
from spmd_engine.arrays.meta.meter import Memory
from spmd_engine.errors import UsageError, user_line


def has_shapes_only(backend: Any) -> bool:
    """Whether the arrays that a backend makes are meta arrays, as in a dry run."""
    return isinstance(backend.empty(0, np.uint8), ShapedArray)


class ShapedArray(NDArrayOperatorsMixin):
    """A shape and a dtype. It can be indexed and reshaped as any array; written values are discarded."""

    __slots__ = ("_like", "memory")

    def __init__(self, shape: int | Sequence[int], dtype: Any, memory: Memory | None = None) -> None:
        """``memory``: the memory that it views; None: memory that is not counted."""
        sizes = (shape,) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
        self._like, self.memory = _phantom(sizes, np.dtype(dtype)), memory

    @classmethod
    def new(cls, shape: int | Sequence[int], dtype: Any) -> ShapedArray:
        """An array with new memory."""
        array = cls(shape, dtype)
        array.memory = metering.meter().allocate(array._like.nbytes)
        return array

    def _view(self, like: np.ndarray) -> ShapedArray:
        view = ShapedArray.__new__(ShapedArray)
        view._like, view.memory = like, self.memory
        return view

    # --- attributes --------------------------------------------------------------------------------------

    shape = property(lambda self: self._like.shape)
    dtype = property(lambda self: self._like.dtype)
    ndim = property(lambda self: self._like.ndim)
    size = property(lambda self: self._like.size)
    nbytes = property(lambda self: self._like.nbytes)
    itemsize = property(lambda self: self._like.itemsize)
    flags = property(lambda self: self._like.flags)
    data = SimpleNamespace(ptr=0)  # for cuBLAS, which takes addresses
    strides = property(lambda self: self._like.strides)

    def __len__(self) -> int:
        return len(self._like)

    def __repr__(self) -> str:
        return f"ShapedArray({list(self.shape)}, {self.dtype})"

    # --- views, as NumPy makes them ----------------------------------------------------------------------

    T = property(lambda self: self._view(self._like.T))
    mT = property(lambda self: self._view(self._like.mT))
    real = property(lambda self: self._view(self._like.real))
    imag = property(lambda self: self._view(self._like.imag))

    def transpose(self, *axes: Any) -> ShapedArray:
        return self._view(self._like.transpose(*axes))

    def swapaxes(self, one: int, other: int) -> ShapedArray:
        return self._view(self._like.swapaxes(one, other))

    def view(self, dtype: Any) -> ShapedArray:
        return self._view(self._like.view(dtype))

    def reshape(self, *shape: Any) -> ShapedArray:
        sizes: Any = shape[0] if len(shape) == 1 else shape
        try:
            return self._view(np.reshape(self._like, sizes, copy=False))
        except ValueError:
            lengths = [sizes] if isinstance(sizes, int) else list(sizes)
            if -1 in lengths:
                lengths[lengths.index(-1)] = self.size // max(1, -prod(lengths))
            if prod(lengths) != self.size:
                raise
            return self._copied(lengths, self.dtype)

    def __getitem__(self, index: Any) -> ShapedArray:
        if _is_basic(index):
            return self._view(_part(self._like, index))
        result = ShapedArray.new(_indexed_shape(self.shape, index), self.dtype)
        count(result.size, (result,), (result,))
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, ShapedArray) and index.dtype == np.bool_:
            shape = self.shape  # at most all elements
        else:
            shape = _part(self._like, index).shape if _is_basic(index) else _indexed_shape(self.shape, index)
        size = prod(shape)
        read = value.nbytes if isinstance(value, (ShapedArray, np.ndarray)) else 0
        metering.meter().elementwise(size, read, size * self.itemsize)

    # --- copies ------------------------------------------------------------------------------------------

    def _copied(self, shape: Sequence[int], dtype: Any) -> ShapedArray:
        result = ShapedArray.new(shape, dtype)
        count(self.size, (self,), (result,))
        return result

    def copy(self, order: str = "C") -> ShapedArray:
        return self._copied(self.shape, self.dtype)

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> ShapedArray:
        if not copy and np.dtype(dtype) == self.dtype and (order == "K" or self.flags.c_contiguous):
            return self
        return self._copied(self.shape, dtype)

    def flatten(self, order: str = "C") -> ShapedArray:
        return self._copied((self.size,), self.dtype)

    def fill(self, value: Any) -> None:
        self[...] = value

    # --- the functions of NumPy, as methods --------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name, None)
        if not name.startswith("__") and callable(getattr(np.ndarray, name, None)):
            if function is None:
                raise _no_values(self, f"{name} needs its elements")
            return lambda *args, **options: function(self, *args, **options)
        raise AttributeError(f"an array that is only a shape has no {name!r}")

    #: Set by ``functions``: the results of NumPy's operators and functions.
    apply_ufunc: ClassVar[Callable]
    apply_function: ClassVar[Callable]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        return self.apply_ufunc(ufunc, method, inputs, out[0] if out else None, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return self.apply_function(function, args, options)

    # --- values, of which there are none -----------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self.dtype == np.bool_:
            metering.meter().assume("conditions on values hold wherever an array of them is looked at")
            return np.ones(self.shape, bool)
        if metering.meter().lenient:
            metering.meter().assume("what is written into arrays of the engine's own is taken to be zeros")
            return np.zeros(self.shape, self.dtype)
        raise _no_values(self, "its elements are asked for")

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __float__(self) -> float:
        if self.size != 1:
            raise TypeError("only an array of one element is a number")
        if metering.meter().on_device:
            metering.meter().wait()
        return 1.0

    def item(self) -> float:
        """An arbitrary number, if there is one element."""
        return float(self)

    def __bool__(self) -> bool:
        raise _no_values(self, "what is done depends on whether it is true")

    def __int__(self) -> int:
        raise _no_values(self, "what is done depends on its value")

    __index__ = __int__


def count(elements: int, read: Sequence[Any], written: Sequence[Any]) -> None:
    """Count an operation on a number of ``elements`` that reads and writes these arrays."""
    metering.meter().elementwise(elements, sum(x.nbytes for x in read), sum(x.nbytes for x in written))


def _no_values(x: ShapedArray, why: str) -> UsageError:
    return UsageError(
        f"this cannot be computed from shapes alone: {why}, of an array {list(x.shape)} of {x.dtype} whose values only "
        f"a real step has{user_line()}"
    )


@lru_cache(maxsize=4096)
def _phantom(sizes: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of this shape, with the strides of a contiguous one, but memory for its first element only."""
    strides, step = [], dtype.itemsize
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return as_strided(np.empty(1, dtype), sizes, strides[::-1])


def _is_basic(index: Any) -> bool:
    for part in index if isinstance(index, tuple) else (index,):
        if type(part) is not slice and isinstance(part, (np.ndarray, list, ShapedArray)) and np.ndim(part):
            return False
    return True


def _part(like: np.ndarray, index: Any) -> np.ndarray:
    """A view, also of a single element."""
    parts = index if isinstance(index, tuple) else (index,)
    return like[parts if Ellipsis in parts else (*parts, Ellipsis)]


def _indexed_shape(shape: tuple[int, ...], index: Any) -> tuple[int, ...]:
    """The shape of the result of an index with arrays in it."""
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(_dims(part) for part in parts)
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[at : at + 1] = [slice(None)] * (len(shape) - used)
    before: list[int] = []
    after: list[int] = []
    arrays: list[tuple[int, ...]] = []
    where: list[int] = []
    dim = 0
    for place, part in enumerate(parts):
        if part is None:
            (after if arrays else before).append(1)
        elif isinstance(part, slice):
            (after if arrays else before).append(len(range(*part.indices(shape[dim]))))
            dim += 1
        else:
            where.append(place)
            arrays.append(_index_shape(part))
            dim += _dims(part)
    adjacent = where == list(range(where[0], where[-1] + 1))
    joint = np.broadcast_shapes(*arrays)
    return (*before, *joint, *after) if adjacent else (*joint, *before, *after)


def _dims(part: Any) -> int:
    """How many dims of an array a part of an index uses."""
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if getattr(part, "dtype", None) == np.bool_ else 1


def _index_shape(part: Any) -> tuple[int, ...]:
    if getattr(part, "dtype", None) == np.bool_:
        if isinstance(part, ShapedArray):
            raise _no_values(part, "it selects elements")
        return (int(np.count_nonzero(part)),)
    return np.shape(part)
