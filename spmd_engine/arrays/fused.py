"""``@fused``: one name for a function, whether NumPy works it off in pieces or a backend has a kernel for all of it."""

from collections.abc import Callable
from functools import wraps

from spmd_engine.arrays.backend import Array, backend_of


def kernels_for(x: Array):
    """The kernels that take ``x``; None if NumPy's calls, or CuPy's, compute with it."""
    kernels = backend_of(x).kernels
    return kernels if kernels is not None and kernels.takes(x) else None


def fused(function: Callable) -> Callable:
    """Where the first argument's backend has ``kernels`` that take it, theirs of this name runs, else ``function``.

    The body below the decorator is what is computed, whoever computes it. A backend's kernels have the functions that
    are so marked with the same signatures, all or some of them.
    """
    name = function.__name__

    @wraps(function)
    def run(x: Array, *others, **options):
        kernels = kernels_for(x)
        chosen = function if kernels is None else getattr(kernels, name, function)
        return chosen(x, *others, **options)

    return run
