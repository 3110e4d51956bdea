"""A strict stand-in for CuPy, without a GPU: the real ``CudaBackend`` imports it in place of ``cupy``.

Arrays are opaque: whatever would turn one into an array of the host raises, and so does an array of the host among
those of the device. Names, keywords and the dtypes of results are CuPy's (``cupy_14.json``, written by
scripts/cupy_signatures.py). NumPy computes the values, and ``cuda_on_host`` the kernels. Launches, copies and waits
are recorded for each thread. Each thread has a current device and stream, as in CUDA: memory of another device, or
memory that another stream may still write, raises; so does a write of what another stream may still read, and memory
that is freed, and so used again, while a stream may still use it (``Hazards``). Work is done at once, but for
transfers that wait for other ranks (fake_nccl.py): memory that they write makes a thread wait as a kernel would.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from math import prod
from pathlib import Path
from time import monotonic
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

from spmd_engine.arrays import backend as backends
from spmd_engine.arrays.backend import Backend
from spmd_engine.arrays.meta.backend import LAUNCHES
from spmd_engine.comm.communicators.threads import current_thread_communicator
from spmd_engine.comm.connections import connections_of
from support.cuda_on_host import ELEMENTWISE, REDUCTIONS, HostKernel
from support.threads_on_host import ThreadedKernel

TABLE = json.loads((Path(__file__).parent / "cupy_14.json").read_text())
#: Functions whose results are on the host, and which launch nothing.
OF_DTYPES = "can_cast promote_types result_type issubdtype common_type may_share_memory shape size ndim min_scalar_type"
OF_DTYPES += " broadcast_shapes"
#: Functions that wait for the device, since the shape of the result, or a check, depends on values.
WAIT = {"nonzero", "flatnonzero", "argwhere", "bincount", "unique", "repeat"}


# --- what is recorded


class Recorded(list):
    """Events of one thread, in order: (kind, name); kinds are launch, synchronize, wait, to_host, from_host, start, and
    start_to_host, a copy for which the host does not wait, and is_done, an event that the host finds done."""

    def count(self, *kinds: str) -> int:
        return sum(kind in kinds for kind, _ in self)

    @property
    def launches(self) -> list[str]:
        return [name for kind, name in self if kind == "launch"]

    @property
    def syncs(self) -> int:
        """How often the host waits for the device."""
        return self.count("synchronize", "wait", "to_host")


class _Thread(threading.local):
    def __init__(self):
        self.events, self.device, self.streams, self.math_mode = Recorded(), 0, {}, 0


_thread = _Thread()


def events() -> Recorded:
    """Of this thread, and so of this rank."""
    return _thread.events


def math_mode() -> int:
    """Of cuBLAS in this thread."""
    return _thread.math_mode


def record(kind: str, name: str = "", times: int = 1) -> None:
    _thread.events.extend([(kind, name)] * times)


# --- devices and streams


class Device:
    def __init__(self, device: int | None = None) -> None:
        self.id = _thread.device if device is None else int(device)
        if self.id >= cupy.devices:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self._before: list[int] = []

    def use(self) -> None:
        _thread.device = self.id

    def __enter__(self) -> Device:
        self._before.append(_thread.device)
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        _thread.device = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    @property
    def pci_bus_id(self) -> str:
        return f"0000:{self.id:02x}:00.0"

    @property
    def mem_info(self) -> tuple[int, int]:
        return 60 << 30, 80 << 30


_clock = count(1)  # of all work, in the order of the host
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()  # by what they have for a pointer
_host: dict[int, int] = {}  # by stream: the time up to which the host has found its work complete


class Stream:
    """``after``: by stream, the time up to which that one's work is complete before the next work here."""

    def __init__(self, null: bool = False, non_blocking: bool = False, device: int | None = None) -> None:
        self.device_id, self.after = _thread.device if device is None else device, {}
        self.ptr, self.unfinished = next(_clock), []  # transfers that wait for other ranks: see fake_nccl
        self._before: list[Stream | None] = []
        _streams[self.ptr] = self

    def use(self) -> Stream:
        _thread.streams[self.device_id] = self
        return self

    def __enter__(self) -> Stream:
        if self.device_id != _thread.device:
            raise RuntimeError("the stream is of another device than the current one")
        self._before.append(_thread.streams.get(self.device_id))
        return self.use()

    def __exit__(self, *_: object) -> None:
        _thread.streams[self.device_id] = self._before.pop()

    def wait_event(self, event: Event) -> None:
        _merge(self.after, event.complete)
        self.unfinished.extend(event._unfinished)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record().synchronize()

    def of_this_rank(self) -> list:
        """Its transfers that are not complete, of this thread's rank: virtual ranks share a stream of computations."""
        here = threading.get_ident()
        return [work for work in list(self.unfinished) if work.thread == here and not work.is_set()]


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.complete: dict[int, int] = {}  # by stream: the time up to which its work is complete when this is done
        self._unfinished: list = []

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or get_current_stream()
        with _merging:
            self.complete = stream.after | {stream.ptr: next(_clock)}
        self._unfinished = stream.of_this_rank()

    @property
    def done(self) -> bool:
        if not all(work.is_set() for work in self._unfinished):
            return False
        record("is_done")
        _merge(_host, self.complete)
        return True

    def synchronize(self) -> None:
        record("synchronize")
        for work in self._unfinished:
            finish(work)
        _merge(_host, self.complete)


