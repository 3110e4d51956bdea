"""A device without a GPU: arrays that the host cannot access, and a backend that records what is done to them."""

import threading

import numpy as np

from spmd_engine.arrays.backend import Backend


class DeviceArray:
    """Behaves like CuPy's array where the engine uses it; use as a host array raises TypeError."""

    __array_ufunc__ = None

    def __init__(self, device, memory):
        self.device, self.memory = device, memory

    def __getattr__(self, name):
        if name in ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "flags"):
            return getattr(self.memory, name)
        raise AttributeError(name)

    def __array__(self, *args, **options):
        raise TypeError("a device array was taken for a host array")

    # Views copy nothing.

    def reshape(self, *shape):
        return DeviceArray(self.device, self.memory.reshape(*shape))

    def view(self, dtype):
        return DeviceArray(self.device, self.memory.view(dtype))

    def __getitem__(self, index):
        return DeviceArray(self.device, self.memory[index])

    # Work is queued, and executed at the latest in the next synchronize().

    def __setitem__(self, index, value):
        self.memory[index] = self.device.work(value)

    def __itruediv__(self, number):
        self.memory /= self.device.work(number)
        return self

    def copy(self):
        return DeviceArray(self.device, self.device.work(self).copy())

    def astype(self, dtype):
        return DeviceArray(self.device, self.device.work(self).astype(dtype))


class Module:
    """The array module of the device: NumPy's functions on device arrays."""

    uint8 = np.uint8

    def __init__(self, device):
        self.device = device

    def empty(self, shape, dtype):
        return DeviceArray(self.device, np.empty(shape, dtype))

    def may_share_memory(self, a, b):
        return np.may_share_memory(a.memory, b.memory)

    def __getattr__(self, name):
        def function(*args, out=None, **options):
            args = [[self.device.work(x) for x in arg] if isinstance(arg, list) else arg for arg in args]
            args = [self.device.work(arg) if isinstance(arg, DeviceArray) else arg for arg in args]
            if out is not None:
                options["out"] = self.device.work(out)
            return DeviceArray(self.device, np.asarray(getattr(np, name)(*args, **options)))

        return function


class FakeDevice(Backend):
    """``events``: the operations that this thread, and so this rank, started on the device."""

    name, on_device = "fake", True

    def __init__(self):
        self.xp = Module(self)
        self._local = threading.local()
        self._pinned = []

    @property
    def events(self):
        return self._local.__dict__.setdefault("events", [])

    def work(self, x):
        """The memory of ``x``, for work on the device; numbers are allowed, host arrays are not."""
        self.events.append("work")
        if isinstance(x, np.ndarray) and x.ndim:
            raise TypeError("a host array was taken for a device array")
        return x.memory if isinstance(x, DeviceArray) else x

    def owns(self, x):
        return isinstance(x, DeviceArray)

    def synchronize(self):
        self.events.append("synchronize")

    def asarray(self, x):
        if self.owns(x):
            return x
        self.events.append("from_host")
        return DeviceArray(self, np.array(x))

    def to_host(self, x):
        self.events.append("to_host")
        return x.memory.copy()

    def copy_to_host(self, x, host):
        assert any(host is pinned for pinned in self._pinned), "staged through ordinary memory"
        self.events.append("to_host")
        host[...] = x.memory

    def pinned_empty(self, shape, dtype):
        self._pinned.append(np.empty(shape, dtype))
        return self._pinned[-1]


def watch(comm, device, *, aware):
    """Make ``comm`` record the device memory that it receives; TypeError unless it is device-aware."""

    def watched(start):
        def start_on_memory(data, *where):
            if not isinstance(data, DeviceArray):
                return start(data, *where)
            if not aware:
                raise TypeError("device memory was given to a communicator that cannot read it")
            device.events.append("start")
            assert data.flags.c_contiguous
            return start(data.memory, *where)

        return start_on_memory

    comm.device_aware = aware
    comm.start_send, comm.start_receive = watched(comm.start_send), watched(comm.start_receive)
    return comm
