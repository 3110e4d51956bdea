"""``@fused``: a function that NumPy computes in pieces, unless a backend has a kernel for it."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.meter import meter


def kernels_for(x: Array, kind: str = "kernels") -> Any:
    """The kernels of the backend of ``x``, if there are any and they take ``x``; else None."""
    kernels = getattr(backend_of(x), kind)
    return kernels if kernels is not None and kernels.takes(x) else None


def fused(function: Callable) -> Callable:
    """Call the kernel of this name that the first argument's backend has, or ``function`` if there is none.

    ``function`` defines what is computed. A backend's ``kernels`` have all functions with this decorator, with the
    same signatures; one may return NotImplemented for arguments that it does not take.
    """
    return _fused(function, "kernels")


def fused_of_images(function: Callable) -> Callable:
    """``fused`` for functions of images, which a backend's ``image_kernels`` have."""
    return _fused(function, "image_kernels")


def _fused(function: Callable, kind: str) -> Callable:
    name = function.__name__

    @wraps(function)
    def run(x: Array, *others, **options):
        if (kernels := kernels_for(x, kind)) is not None:
            result = getattr(kernels, name)(x, *others, **options)
            if result is not NotImplemented:
                return result
        return function(x, *others, **options)

    return run


# --- Long arrays in pieces that stay in cache, so that a chain of elementwise steps is cheap


CACHE_ELEMENTS = 1 << 16  # 256 KiB of float32: two or three fit a core's L2 cache, and the overhead of calls is small


def chunks(x: Array, elements: int = CACHE_ELEMENTS) -> Iterator[slice]:
    """Slices of ``x``'s first dimension, about ``elements`` each; a single slice on a device."""
    length = x.shape[0]
    if backend_of(x).on_device:
        step = max(length, 1)
    else:
        step = max(1, elements * length // max(x.size, 1))
    for start in alike(range(0, length, step), x, last=length % step != 0):
        yield slice(start, min(start + step, length))


def alike(numbers: range, x: Array, *, last: bool = False) -> Iterator[int]:
    """The numbers of a loop that does the same work in each iteration, on parts of ``x`` of equal size.

    If ``x`` is a meta array, only the first iteration runs, and counts for all; with ``last``, the last one runs, too.
    """
    if not isinstance(x, ShapedArray) or len(numbers) < 3:
        yield from numbers
        return
    with meter().repeated(len(numbers) - last):
        yield numbers[0]
    if last:
        yield numbers[-1]