_merging = threading.Lock()


def _merge(known: dict[int, int], more: dict[int, int]) -> None:
    with _merging:
        known.update({stream: max(time, known.get(stream, 0)) for stream, time in more.items()})


def finish(work: threading.Event) -> None:
    """Wait as a device does; ranks that never come are an error of the test, not a hang.

    Meanwhile the host would go on, to its next wait, in which this rank's other calls advance.
    """
    until = monotonic() + 100
    while not work.wait(2e-3):
        rank = current_thread_communicator()
        for operation in tuple(rank.progress._pending) if rank is not None else ():
            if not operation._steps.gi_running:
                rank.progress._advance(operation)
        if monotonic() > until:
            raise TimeoutError("a device waits for a transfer that does not end")


def _set_limit(size: int | None = None, fraction: float | None = None) -> None:
    cupy.memory_limit = fraction


class CUDARuntimeError(RuntimeError):
    pass


def get_current_stream() -> Stream:
    return _thread.streams.get(_thread.device) or cupy.null_streams[_thread.device]


# --- arrays


#: Uses of memory by streams that nothing orders, found where no exception can be raised.
hazards: list[str] = []


class _Memory:
    """What arrays that share memory have in common: where it is, its pool, and when which stream last used it."""

    __slots__ = ("device", "pool", "values", "begin", "end", "transfers", "_written", "_read", "__weakref__")

    def __init__(self, values: np.ndarray) -> None:
        self.device, self.pool, self.values = _thread.device, get_current_stream(), values
        #: What still reads or writes it: see fake_nccl.
        self.transfers: list[threading.Event] = []
        self._written: tuple[Stream, int] = self.pool, next(_clock)
        self._read: dict[Stream, int] = {}
        self.begin, self.end = np.lib.array_utils.byte_bounds(values)
        _memories[id(self)] = self

    def use(self, write: bool = False, stream: Stream | None = None, queued: bool = False) -> None:
        """Order a use after the earlier ones. ``queued``: it is itself a transfer, after others on its stream."""
        if self.device != _thread.device:
            raise TypeError(f"memory of device {self.device} is used while device {_thread.device} is current")
        stream = stream or get_current_stream()
        if not queued:
            self.finish()
        if not _is_before(*self._written, stream):
            raise TypeError("memory is used that another stream may still write")
        if not write:
            self._read[stream] = next(_clock)
            return
        if not all(_is_before(*read, stream) for read in self._read.items()):
            raise TypeError("memory is written that another stream may still read")
        self._written, self._read = (stream, next(_clock)), {}

    def finish(self) -> None:
        """Wait as a kernel does that uses it after these transfers."""
        for work in self.transfers:
            finish(work)

    def __del__(self) -> None:
        uses = [*self._read.items(), self._written]
        if self.end > self.begin and not all(_is_before(*use, self.pool) for use in uses):
            hazards.append("memory is freed, and so used again, that another stream may still use")


_memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


def memory_at(pointer: int, size: int) -> _Memory:
    """The memory with ``size`` bytes at this address."""
    for memory in [reference() for reference in _memories.valuerefs()]:
        if memory is not None and memory.begin <= pointer and pointer + size <= memory.end:
            return memory
    raise ValueError(f"{size} bytes at {pointer:#x} are not in an array of the device")


def _is_before(first: Stream, time: int, stream: Stream) -> bool:
    """Whether work of ``first`` at this time is complete before work of ``stream`` that begins now."""
    return first is stream or max(stream.after.get(first.ptr, 0), _host.get(first.ptr, 0)) >= time


class ndarray:
    """``memory``: the values, for tests."""

    __slots__ = ("memory", "_owner")
    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, memory: np.ndarray, owner: _Memory | None = None) -> None:
        self.memory, self._owner = memory, owner or _Memory(memory)

    def __array__(self, *args: object, **options: object) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    @property
    def device(self) -> Device:
        return Device(self._owner.device)

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.memory.ctypes.data)

    @property
    def T(self) -> ndarray:
        return ndarray(self.memory.T, self._owner)

    def __getitem__(self, index: object) -> ndarray:
        index, masks = _index(index)
        if masks:
            record("wait", "a boolean index")
        if not _is_basic(index):
            return _launched("take", _of_device(self)[index], [self], 1 + 3 * masks)
        parts = index if isinstance(index, tuple) else (index,)
        return ndarray(self.memory[parts if any(part is ... for part in parts) else (*parts, ...)], self._owner)

    def __setitem__(self, index: object, value: object) -> None:
        index, masks = _index(index)
        if masks and isinstance(value, ndarray) and value.memory.ndim:
            record("wait", "a boolean index")
        self._owner.finish()
        self.memory[index] = _of_device(value)
        _use([value])
        self._owner.use(write=True)
        record("launch", "copy")

    def __len__(self) -> int:
        return len(self.memory)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    # To the host: each waits for the device.

    def get(self, stream: Stream | None = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True):
        stream = stream or get_current_stream()
        self._owner.use(stream=stream)
        if blocking:
            record("to_host")
            for work in stream.of_this_rank():
                finish(work)
            _merge(_host, stream.after | {stream.ptr: next(_clock)})
        else:
            record("start_to_host")
            if out is None or not self.memory.flags.c_contiguous:
                raise TypeError("an array is copied without a wait, to memory or by a kernel of which nothing is known")
        if out is None:
            return self.memory.copy(order=order)  # type: ignore[arg-type]
        if not any(each() is out for each in _pinned):
            raise TypeError("device memory is copied to memory that is not pinned")
        if out.dtype != self.memory.dtype or out.shape != self.memory.shape:
            raise TypeError(f"get of {self.memory.dtype}{self.memory.shape} into {out.dtype}{out.shape}")
        out[...] = self.memory
        return out

    def item(self) -> float:
        return self.get().item()

    def tolist(self) -> list:
        return self.get().tolist()

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def set(self, arr: np.ndarray, stream: Stream | None = None) -> None:
        if not isinstance(arr, np.ndarray) or arr.dtype != self.memory.dtype or arr.shape != self.memory.shape:
            raise TypeError("set() takes an array of the host of the same shape and dtype")
        self._owner.use(write=True, stream=stream)
        record("from_host")
        self.memory[...] = arr

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True) -> ndarray:
        if not copy and self.memory.dtype == dtype:
            return self
        return _launched("astype", _of_device(self).astype(dtype, order), [self])

    def view(self, dtype=None, type=None) -> ndarray:
        return ndarray(self.memory.view(self.memory.dtype if dtype is None else dtype), self._owner)


for _name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags"):
    setattr(ndarray, _name, property(lambda self, name=_name: getattr(self.memory, name)))


