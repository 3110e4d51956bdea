"""MKL, which comes with other software, and knows the instructions for bfloat16 of Intel's processors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import c_float, c_int, c_void_p

import numpy as np
from threadpoolctl import threadpool_info

from spmd_engine.arrays.product_libraries.library import ProductLibrary, is_plain
from spmd_engine.arrays.products import BFLOAT16, FLOAT32

_BY_ROWS, _AS_IS, _TRANSPOSED = 101, 111, 112  # of cblas.h
_SEQUENTIAL, _LP64 = 1, 0


class MKL(ProductLibrary):
    """Products by MKL's ``cblas_sgemm`` and ``cblas_gemm_bf16bf16f32``, in one thread."""

    name, file, one_thread = "mkl", "libmkl_rt.so", True

    def __init__(self, path: str) -> None:
        used_by_numpy = any(pool["internal_api"] == "mkl" for pool in threadpool_info())
        library = ctypes.CDLL(path)
        if not used_by_numpy:  # whose threads are limited already
            library.MKL_Set_Interface_Layer(_LP64)
            library.MKL_Set_Threading_Layer(_SEQUENTIAL)
        text = ctypes.create_string_buffer(200)
        library.MKL_Get_Version_String(text, 199)
        self.version = text.value.decode(errors="replace").partition("Version ")[2].partition(" ")[0]
        self._functions: dict[np.dtype, Callable] = {
            FLOAT32: library.cblas_sgemm,
            BFLOAT16: library.cblas_gemm_bf16bf16f32,
        }
        matrix = [c_void_p, c_int]
        for function in self._functions.values():
            function.argtypes = [c_int] * 6 + [c_float, *matrix, *matrix, c_float, *matrix]
            function.restype = None

    def multiply(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> bool:
        """As ProductLibrary.multiply; rows of ``out`` must be contiguous."""
        if not (is_plain(a) and is_plain(b) and is_plain(out)) or not a.ndim == b.ndim == out.ndim:
            return False
        if out.strides[-1] != out.itemsize or a.shape[:-2] != b.shape[:-2]:
            return False
        function, (m, k), n = self._functions[a.dtype], a.shape[-2:], b.shape[-1]
        (a_order, a_lead), (b_order, b_lead), (_, lead) = map(_order, (a, b, out))
        for x, y, z in zip(_matrices(a), _matrices(b), _matrices(out), strict=True):
            data = x.ctypes.data, a_lead, y.ctypes.data, b_lead, 0.0, z.ctypes.data, lead
            function(_BY_ROWS, a_order, b_order, m, n, k, 1.0, *data)
        return True


def _order(x: np.ndarray) -> tuple[int, int]:
    """Whether the matrices of ``x`` are stored by rows or by columns, and the elements from one to the next."""
    if x.strides[-1] == x.itemsize:
        return _AS_IS, x.strides[-2] // x.itemsize
    return _TRANSPOSED, x.strides[-1] // x.itemsize


def _matrices(x: np.ndarray) -> Iterator[np.ndarray]:
    return (x[place] for place in np.ndindex(x.shape[:-2]))
