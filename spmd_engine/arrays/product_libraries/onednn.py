"""oneDNN, which knows the instructions for bfloat16 that NumPy's BLAS lacks.

It comes with the extra ``onednn`` (the wheel ``onednn-cpu-gomp``).
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint, c_void_p
from typing import Any

import numpy as np

from spmd_engine.arrays.product_libraries.library import ProductLibrary, blas_threads, is_plain
from spmd_engine.arrays.products import BFLOAT16, FLOAT32
from spmd_engine.arrays.windows import Window


class _Version(ctypes.Structure):
    """dnnl_version_t."""

    _fields_ = [("major", c_int), ("minor", c_int), ("patch", c_int), ("hash", c_char_p), ("runtimes", c_uint * 2)]


class _Argument(ctypes.Structure):
    """dnnl_exec_arg_t."""

    _fields_ = [("place", c_int), ("memory", c_void_p)]


_CPU, _IN_ORDER = 1, 1
_SOURCE, _WEIGHTS, _RESULT = 1, 33, 17  # places of the arguments of a product
_TYPES = {BFLOAT16: 2, FLOAT32: 3}
_KEPT = 512  # products by their shapes, for each thread: one takes 0.2 to 5 ms to create


class OneDNN(ProductLibrary):
    """Products by oneDNN's matmul primitive, which takes operands by their strides.

    Each thread keeps primitives of its own, since one that uses its library's memory must not run in two threads.
    """

    name, rounds, file = "onednn", True, "libdnnl.so"

    def __init__(self, path: str) -> None:
        self._openmp = _openmp()
        self.library = ctypes.CDLL(path)
        self.library.dnnl_version.restype = POINTER(_Version)
        version = self.library.dnnl_version().contents
        if version.major != 3:
            raise OSError(f"oneDNN {version.major}.{version.minor} is installed; version 3 is needed")
        self.version = f"{version.major}.{version.minor}.{version.patch}"
        self._move, self._execute = self.library.dnnl_memory_set_data_handle, self.library.dnnl_primitive_execute
        self._move.argtypes, self._execute.argtypes = [c_void_p] * 2, [c_void_p, c_void_p, c_int, c_void_p]
        self.engine = c_void_p()
        self._check(self.library.dnnl_engine_create(byref(self.engine), _CPU, c_size_t(0)))
        self._threads = blas_threads()
        self._local = threading.local()

    def multiply(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> bool:
        """As ProductLibrary.multiply."""
        products, stream = self._of_thread()
        key = a.shape, a.strides, b.shape, b.strides, out.strides, a.dtype, out.dtype
        product = products.get(key)
        if product is None:
            plain = is_plain(a) and is_plain(b) and is_plain(out)
            if not plain or not a.ndim == b.ndim == out.ndim <= 12:
                return False
            product = _keep(products, key, _Product(self, a, b, out))
        return self._run(product, stream, a, b, out)

    def convolve(self, kind: str, x: np.ndarray, w: np.ndarray, y: np.ndarray, rows: Window, columns: Window) -> bool:
        """As ProductLibrary.convolve."""
        products, stream = self._of_thread()
        key = kind, x.shape, w.shape, y.shape, rows, columns
        convolution = products.get(key)
        if convolution is None:
            if _fails(kind, x.shape, rows, columns):
                return False
            convolution = _keep(products, key, _Convolution(self, kind, x, w, y, rows, columns))
        if self._local.scratch.nbytes < convolution.scratch_bytes:
            self._local.scratch = np.empty(convolution.scratch_bytes, np.uint8)
        return self._run(convolution, stream, x, w, y, self._local.scratch)

    def _run(self, kept: _Primitives, stream: c_void_p, *arrays: np.ndarray) -> bool:
        """Execute primitives on these arrays; False if there are none."""
        for memory, x in zip(kept.memories, arrays, strict=False):
            self._move(memory, x.ctypes.data)
        for primitive, arguments in kept.calls:
            self._check(self._execute(primitive, stream, len(arguments), arguments))
        return bool(kept.calls)

    def _of_thread(self) -> tuple[dict[Any, Any], c_void_p]:
        """The products and the stream of this thread."""
        try:
            return self._local.products, self._local.stream
        except AttributeError:
            return self._begin_thread()

    def _begin_thread(self) -> tuple[dict[Any, Any], c_void_p]:
        """Let this thread compute, with a limit of its own for the threads that OpenMP starts."""
        self._openmp.omp_set_num_threads(self._threads)
        self._local.stream = stream = c_void_p()
        self._check(self.library.dnnl_stream_create(byref(stream), self.engine, _IN_ORDER))
        self._local.products, self._local.scratch = products, _ = {}, np.empty(0, np.uint8)
        return products, stream

    def _check(self, status: int) -> None:
        if status:
            raise OSError(f"oneDNN failed with status {status}")

    def made(self, function: str, *arguments: Any) -> int | None:
        """The address of what the library's function makes; None if it refuses the arguments."""
        result = c_void_p()
        getattr(self.library, function)(byref(result), *arguments)
        return result.value

    def described(self, x: np.ndarray) -> int | None:
        """A descriptor of the shape, strides and dtype of ``x``."""
        sizes, n = c_int64 * x.ndim, x.ndim
        strides = sizes(*(stride // x.itemsize for stride in x.strides))
        return self.made("dnnl_memory_desc_create_with_strides", n, sizes(*x.shape), _TYPES[x.dtype], strides)

    def new_memory(self, descriptor: int | None) -> int | None:
        """A memory object without memory."""
        return self.made("dnnl_memory_create", c_void_p(descriptor), self.engine, c_void_p())

    def created(self, kind: int | None) -> int | None:
        """The primitive of a primitive descriptor, which is freed."""
        if kind is None:
            return None
        primitive = self.made("dnnl_primitive_create", c_void_p(kind))
        self.destroy("primitive_desc", kind)
        return primitive

    def destroy(self, kind: str, address: int | None) -> None:
        """Free what ``made`` returned."""
        getattr(self.library, f"dnnl_{kind}_destroy")(c_void_p(address))


def _openmp() -> ctypes.CDLL:
    """The library of threads that oneDNN uses. Its idle threads sleep, unless the user has said otherwise: they would
    spin for milliseconds, and keep those that compute from the cores where others run."""
    spins = not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if spins:
        os.environ["GOMP_SPINCOUNT"] = "0"  # read when the library is loaded
    try:
        return ctypes.CDLL("libgomp.so.1")
    finally:
        if spins:
            del os.environ["GOMP_SPINCOUNT"]


class _Primitives:
    """Primitives with the memory objects of their arguments; none if oneDNN does not compute this."""

    def __init__(self, library: OneDNN) -> None:
        self._library, self.memories, self.calls = library, list[int | None](), list[tuple[int | None, Any]]()

    def __del__(self) -> None:
        for memory in self.memories:
            self._library.destroy("memory", memory)
        for primitive, _ in self.calls:
            self._library.destroy("primitive", primitive)


class _Product(_Primitives):
    """A product of operands of some shapes, strides and dtypes."""

    def __init__(self, library: OneDNN, *arrays: np.ndarray) -> None:
        super().__init__(library)
        descriptors = [library.described(x) for x in arrays]
        source, weights, result = map(c_void_p, descriptors)
        operands = library.engine, source, weights, c_void_p(), result  # without a bias
        kind = library.made("dnnl_matmul_primitive_desc_create", *operands, c_void_p())
        if (primitive := library.created(kind)) is not None:
            self.memories = [library.new_memory(descriptor) for descriptor in descriptors]
            arguments = (_Argument * 3)(*zip((_SOURCE, _WEIGHTS, _RESULT), self.memories, strict=True))
            self.calls = [(primitive, arguments)]
        for descriptor in descriptors:
            library.destroy("memory_desc", descriptor)


_FORWARD, _DIRECT, _ANY = 64, 1, 1  # a kind of propagation, an algorithm, and a format that oneDNN chooses
#: By the array that is written: what its function is called, the places of x, w and y, and the query of its weights.
_CONVOLUTIONS = {
    "y": ("forward", (1, 33, 17), 131),
    "x": ("backward_data", (129, 33, 145), 131),
    "w": ("backward_weights", (1, 161, 145), 132),
}


class _Convolution(_Primitives):
    """The primitive of a convolution, and that which copies weights into its order, or their gradient out of it."""

    def __init__(self, library: OneDNN, kind: str, x: Any, w: Any, y: Any, rows: Window, columns: Window) -> None:
        super().__init__(library)
        function, places, query = _CONVOLUTIONS[kind]
        images = [array.transpose(0, 3, 1, 2) for array in (x, y)]
        (source, result), weights = map(library.described, images), library.described(w.transpose(3, 2, 0, 1))
        shape = (c_int64 * 4)(*w.transpose(3, 2, 0, 1).shape)
        chosen = library.made("dnnl_memory_desc_create_with_tag", 4, shape, _TYPES[w.dtype], _ANY)
        two = c_int64 * 2
        numbers = [two(*(each(window) for window in (rows, columns))) for each in _NUMBERS]
        descriptors = c_void_p(source), c_void_p(chosen)
        no_bias, attributes = [c_void_p()] * (kind != "x"), c_void_p()
        forward_chosen = library.made("dnnl_memory_desc_create_with_tag", 4, shape, _TYPES[BFLOAT16], _ANY)
        hint = library.made(
            "dnnl_convolution_forward_primitive_desc_create", library.engine, _FORWARD, _DIRECT, c_void_p(source),
            c_void_p(forward_chosen), c_void_p(), c_void_p(result), *numbers, attributes,
        )  # fmt: skip
        described = hint
        if kind != "y" and hint is not None:
            described = library.made(
                f"dnnl_convolution_{function}_primitive_desc_create", library.engine, _DIRECT, *descriptors, *no_bias,
                c_void_p(result), *numbers, c_void_p(hint), attributes,
            )  # fmt: skip
            library.destroy("primitive_desc", hint)
        self.scratch_bytes = 0
        if described is None:
            return
        find, size = library.library.dnnl_primitive_desc_query_md, library.library.dnnl_memory_desc_get_size
        find.restype, size.restype = c_void_p, c_size_t
        packed = find(c_void_p(described), query, 0)
        self.scratch_bytes = size(c_void_p(packed))
        ends = (packed, weights) if kind == "w" else (weights, packed)
        reorder = library.made(
            "dnnl_reorder_primitive_desc_create", c_void_p(ends[0]), library.engine, c_void_p(ends[1]), library.engine,
            attributes,
        )  # fmt: skip
        memories = [library.new_memory(each) for each in (source, weights, result, packed)]
        copy = library.created(reorder)
        primitive, self.memories = library.created(described), memories
        of_x, of_w, of_y, of_scratch = memories
        call = (_Argument * 3)(*zip(places, (of_x, of_scratch, of_y), strict=True))
        copied = (of_scratch, of_w) if kind == "w" else (of_w, of_scratch)
        self.calls = [(copy, (_Argument * 2)(*zip((_SOURCE, _RESULT), copied, strict=True))), (primitive, call)]
        if kind == "w":
            self.calls.reverse()
        for each in (source, weights, result, chosen, forward_chosen):
            library.destroy("memory_desc", each)


#: Strides, dilations counted from 0, and zeros before and after, of a window.
_NUMBERS = (
    lambda window: window.stride,
    lambda window: window.dilation - 1,
    lambda window: window.before,
    lambda window: window.after,
)


def _fails(kind: str, x: tuple[int, ...], rows: Window, columns: Window) -> bool:
    """Whether oneDNN 3.2 fails with AMX to convolve images of this shape [b h w c].

    Where a tap reads only padding, it crashes, or leaves what memory held in the gradient of weights. A forward with a
    stride is wrong if channels fill half of a tile: if they are 48, 80, 112, ...
    """
    taps = sum(1 for _ in rows.taps(x[1])), sum(1 for _ in columns.taps(x[2]))
    half_a_tile = x[3] > 16 and x[3] % 32 == 16
    return taps != (rows.size, columns.size) or (kind == "y" and half_a_tile and max(rows.stride, columns.stride) > 1)


def _keep(products: dict[Any, Any], key: Any, made: Any) -> Any:
    """``made``, kept under this key; the oldest product goes if there are too many."""
    if len(products) >= _KEPT:
        del products[next(iter(products))]
    products[key] = made
    return made