def _index(index: object) -> tuple[object, int]:
    """The index for NumPy, and the number of boolean arrays in it."""
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if isinstance(part, (list, range)) or (isinstance(part, np.ndarray) and part.ndim):
            raise TypeError(f"an index of the device is a {type(part).__name__} of the host")
    _use(parts)
    arrays = [part for part in parts if isinstance(part, ndarray)]
    plain = tuple(part.memory if isinstance(part, ndarray) else part for part in parts)
    masks = sum(part.memory.dtype == bool for part in arrays)
    return (plain if isinstance(index, tuple) else plain[0]), masks


def _is_basic(index: object) -> bool:
    return not any(isinstance(part, np.ndarray) for part in (index if isinstance(index, tuple) else (index,)))


def _of_device(x: object) -> object:
    """The values of ``x``; numbers stay as they are, and arrays of the host raise."""
    if isinstance(x, ndarray):
        x._owner.finish()
        return x.memory
    if isinstance(x, np.ndarray):
        raise TypeError("an array of the host was taken for one of the device: unsupported type numpy.ndarray")
    if isinstance(x, (list, tuple)):
        return type(x)(_of_device(each) for each in x)
    return x


def _arrays(args: object) -> Iterator[ndarray]:
    for arg in args:  # type: ignore[attr-defined]
        if isinstance(arg, ndarray):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _arrays(arg)


def _use(args: object) -> None:
    for x in _arrays(args):
        x._owner.use()


def _launched(name: str, result: object, args: object, times: int | None = None) -> ndarray:
    """``result``, written by a launch that read ``args``; or a view of one of them, without a launch."""
    values = np.asarray(result)
    for x in _arrays(args):
        if values.size and np.may_share_memory(values, x.memory):
            return ndarray(values, x._owner)
    _use(args)
    record("launch", name, LAUNCHES.get(name, 1) if times is None else times)
    made = ndarray(values)
    made._owner.use(write=True)
    return made


def _with_out(name: str, out: ndarray, args: object) -> ndarray:
    _use(args)
    record("launch", name, LAUNCHES.get(name, 1))
    out._owner.use(write=True)
    return out


# --- functions


def _binder(name: str, parameters: str):
    """A function that takes what CuPy's does, and raises TypeError for all else."""
    bind = eval(f"lambda {parameters}: None", {"float": float, "int": int})
    bind.__name__ = bind.__qualname__ = f"cupy.{name}"
    return bind


def _function(name: str, parameters: str, of_numpy, *, method: bool = False):
    bind, on_host = _binder(name, parameters), name in OF_DTYPES.split()

    def call(*args, **options):
        bind(*args, **options)
        plain = {key: _of_device(value) for key, value in options.items()}
        if name == "matmul":
            _check_out(plain)
            if any(x.dtype == ml_dtypes.bfloat16 and x.ndim > 2 for x in _arrays(args)):
                raise TypeError("CuPy cannot multiply batches of bfloat16")
        result = of_numpy(*[_of_device(arg) for arg in args], **plain)
        given = (*args, *options.values())
        if on_host:
            return result
        if name in WAIT and not (name == "repeat" and isinstance(args[1], int)):
            record("wait", name)
        if isinstance(options.get("out"), ndarray):
            return _with_out(name, options["out"], given)
        if result is None:
            _use(given)
            return record("launch", name)
        if isinstance(result, (tuple, list)):
            return tuple(_launched(name, part, given, 1) for part in result)
        return _launched(name, result, given, 0 if name.startswith("empty") else _times(name, args))

    call.__name__ = name
    return call


def _check_out(options: dict) -> None:
    if options.get("out") is not None and not isinstance(options["out"], np.ndarray):
        raise TypeError("out must be an array")


def _times(name: str, args: tuple) -> int | None:
    """Launches: a product copies operands whose last two dims are not one after the other in memory."""
    if name not in ("matmul", "dot"):
        return None
    return 1 + sum(not _is_for_blas(x.memory) for x in _arrays(args))


def _is_for_blas(x: np.ndarray) -> bool:
    if x.ndim > 2:
        return x.flags.c_contiguous
    return x.ndim < 2 or x.itemsize in x.strides[-2:] or prod(x.shape[-2:]) < 2


def _dtype(char: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if char == "E" else char)


