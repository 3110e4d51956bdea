"""Backends of meta arrays, on which the code of layers and engines runs and is counted: the host's and a device's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from importlib import import_module
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, Backend, register_backend, unregister_backend
from spmd_engine.arrays.cuda import CudaFunctions
from spmd_engine.arrays.cuda_images import CudaImages
from spmd_engine.arrays.flash_attention import FlashAttention
from spmd_engine.arrays.meta.array import ShapedArray, count
from spmd_engine.arrays.meta.functions import FUNCTIONS
from spmd_engine.arrays.meta.meter import CONVOLUTION, CONVOLUTION_WEIGHTS, meter
from spmd_engine.arrays.numba.functions import FastFunctions, loops_are_there
from spmd_engine.arrays.numba.images import FastImages
from spmd_engine.arrays.precision import accumulated_in


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


# --- A device: the same paths as with CuPy, whose launches, waits and copies are counted
#
# Arrays of floats are ``ShapedArray``. Those of integers and truth values keep their values, on which shapes depend
# (``KnownArray``), and are arrays of the device all the same. What the host reads is a wait, what it gives a copy.


#: Launches of CuPy's functions that take more than one, about.
LAUNCHES = {"argsort": 4, "sort": 3, "lexsort": 6, "cumsum": 3, "einsum": 3, "nonzero": 3, "flatnonzero": 3}
LAUNCHES |= {"bincount": 3, "unique": 6, "qr": 8, "argpartition": 4, "partition": 3}


#: The products of scores' size in each kernel of attention, and the share of the peak that they reach: not measured.
PRODUCTS = {"flash_attention": 2, "flash_attention_queries": 3, "flash_attention_keys": 4}
ASSUMED_SHARE = 0.5

BATCH_MEMORY = "the batch"  #: what the memory of a batch is called, which the host copies to the device


class KnownArray(np.ndarray):
    """An array of a device whose values the dry run knows."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        if any(isinstance(x, ShapedArray) for x in (*inputs, *(out or ()))):
            return NotImplemented
        into = {"out": tuple(map(_plain, out))} if out else {}
        result = getattr(ufunc, method)(*map(_plain, inputs), **into, **options)
        return out[0] if out else _launched(result, LAUNCHES["cumsum"] if method == "accumulate" else 1)

    def __array_function__(self, function, types, args, options):
        if any(issubclass(kind, ShapedArray) for kind in types):
            return NotImplemented
        return _computed(function.__name__, function, args, options)

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        plain = tuple(map(_plain, index))
        masks = sum(getattr(part, "dtype", None) == np.bool_ for part in plain)
        if not any(isinstance(part, np.ndarray) and part.ndim for part in plain):
            return _plain(self)[(*plain, ...) if Ellipsis not in plain else plain].view(KnownArray)
        meter().wait(masks)
        return _launched(_plain(self)[plain], 1 + 3 * masks)

    def __setitem__(self, index, value):
        plain = tuple(map(_plain, index)) if isinstance(index, tuple) else _plain(index)
        _plain(self)[plain] = 0 if isinstance(value, ShapedArray) else _plain(value)
        meter().elementwise(1, 0, 0)

    # What the host asks for

    def item(self, *args):
        meter().wait()
        return _plain(self).item(*args)

    def tolist(self):
        meter().wait()
        return _plain(self).tolist()

    def __int__(self):
        return int(self.item())

    def __float__(self):
        return float(self.item())

    def __bool__(self):
        return bool(self.item())


def _method(name: str) -> Callable:
    function = getattr(np.ndarray, name)
    return lambda self, *args, **options: _computed(name, function, (self, *args), options)


_METHODS = (
    *("all", "any", "argmax", "argsort", "astype", "clip", "copy", "cumsum", "flatten", "max", "mean", "min", "prod"),
    *("ravel", "repeat", "reshape", "sum"),
)
for _name in _METHODS:
    setattr(KnownArray, _name, _method(_name))


