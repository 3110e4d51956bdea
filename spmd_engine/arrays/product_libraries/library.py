"""``ProductLibrary``: what computes matrix products beside NumPy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from spmd_engine.arrays.windows import Window


class ProductLibrary(ABC):
    """A library of matrix products, by its C interface.

    A library of your own is a class that defines ``name``, ``file``, ``version``, its constructor and ``multiply``, and
    perhaps ``rounds``, ``one_thread`` and ``convolve``; it has a line in ``LIBRARIES``. A job uses it where it is the
    fastest, by dtype and size class (``products.use``). The constructor raises OSError, in one line, if the library
    cannot be used.
    """

    name: str  #: of ``--products``
    file: str  #: the beginning of its file's name: "libdnnl.so"
    version: str
    rounds: bool = False  #: whether it writes bfloat16
    one_thread: bool = False  #: whether it computes in one thread, else in as many as NumPy's BLAS

    @abstractmethod
    def __init__(self, path: str) -> None:
        """Load the library from a file."""

    @abstractmethod
    def multiply(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> bool:
        """Write a[... m k] · b[... k n] to out[... m n]; False if these operands do not fit, and nothing is written.

        The operands have one dtype, float32 or bfloat16; ``out`` is float32, or bfloat16 as they are if it ``rounds``.
        Sums are float32. Several threads may call it at the same time.
        """

    def convolve(self, kind: str, x: np.ndarray, w: np.ndarray, y: np.ndarray, rows: Window, columns: Window) -> bool:
        """Write y[b p q f], the convolution of x[b h w c] with w[k l c f], or the gradient of one of these.

        ``kind`` names the array that is written: "y", or "x" or "w" for its gradient, if ``y`` is that of y. Arrays are
        contiguous bfloat16, a gradient of w float32. False if it cannot be, and nothing is written.
        """
        return False


def is_plain(x: np.ndarray) -> bool:
    """Whether no element is in two places, nothing is reversed, and rows or columns are contiguous."""
    strides, shape = x.strides, x.shape
    rows, columns = strides[-2], strides[-1]
    if not x.size or not x.flags.aligned or min(strides) <= 0:
        return False
    if columns == x.itemsize:
        return rows >= columns * shape[-1]
    return rows == x.itemsize and columns >= rows * shape[-2]


def blas_threads() -> int:
    """The threads of a product of NumPy's BLAS, as they are limited at the moment."""
    return min((pool["num_threads"] for pool in numpy_blas()), default=1)


def numpy_blas() -> list[dict[str, Any]]:
    """What threadpoolctl tells of NumPy's BLAS; of every BLAS where NumPy has none of its own.

    SciPy's, which may be loaded later, has as many threads as cores.
    """
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return [pool for pool in pools if "numpy.libs" in pool["filepath"]] or pools