class ufunc:
    """The first loop of CuPy's that takes the operands decides the dtype of the result, as in CuPy."""

    def __init__(self, name: str, loops: str) -> None:
        self.__name__, self._numpy = name, getattr(np, name)
        self.types = loops.split()

    def __call__(self, *args, out=None, dtype=None, casting="same_kind"):
        number = self._numpy.nin
        if len(args) > number:
            args, out = args[:number], args[number:] if len(args) > number + 1 else args[number]
        plain = [_of_device(x) for x in args]
        if not any(isinstance(x, np.ndarray) for x in plain) and not isinstance(out, ndarray):
            raise TypeError(f"cupy.{self.__name__} of numbers alone")
        kinds = tuple(x.dtype if isinstance(x, (np.ndarray, np.generic)) else type(x) for x in plain)
        loop = self._loop(kinds) if dtype is None else None
        options = {"dtype": dtype} if dtype is not None else {"signature": loop} if loop else {}
        if loop:
            plain = [x if isinstance(x, (np.ndarray, np.generic)) else x for x in plain]
        target = _of_device(out)
        if isinstance(target, tuple):
            options["out"] = target
        elif target is not None:
            options["out"] = (target,)
        with np.errstate(all="ignore"):
            result = self._numpy(*plain, casting=casting, **options)
        if isinstance(out, ndarray):
            return _with_out(self.__name__, out, args)
        if isinstance(result, tuple):
            return tuple(_launched(self.__name__, part, args, int(part is result[0])) for part in result)
        return _launched(self.__name__, result, args)

    @cache  # noqa: B019 (there is one instance for each name)
    def _loop(self, kinds: tuple) -> tuple | None:
        resolved = self._numpy.resolve_dtypes((*kinds, *[None] * self._numpy.nout), casting="same_kind")
        inputs = resolved[: len(kinds)]
        for text in self.types:
            of_inputs, _, of_outputs = text.partition("->")
            if all(np.can_cast(given, _dtype(char)) for given, char in zip(inputs, of_inputs, strict=True)):
                loop = tuple(map(_dtype, of_inputs + of_outputs))
                return None if loop == resolved else loop
        raise TypeError(f"cupy.{self.__name__} has no loop for {[str(kind) for kind in kinds]}")

    def accumulate(self, array, axis=0, dtype=None, out=None):
        if self.__name__ not in ("add", "multiply"):
            raise NotImplementedError(f"`{self.__name__}.accumulate` is not supported")
        return _launched("cumsum", self._numpy.accumulate(_of_device(array), axis, dtype), [array])

    def reduceat(self, array, indices, axis=0, dtype=None, out=None):
        if self.__name__ != "add":
            raise NotImplementedError(f"`{self.__name__}.reduceat` is not supported")
        return _launched("reduceat", np.add.reduceat(_of_device(array), _of_device(indices), axis, dtype), [array])

    def at(self, a, indices, b=None) -> None:
        self._numpy.at(_of_device(a), _index(indices)[0], _of_device(b))
        _with_out(f"{self.__name__}.at", a, [a, b])


def _asarray(a, dtype=None, order=None, *, blocking=False, copy=None):
    if isinstance(a, ndarray):
        return a if dtype is None or a.memory.dtype == dtype else a.astype(dtype)
    if isinstance(a, (list, tuple)) and any(isinstance(x, ndarray) for x in a):
        raise TypeError("an array of arrays of the device: use stack")
    record("from_host")
    made = ndarray(np.array(a, dtype))
    made._owner.use(write=True)
    return made


def _array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    made = _asarray(obj, dtype)
    return made.copy() if made is obj and copy else made


