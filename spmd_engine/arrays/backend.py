"""Backends: the array module of a device, its kernels, and copies to the host.

Every other file writes ``xp = backend_of(x).xp`` and then NumPy's names, so that the same code runs on
NumPy and on CuPy; for functions marked ``@fused`` a backend may have kernels of the same names instead. A
device computes on one stream, and copies on another; events say when an array is complete, so that neither the host
nor a stream waits for more than it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import Any
from warnings import catch_warnings

import numpy as np

from spmd_engine.arrays.numba.functions import FastFunctions, fast_functions
from spmd_engine.arrays.numba.images import FastImages, fast_images
from spmd_engine.errors import UsageError, one_of

_INSTALL = "pip install 'spmd_engine[cuda13]', or [cuda12] for a driver before 580"

Array = Any  # numpy.ndarray or cupy.ndarray; neither library offers a common base class


class Backend:
    """NumPy on the host: nothing to synchronise, nothing to stage."""

    name = "cpu"
    on_device = False
    memory = 0  #: bytes of a device
    workspace = 1 << 30  #: bytes of a device's memory for temporary arrays of one operation, such as attention's scores
    xp: ModuleType = np
    kernels: Any = None  # functions that replace those marked ``@fused``; ``takes`` selects the arrays
    image_kernels: Any = None  # the same for ``@fused_of_images``
    no_kernels: Any = None  # for ``@computed_wide``

    def enter(self) -> None:
        """Make this thread work on the backend's device and stream, which CUDA has for each thread."""

    def allow_tf32(self, allowed: bool) -> None:
        """Whether float32 products of this thread may round their operands to TF32, which has 11 bits.

        Raises UsageError where it is allowed and no device has it.
        """
        if allowed:
            raise UsageError("--tf32: a CPU has no products of TF32; give --device cuda, or leave it out")

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

    def constant(self, x: Any) -> Array:
        """``asarray`` of a small array, or a list, that nothing changes: a device keeps it."""
        return self.asarray(x)

    def ones(self, size: int, dtype: Any) -> Array:
        """So many ones, which nothing changes: the host keeps them."""
        return self.xp.ones(size, dtype)

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
        return fast_images()

    @lru_cache(maxsize=64)  # noqa: B019 (there is one host)
    def ones(self, size: int, dtype: Any) -> Array:
        ones = np.ones(size, dtype)
        ones.flags.writeable = False
        return ones


def _tried(what: str, remedy: str, attempt: Callable[[], Any]) -> Any:
    """The result of an attempt; UsageError with the remedy if it fails: errors are CuPy's, the loader's or CUDA's."""
    try:
        return attempt()
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"device 'cuda': {what} fails: {reason}; {remedy}") from error


