"""``@fused``: one name for a function, whether NumPy works it off in pieces or a backend has a kernel for all of it."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.meter import meter


def kernels_for(x: Array):
    """The kernels that take ``x``; None if NumPy's calls, or CuPy's, compute with it."""
    return _taking(x, backend_of(x).kernels)


def fused(function: Callable) -> Callable:
    """Where the first argument's backend has ``kernels`` that take it, theirs of this name runs, else ``function``.

    The body below the decorator is what is computed, whoever computes it, and a backend's kernels have all the
    functions that are so marked, with the same signatures.
    """
    return _fused(function, lambda backend: backend.kernels)


def fused_of_images(function: Callable) -> Callable:
    """``fused`` for functions of images: a backend has kernels for all of these or for none, ``image_kernels``."""
    return _fused(function, lambda backend: backend.image_kernels)


def _fused(function: Callable, kernels_of: Callable[[Backend], Any]) -> Callable:
    name = function.__name__

    @wraps(function)
    def run(x: Array, *others, **options):
        kernels = _taking(x, kernels_of(backend_of(x)))
        chosen = function if kernels is None else getattr(kernels, name)
        return chosen(x, *others, **options)

    return run


def _taking(x: Array, kernels: Any) -> Any:
    """``kernels`` if there are any and they take ``x``."""
    return kernels if kernels is not None and kernels.takes(x) else None


# --- Walking over long arrays in pieces that stay in cache, so that a chain of elementwise steps is cheap


CACHE_ELEMENTS = 1 << 16  # 256 KiB of float32: two or three fit a core's L2 cache, and NumPy's calls cost little beside


def chunks(x: Array, elements: int = CACHE_ELEMENTS) -> Iterator[slice]:
    """Slices of ``x``'s first dimension, about ``elements`` each; one slice on a device, which has no need."""
    length = x.shape[0]
    if backend_of(x).on_device:
        step = max(length, 1)
    else:
        step = max(1, elements * length // max(x.size, 1))
    for start in alike(range(0, length, step), x, last=length % step != 0):
        yield slice(start, min(start + step, length))


def alike(numbers: range, x: Array, *, last: bool = False) -> Iterator[int]:
    """The numbers of a loop that does the same each time, with parts of ``x`` of one size.

    Where ``x`` is only a shape the first stands for all, and counts for all; ``last``: but for the last one.
    """
    if not isinstance(x, ShapedArray) or len(numbers) < 3:
        yield from numbers
        return
    with meter().repeated(len(numbers) - last):
        yield numbers[0]
    if last:
        yield numbers[-1]