_ALONE = {"neg": "negative", "invert": "invert", "abs": "absolute"}
_COMPARISONS = dict(lt="less", le="less_equal", eq="equal", ne="not_equal", gt="greater", ge="greater_equal")
_OPERATORS = dict(add="add", sub="subtract", mul="multiply", truediv="true_divide", floordiv="floor_divide")
_OPERATORS |= {"mod": "remainder", "pow": "power", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
_OPERATORS |= dict(lshift="left_shift", rshift="right_shift", matmul="matmul")
_CONSTANTS = """int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bool_ dtype finfo iinfo inf
    nan newaxis pi e"""


def _methods() -> None:
    for name, parameters in TABLE["methods"].items():
        if name not in vars(ndarray) and hasattr(np.ndarray, name):
            setattr(ndarray, name, _function(name, parameters, getattr(np.ndarray, name), method=True))
    for name, of_cupy in (_ALONE | _COMPARISONS).items():
        _operator(name, of_cupy, "")
    for name, of_cupy in _OPERATORS.items():
        _operator(name, of_cupy, "r" if name == "matmul" else "ri")  # CuPy has no product in place


def _operator(name: str, of_cupy: str, variants: str) -> None:
    function = getattr(cupy, of_cupy)
    setattr(ndarray, f"__{name}__", lambda *operands: function(*operands))
    if "r" in variants:
        setattr(ndarray, f"__r{name}__", lambda x, y: function(y, x))
    if "i" in variants:
        setattr(ndarray, f"__i{name}__", lambda x, y: function(x, y, out=x))


# --- kernels


class _Kernel:
    """A kernel of the package, compiled for the host and called like CuPy's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args, axis=None, size=None):
        kernel = HostKernel(cupy.library, self.name)
        _use(args)
        results = kernel([_of_device(x) for x in args], axis=axis, size=size)
        record("launch", self.name, bool(results[0].size))
        given = {id(x.memory): x for x in args if isinstance(x, ndarray)}
        outputs = [given[id(result)] if id(result) in given else ndarray(result) for result in results]
        for output in outputs:
            output._owner.use(write=True)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _elementwise(in_params, out_params, operation, name, **options):
    assert ELEMENTWISE[name] == (in_params, out_params, operation) and not options
    return _Kernel(name)


def _reduction(*, name, **text):
    assert REDUCTIONS[name]._asdict() == text
    return _Kernel(name)


class _RawKernel:
    """Arrays that the text declares const are read, all others are written. Numbers have 8 bytes, as CuPy's."""

    def __init__(self, code: str, name: str, options: tuple = ()) -> None:
        assert not options
        self.name = name
        self.kernel = ThreadedKernel(code, name, Path(cupy.library._name).parent)
        parameters = code[code.index(f" {name}(") + len(name) + 2 :].partition(") {")[0]
        self.read_only = [each.split()[0] == "const" for each in parameters.split(",")]

    def __call__(self, grid, block, args, *, shared_mem=0) -> None:
        assert len(args) == len(self.read_only) and not shared_mem, self.name
        _use(args)
        self.kernel(grid, block, [_of_device(x) for x in args])
        record("launch", self.name)
        for x, read_only in zip(args, self.read_only):
            if isinstance(x, ndarray) and not read_only:
                x._owner.use(write=True)


# --- cuBLAS


class Cublas:
    """The functions of cuBLAS that the package calls, on addresses; matrices are stored by columns."""

    _types = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}

    def setMathMode(self, handle: int, mode: int) -> None:
        _thread.math_mode = mode

    def gemmStridedBatchedEx(
        self, handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb, strideB, beta, C, Ctype,
        ldc, strideC, batchCount, computeType, algo,
    ) -> None:  # fmt: skip
        if computeType != 68 or algo != -1 or Atype != Btype or Ctype not in (0, Atype):
            raise CUDARuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        a = self._matrices(A, Atype, (k, m) if transa else (m, k), lda, strideA, batchCount)
        b = self._matrices(B, Btype, (n, k) if transb else (k, n), ldb, strideB, batchCount)
        c = self._matrices(C, Ctype, (m, n), ldc, strideC, batchCount)
        for x, address in ((a, A), (b, B), (c, C)):
            memory_at(address, x.itemsize).use(write=x is c)
        a, b = (x.transpose(0, 2, 1) if turned else x for x, turned in ((a, transa), (b, transb)))
        c[...] = a.astype(np.float32) @ b.astype(np.float32)
        record("launch", "gemm")

    def _matrices(self, address: int, kind: int, shape: tuple, lead: int, stride: int, count: int) -> np.ndarray:
        if lead < max(1, shape[0]):
            raise CUDARuntimeError("CUBLAS_STATUS_INVALID_VALUE: a leading dimension is too small")
        dtype = self._types[kind]
        size = (stride * (count - 1) + lead * (shape[1] - 1) + shape[0]) * dtype.itemsize
        memory = np.frombuffer((ctypes.c_char * size).from_address(address), dtype)
        steps = [each * dtype.itemsize for each in (stride, 1, lead)]
        return np.lib.stride_tricks.as_strided(memory, (count, *shape), steps)