def _plain(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(map(_plain, x))
    return x.view(np.ndarray) if isinstance(x, KnownArray) else x


def _computed(name: str, function: Callable, args: Any, options: dict[str, Any]) -> Any:
    """The result of a function of known arrays, each a launch or more, or a view of one of them."""
    plain = _plain(tuple(args))
    result = function(*plain, **{key: _plain(value) for key, value in options.items()})
    parts = result if isinstance(result, (list, tuple)) else [result]
    if options.get("out") is not None:
        _launched(result, 1)
        return options["out"]
    if not parts or not isinstance(parts[0], (np.ndarray, np.generic)):
        return result
    shares = [isinstance(x, np.ndarray) and np.may_share_memory(x, part) for x in plain for part in parts]
    launches = 0 if any(shares) else LAUNCHES.get(name, 1)
    if isinstance(result, (list, tuple)):
        return type(result)(_launched(part, launches) for part in parts)
    return _launched(result, launches)


def _launched(result: Any, times: int) -> KnownArray:
    """A result of values that are known, which took a number of launches."""
    result = np.asarray(result)
    for _ in range(times):
        count(result.size, (), (result,))
    return result.view(KnownArray)


# --- CuPy's module


class _Kernel:
    """A kernel of the package: one launch for its results, which are given, or new."""

    def __init__(self, in_params: str, out_params: str, *_text: str, name: str) -> None:
        self._inputs, self._outputs = in_params.split(","), out_params.split(",")

    def __call__(self, *args: Any, axis: int | None = None, size: int | None = None) -> Any:
        inputs, outputs = args[: len(self._inputs)], args[len(self._inputs) :]
        arrays = [x for x in inputs if hasattr(x, "dtype")]
        if not outputs:
            pairs = zip(inputs, self._inputs, strict=True)
            shape = list(np.broadcast_shapes(*(np.shape(x) for x, text in pairs if text.split()[0] != "raw")))
            if axis is not None:
                del shape[axis]
            types = {text.split()[-2]: x.dtype for x, text in zip(inputs, self._inputs) if hasattr(x, "dtype")}
            if "S" in types:
                types.setdefault("T", accumulated_in(types["S"]))
            kinds = (text.split()[-2] for text in self._outputs)
            outputs = tuple(ShapedArray.new(shape, types.get(kind, kind)) for kind in kinds)
        if outputs[0].size:
            count(size or max(x.size for x in (*arrays, *outputs)), arrays, outputs)
        return outputs[0] if len(outputs) == 1 else outputs


def _raw_kernel(code: str, name: str) -> Callable:
    """A kernel in CUDA: one launch, which reads or writes each of its arrays."""

    def launch(grid: Any, block: Any, args: Any, **_: Any) -> None:
        arrays = [x for x in args if hasattr(x, "dtype")]
        count(max((x.size for x in arrays), default=0), arrays, ())

    return launch


def _multiply(_handle, _transb, _transa, n, m, k, *rest) -> None:
    """``gemmStridedBatchedEx`` of 16-bit floats, as ``arrays.cuda`` calls it."""
    meter().product(rest[-3], m, n, k, 2)


class DeviceModule(ShapedModule):
    """CuPy on arrays without memory."""

    cuda = SimpleNamespace(cublas=SimpleNamespace(gemmStridedBatchedEx=_multiply), get_cublas_handle=lambda: 0)

    RawKernel = staticmethod(_raw_kernel)

    ElementwiseKernel = _Kernel

    def ReductionKernel(self, in_params: str, out_params: str, name: str, **text: str) -> _Kernel:  # noqa: N802
        return _Kernel(in_params, out_params, name=name)

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        if callable(value) and not isinstance(value, (np.ufunc, type)):
            value = _making(value)
        setattr(self, name, value)
        return value

    def empty(self, shape: Any, dtype: Any = np.float64) -> Array:
        array = super().empty(shape, dtype)
        return array if isinstance(array, ShapedArray) else array.view(KnownArray)

    def full(self, shape: Any, value: Any, dtype: Any = None) -> Array:
        array = super().full(shape, value, dtype)
        return array if isinstance(array, ShapedArray) else _launched(array, 1)

    def asarray(self, x: Any, dtype: Any = None, **options: Any) -> Array:
        if isinstance(x, KnownArray):
            return x if dtype is None or x.dtype == dtype else x.astype(dtype)
        if isinstance(x, ShapedArray):
            return super().asarray(x, dtype)
        meter().copy()
        array = super().asarray(x, dtype, **options)
        return array if isinstance(array, ShapedArray) else array.view(KnownArray)

    def array(self, x: Any, dtype: Any = None, **options: Any) -> Array:
        made = self.asarray(x, dtype, **options)
        return made.copy() if made is x else made

    def ascontiguousarray(self, x: Any) -> Array:
        return x if x.flags.c_contiguous else x.copy()

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        for x in (a, b):
            if not _is_for_blas(x):
                count(x.size, (x,), (x,))
        return np.matmul(a, b, out=out)


def _making(function: Callable) -> Callable:
    """A function whose results, if they are NumPy's own, are new arrays of the device."""

    def make(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        if type(result) is np.ndarray:
            return _launched(result, times)
        if isinstance(result, ShapedArray):  # and is counted once
            for _ in range(times - 1):
                count(0, (), ())
        return result

    times = LAUNCHES.get(function.__name__, 1)
    return make


def _is_for_blas(x: Any) -> bool:
    """Whether cuBLAS reads an operand where it is: the last two dims are one after the other in memory."""
    if x.ndim > 2:
        return x.flags.c_contiguous
    return x.ndim < 2 or x.itemsize in x.strides[-2:] or min(x.shape) < 2


class _FlashAttention(FlashAttention):
    """A launch counts as the products of all queries with as many keys as they see on average, in one document."""

    def _launch(self, name: str, arrays: tuple, seen: tuple, results: tuple) -> None:
        q, sums = arrays[0], results[0]
        for x in arrays:
            self._by_head(x, q.dtype)
        positions, key_positions, apart, window, _ = seen
        query, key, *_ = (_plain(self._integers(x)) for x in (positions, key_positions, *(apart or ())))
        keys = np.searchsorted(key, query, "right")
        if window is not None:
            keys = keys - np.searchsorted(key, query - window, "right")
        heads = prod(q.shape[2:-1]) * PRODUCTS[name]
        meter().product(q.shape[0] * heads, q.shape[1], round(keys.mean()), q.shape[-1], sums.itemsize, ASSUMED_SHARE)


class _Kernels(CudaFunctions):
    def __init__(self, xp: Any) -> None:
        super().__init__(xp)
        if self.flash_attention:
            self.flash_attention = _FlashAttention(xp)

    def count_each(self, indices, size):
        numbers = self._xp.arange(size)
        return _launched(np.bincount(_plain(indices), minlength=len(numbers)), 1)


class DeviceShapes(Shapes):
    """The backend of a device with 80 GiB of memory, of meta arrays."""

    on_device = True
    workspace = (80 << 30) // 64

    def __init__(self) -> None:
        self.xp = DeviceModule()
        self.kernels = _Kernels(self.xp)

    @cached_property
    def image_kernels(self) -> CudaImages:  # type: ignore[override]
        return CudaImages(self)

    def owns(self, x: Array) -> bool:
        return isinstance(x, (ShapedArray, KnownArray))

    def asarray(self, x: Array) -> Array:
        if isinstance(x, ShapedArray) and x.memory is not None and x.memory.what == BATCH_MEMORY:
            meter().copy()
        return self.xp.asarray(x)

    def constant(self, x: Any) -> Array:
        """The device has a copy since an earlier step."""
        if self.owns(x):
            return x
        x = np.asarray(x)
        return x.view(KnownArray) if x.dtype.kind in "iub" else ShapedArray(x.shape, x.dtype)

    def to_host(self, x: Array) -> Array:
        if self.owns(x):
            meter().wait()
        return super().to_host(_plain(x))
