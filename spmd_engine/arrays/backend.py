"""Backends: the array module of a device, its kernels, and copies to the host.

Every other file writes ``xp = backend_of(x).xp`` and then NumPy's names, so that the same code runs on
NumPy and on CuPy; for functions marked ``@fused`` a backend may have kernels of the same names instead. A
backend can also wait for its device and stage an array through pinned host memory; communication needs both,
since MPI does neither.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_engine.arrays.numba.functions import FastFunctions, fast_functions
from spmd_engine.errors import UsageError, one_of

if TYPE_CHECKING:
    from spmd_engine.arrays.numba.images import FastImages

Array = Any  # numpy.ndarray or cupy.ndarray; neither library offers a common base class


class Backend:
    """NumPy on the host: nothing to synchronise, nothing to stage."""

    name = "cpu"
    on_device = False
    xp: ModuleType = np
    kernels: Any = None  # functions that replace those marked ``@fused``; ``takes`` selects the arrays
    image_kernels: Any = None  # the same for ``@fused_of_images``

    def synchronize(self) -> None:
        """Return once all work queued for arrays of this backend has finished."""

    def owns(self, x: Array) -> bool:
        return isinstance(x, np.ndarray)

    def errstate(self, **kinds: Any) -> AbstractContextManager:
        """``with backend.errstate(over="ignore"): ...``, as NumPy's; devices never warn."""
        return np.errstate(**kinds)

    def empty(self, shape, dtype) -> Array:
        return self.xp.empty(shape, dtype)

    def asarray(self, x: Array) -> Array:
        """``x`` as an array of this backend; moves bytes only if needed."""
        return np.asarray(backend_of(x).to_host(x))

    def to_host(self, x: Array) -> np.ndarray:
        return x

    def copy_to_host(self, x: Array, host: np.ndarray) -> None:
        np.copyto(host, x)

    def pinned_empty(self, shape, dtype) -> np.ndarray:
        """Host memory from which this backend's device copies fastest."""
        return np.empty(shape, dtype)


class Host(Backend):
    """NumPy, with compiled loops where Numba is installed."""

    @cached_property
    def kernels(self) -> FastFunctions | None:
        return fast_functions()

    @cached_property
    def image_kernels(self) -> FastImages | None:
        """Separate, since they take longer to compile than all others, and most models have no images."""
        from spmd_engine.arrays.numba.images import fast_images

        return fast_images()


class CudaBackend(Backend):
    """CuPy on one CUDA device. The current stream orders all work."""

    name = "cuda"
    on_device = True

    def __init__(self, index: int = 0) -> None:
        """``index``: the rank's number on its node; ranks take the node's devices in turn."""
        try:
            import cupy  # pyright: ignore[reportMissingImports]  # installed by the extra "cuda"
        except ImportError as error:
            raise UsageError("device 'cuda' needs CuPy: pip install 'spmd_engine[cuda]'") from error
        try:
            cupy.cuda.Device(index % cupy.cuda.runtime.getDeviceCount()).use()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise UsageError(f"device 'cuda': {error}. Is there a GPU, and its driver?") from error
        from spmd_engine.arrays.cuda import CudaFunctions

        self.xp = cupy
        self.kernels = CudaFunctions(cupy)

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()

    def owns(self, x: Array) -> bool:
        return isinstance(x, self.xp.ndarray)

    def errstate(self, **kinds: Any) -> AbstractContextManager:
        return nullcontext()

    def asarray(self, x: Array) -> Array:
        return self.xp.asarray(x)

    def to_host(self, x: Array) -> np.ndarray:
        return self.xp.asnumpy(x)

    def copy_to_host(self, x: Array, host: np.ndarray) -> None:
        x.get(out=host)

    def pinned_empty(self, shape, dtype) -> np.ndarray:
        import cupyx  # pyright: ignore[reportMissingImports]  # a part of CuPy

        return cupyx.empty_pinned(shape, dtype)


CPU = Host()
_device_backends: list[Backend] = []


def register_backend(backend: Backend) -> None:
    """Make ``backend_of`` recognise the arrays of one more device backend."""
    _device_backends.append(backend)


def unregister_backend(backend: Backend) -> None:
    """Undo ``register_backend``."""
    _device_backends.remove(backend)


def get_backend(name: str, index: int = 0) -> Backend:
    """The backend called ``"cpu"`` or ``"cuda"`` (the ``index``-th device); raises UsageError if it is missing."""
    if name == "cpu":
        return CPU
    for backend in _device_backends:
        if backend.name == name:
            return backend
    if name != "cuda":
        raise UsageError(f"unknown device {name!r}; {one_of(name, ('cpu', 'cuda'))}")
    backend = CudaBackend(index)
    register_backend(backend)
    return backend


def backend_of(x: Array) -> Backend:
    """The backend that owns ``x``. Everything but arrays of a registered device counts as the host's."""
    for backend in _device_backends:
        if backend.owns(x):
            return backend
    if not isinstance(x, np.ndarray) and hasattr(x, "__cuda_array_interface__"):
        return get_backend("cuda")
    return CPU