class CudaBackend(Backend):
    """CuPy on one CUDA device. The stream that is current when it is made orders all work, of all threads.

    ``sharing``: the number of processes on the device, see ``share``.
    """

    name = "cuda"
    on_device = True

    def __init__(self, index: int = 0, processes: int = 1, memory: float | None = None) -> None:
        """``index``: of this process among the ``processes`` of its node, which take the node's devices in turn;
        ~index, which is negative: from the last on, as ranks that join a job do, since its ranks have the first.
        ``memory``: the fraction of the device's memory that CuPy may use; by default all, or an equal part if
        processes share a device.

        Raises UsageError if a copy, a product or the compilation of a kernel fails, with what is missing.
        """
        try:
            import cupy  # pyright: ignore[reportMissingImports]  # installed by the extras "cuda12" and "cuda13"
        except ImportError as error:
            raise UsageError(f"device 'cuda' needs CuPy: {_INSTALL}") from error
        from spmd_engine.arrays.cuda import CudaFunctions
        from spmd_engine.arrays.cuda_images import CudaImages

        try:
            devices = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise UsageError(f"device 'cuda': {error}; install NVIDIA's driver, or a newer one. {_INSTALL}") from error
        if not devices:
            raise UsageError("device 'cuda': this process sees no GPU; is CUDA_VISIBLE_DEVICES right?")
        self.xp, self._device = cupy, cupy.cuda.Device(index % devices)
        self._device.use()
        self._stream, self._copies = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
        self._copied: list[tuple[Any, Array]] = []  # host memory from which a copy reads until the event
        self._copying = Lock()  # held while the list changes
        #: Waits until an event is done, in place of the device's own wait, which nothing can interrupt.
        self.await_event: Callable[[Any], None] | None = None
        self.kernels = CudaFunctions(cupy)
        self.image_kernels = CudaImages(self)
        self._constants: dict[tuple, Array] = {}
        self.memory = self._device.mem_info[1]
        self.workspace = self.memory // 64
        self.sharing, self._fraction = 1, memory
        self.share(len(range(max(index, ~index) % devices, processes, devices)))
        self._try_out()

    def share(self, processes: int) -> None:
        """Limit the memory of this process to its part, as so many are on the device, or to the fraction it was given.

        At first their number follows from those of the node's processes and of the devices that this one sees. A
        launcher such as Slurm may show each process another device: ranks then compare addresses.
        """
        if self._fraction is not None or max(processes, self.sharing) > 1:
            part = self._fraction or (0.95 / processes if processes > 1 else None)
            self.xp.get_default_memory_pool().set_limit(fraction=part)
        self.sharing = processes

    def _try_out(self) -> None:
        """Copy, multiply and launch a kernel once, since CuPy loads the libraries of each when it first needs them."""
        x = _tried("copying an array", "is the GPU free, by nvidia-smi?", lambda: self.asarray(np.ones((2, 2))))
        remedy = f"cuBLAS is missing or too old. {_INSTALL}"
        _tried("a product", remedy, lambda: self.to_host(x @ x))
        remedy = f"NVRTC or CUDA's headers are missing, or the GPU is too old. {_INSTALL}"
        _tried("compiling a kernel", remedy, lambda: self.to_host(self.kernels.relu(x, False)[0]))

    @property
    def address(self) -> str:
        """Of the device on the host's bus: that of no other device of the host."""
        return self._device.pci_bus_id

    @property
    def nccl(self) -> Any:
        """CuPy's module of NCCL, which ``cupy.cuda`` does not have until it is imported."""
        with catch_warnings(action="ignore"):  # that the library is missing: ``lacks_nccl`` says so
            return import_module("cupy.cuda.nccl")

    @property
    def lacks_nccl(self) -> str:
        """Why this process has no NCCL, as text; empty: it has."""
        if self.nccl.available:
            return ""
        return "CuPy finds no NCCL: pip install nvidia-nccl-cu13, or nvidia-nccl-cu12"

    def enter(self) -> None:
        self._device.use()
        self._stream.use()

    def allow_tf32(self, allowed: bool) -> None:
        tf32, default = 3, 0  # CUBLAS_TF32_TENSOR_OP_MATH, CUBLAS_DEFAULT_MATH
        self.xp.cuda.cublas.setMathMode(self.xp.cuda.get_cublas_handle(), tf32 if allowed else default)

    def synchronize(self) -> None:
        with self._device:  # the default stream is that of the current device
            if self.await_event is not None:
                self.await_event(self.record())
            self._stream.synchronize()

    def record(self, stream: Any = None) -> Any:
        """An event: the work queued so far, on the stream of computations or on another one. Its ``done`` is a test."""
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(stream or self._stream)
        return event

    def follow(self, event: Any) -> None:
        """Let the computations queued from now on wait for an event; the host does not."""
        self._stream.wait_event(event)

    def owns(self, x: Array) -> bool:
        return isinstance(x, self.xp.ndarray)

    def errstate(self, **kinds: Any) -> AbstractContextManager:
        return nullcontext()

    def asarray(self, x: Array) -> Array:
        return self.xp.asarray(x)

    def constant(self, x: Any) -> Array:
        if self.owns(x):
            return x
        x = np.asarray(x)
        key = x.dtype.str, x.shape, x.tobytes()
        if key not in self._constants:
            self._constants[key] = self.asarray(x)
        return self._constants[key]

    def to_host(self, x: Array) -> np.ndarray:
        if self.await_event is not None:
            self.await_event(self.record())
        return self.xp.asnumpy(x)

    def start_to_host(self, x: Array) -> tuple[np.ndarray, Any]:
        """A copy of contiguous ``x`` in pinned memory, beside computations; it is complete when the event is done."""
        host = self.pinned_empty(x.shape, x.dtype)
        self._copies.wait_event(self.record())
        x.get(stream=self._copies, out=host, blocking=False)
        return host, self.record(self._copies)

    def start_from_host(self, host: np.ndarray, out: Array | None = None) -> tuple[Array, Any]:
        """A copy of ``host`` on the device, or in contiguous ``out``, beside computations, and its event."""
        result = self.empty(host.shape, host.dtype) if out is None else out
        self._copies.wait_event(self.record())  # what used this memory before
        result.set(host, stream=self._copies)
        event = self.record(self._copies)
        with self._copying:
            self._copied = [(before, memory) for before, memory in self._copied if not before.done] + [(event, host)]
        return result, event

    def pinned_empty(self, shape, dtype) -> np.ndarray:
        import cupyx  # pyright: ignore[reportMissingImports]  # a part of CuPy

        # CuPy keeps freed pinned memory in a pool.
        return cupyx.empty_pinned(shape, dtype)


CPU = Host()
_device_backends: list[Backend] = []
_opening = Lock()  # virtual ranks may open the device at once


def register_backend(backend: Backend) -> None:
    """Make ``backend_of`` recognise the arrays of one more device backend."""
    _device_backends.append(backend)


def unregister_backend(backend: Backend) -> None:
    """Undo ``register_backend``."""
    _device_backends.remove(backend)


def get_backend(name: str, index: int = 0, processes: int = 1, memory: float | None = None) -> Backend:
    """The backend called ``"cpu"`` or ``"cuda"``, which this thread enters; raises UsageError if it is missing.

    A process has one device: the arguments are those of CudaBackend, and count in the first call.
    """
    if name == "cpu":
        return CPU
    if name != "cuda":
        raise UsageError(f"unknown device {name!r}; {one_of(name, ('cpu', 'cuda'))}")
    with _opening:
        if not any(backend.name == name for backend in _device_backends):
            register_backend(CudaBackend(index, processes, memory))
    enter_device()
    return next(backend for backend in _device_backends if backend.name == name)


def enter_device() -> None:
    """Make this thread work on the device of this process, if it has one."""
    for backend in _device_backends:
        backend.enter()


def backend_of(x: Array) -> Backend:
    """The backend that owns ``x``. Everything but arrays of a registered device counts as the host's."""
    if type(x) is np.ndarray:
        return CPU
    for backend in _device_backends:
        if backend.owns(x):
            return backend
    if hasattr(x, "__cuda_array_interface__"):
        return get_backend("cuda")
    return CPU


def at_least_one(x: Any) -> Any:
    """max(x, 1) of a number; one on a device stays there."""
    return max(x, 1) if isinstance(x, (int, float)) else backend_of(x).xp.maximum(x, 1)


def number_of(x: Array) -> Any:
    """``x``, of no dims, as a float; on a device it stays an array, for which the host need not wait."""
    return x if backend_of(x).on_device else float(x)