# --- the modules


def _build() -> ModuleType:
    module = ModuleType("cupy")
    for name, loops in TABLE["ufuncs"].items():
        setattr(module, name, ufunc(name, loops))
    for name, parameters in TABLE["functions"].items():
        if hasattr(np, name):
            setattr(module, name, _function(name, parameters, getattr(np, name)))
    module.linalg = SimpleNamespace(
        **{name: _function(name, parameters, getattr(np.linalg, name)) for name, parameters in TABLE["linalg"].items()}
    )
    for name in _CONSTANTS.split():
        setattr(module, name, getattr(np, name))
    module.__version__, module.ndarray = TABLE["version"], ndarray
    module.asarray, module.array = _asarray, _array
    module.asnumpy = lambda a, stream=None, order="C", out=None, *, blocking=True: a.get(stream, order, out)
    module.ascontiguousarray = lambda a, dtype=None: a if a.flags.c_contiguous else a.copy()
    module.ElementwiseKernel, module.ReductionKernel, module.RawKernel = _elementwise, _reduction, _RawKernel
    module.library = None  # the compiled kernels
    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDeviceCount=lambda: module.devices)
    module.get_default_memory_pool = lambda: SimpleNamespace(set_limit=_set_limit)
    module.cuda = SimpleNamespace(Device=Device, Stream=Stream, Event=Event, runtime=runtime)
    module.cuda.get_current_stream = get_current_stream
    module.cuda.cublas, module.cuda.get_cublas_handle = Cublas(), lambda: 1
    return module


cupy = _build()
cupy.devices = 1
_methods()
cupyx = ModuleType("cupyx")
_pinned: list[weakref.ref] = []


def _empty_pinned(shape, dtype=float, order="C"):
    made = np.empty(shape, dtype)
    _pinned[:] = [each for each in _pinned if each() is not None] + [weakref.ref(made)]
    return made


def pinned_addresses() -> set[int]:
    return {made.ctypes.data for each in _pinned if (made := each()) is not None}


cupyx.empty_pinned = _empty_pinned


@contextmanager
def installed(library, devices: int = 1, *, index: int | None = None, stream: bool = False) -> Iterator[Backend]:
    """``import cupy`` imports the stand-in here, with so many devices and these compiled kernels.

    With an ``index``, or without several devices, yields the backend of that one; ``stream``: it gets a stream of its
    own."""
    # As in CuPy, ``cupy.cuda`` has no attribute ``nccl`` until the module is imported.
    modules = {"cupy": cupy, "cupyx": cupyx, "cupy.cuda.nccl": SimpleNamespace(available=False)}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    cupy.library, cupy.devices, cupy.memory_limit = library, devices, None
    cupy.null_streams = [Stream(device=number) for number in range(devices)]
    _thread.__init__()
    try:
        if stream:
            with Device(index):
                Stream(non_blocking=True).use()
        yield backends.get_backend("cuda", index or 0) if index is not None or devices == 1 else None
        assert not hazards, hazards[0]
    finally:
        hazards.clear()
        for backend in [each for each in backends._device_backends if each.name == "cuda"]:
            backends.unregister_backend(backend)
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        _thread.__init__()


# --- communicators


def watch(comm, *, aware):
    """Make ``comm`` record the device memory that it receives; TypeError unless it is device-aware."""

    def watched(start):
        def start_on_memory(data, *where):
            if not isinstance(data, ndarray):
                return start(data, *where)
            if not aware:
                raise TypeError("device memory was given to a communicator that cannot read it")
            record("start")
            assert data.flags.c_contiguous
            return start(data.memory, *where)

        return start_on_memory

    connections_of(comm).device_aware = comm.is_device_aware = aware
    comm.start_send, comm.start_receive = watched(comm.start_send), watched(comm.start_receive)
    return comm
