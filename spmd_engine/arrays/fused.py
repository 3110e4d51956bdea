"""``@fused``: one name for a function, whether NumPy works it off in pieces or a backend has a kernel for all of it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from spmd_engine.arrays.backend import Array, Backend, backend_of


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
