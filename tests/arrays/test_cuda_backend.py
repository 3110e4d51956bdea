"""The start of a CUDA device, and the threads that work on it."""

import sys
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_engine import run_threads, world
from spmd_engine.arrays.backend import get_backend
from spmd_engine.comm.pending import ProgressThread
from spmd_engine.errors import UsageError
from support import fake_cupy


@pytest.fixture
def start(library):
    """Open a device of a node, in a process that is one of several."""

    def started(devices=1, **options):
        with fake_cupy.installed(library, devices):
            return get_backend("cuda", **options)

    return started


def fails(error):
    def call(*args, **options):
        raise error

    return call


MISSING = {
    "no CuPy": (lambda patch: patch.setitem(sys.modules, "cupy", None), "needs CuPy: pip install"),
    "no driver": (
        lambda patch: patch.setattr(
            fake_cupy.cupy.cuda.runtime,
            "getDeviceCount",
            fails(fake_cupy.CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")),
        ),
        "InsufficientDriver.*install NVIDIA's driver, or a newer one.*cuda12",
    ),
    "no device": (lambda patch: patch.setattr(fake_cupy.cupy, "devices", 0), "sees no GPU"),
    "no cuBLAS": (
        lambda patch: patch.setattr(fake_cupy.ndarray, "__matmul__", fails(ImportError("libcublas.so.13: no file"))),
        r"a product fails: libcublas.so.13: no file; cuBLAS is missing.*\[cuda13\]'",
    ),
    "no NVRTC": (
        lambda patch: patch.setattr(fake_cupy._Kernel, "__call__", fails(RuntimeError("libnvrtc: no\nmore lines"))),
        "compiling a kernel fails: libnvrtc: no; NVRTC or CUDA's headers are missing",
    ),
    "a device in use": (
        lambda patch: patch.setattr(fake_cupy.cupy, "asarray", fails(RuntimeError("cudaErrorDevicesUnavailable"))),
        "copying an array fails: cudaErrorDevicesUnavailable; is the GPU free",
    ),
}


@pytest.mark.parametrize("what", MISSING)
def test_one_line_says_what_is_missing(what, library, monkeypatch):
    lack, message = MISSING[what]
    raises = pytest.raises(UsageError, match=message)
    with raises as error, fake_cupy.installed(library) as backend, monkeypatch.context() as patch:
        fake_cupy.backends.unregister_backend(backend)
        lack(patch)
        get_backend("cuda")
    assert "\n" not in str(error.value)


def test_ranks_that_share_a_device_share_its_memory(start):
    assert start(4, index=3, processes=4).sharing == 1 and fake_cupy.cupy.memory_limit is None
    assert start(2, index=0, processes=5).sharing == 3
    assert fake_cupy.cupy.memory_limit == pytest.approx(0.95 / 3)
    assert start(2, index=1, processes=5).sharing == 2
    assert start(2, index=~1, processes=5).sharing == 2 and start(4, index=~0, processes=2).sharing == 1
    start(2, memory=0.5).share(2)
    assert fake_cupy.cupy.memory_limit == 0.5


def test_ranks_that_join_take_devices_from_the_last_on(start):
    assert [start(4, index=~index, processes=2)._device.id for index in (0, 1)] == [3, 2]


def in_a_thread(work):
    results = []
    thread = Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_the_thread_that_advances_messages_works_on_the_rank_s_device(library):
    with fake_cupy.installed(library, 2, index=1) as backend:
        x, made = backend.asarray(np.ones(3)), []
        done = SimpleNamespace(lock=SimpleNamespace(acquire=lambda blocking: True, release=lambda: None))
        done.advance_all = lambda: made.append(x + 1)
        thread = ProgressThread(done)
        thread.wake()
        while not made:
            pass
        thread.stop()
        assert made[0].device.id == x.device.id == 1


def test_virtual_ranks_work_on_one_device(library):
    with fake_cupy.installed(library, 2):

        def program():
            backend = get_backend("cuda", world().rank)
            return (backend.asarray(np.ones(3)) * 2).device.id

        assert len(set(run_threads(program, 3))) == 1  # that of the first to open it


def test_synchronize_waits_for_the_stream_of_the_work(library):
    """Also in a thread that has not entered the device, and whose stream is another."""
    with fake_cupy.installed(library, 2, index=1, stream=True) as backend:
        x = backend.asarray(np.ones(3)) * 2

        def read():
            with pytest.raises(TypeError, match="another stream|device 0"):
                x + 1
            backend.synchronize()
            with fake_cupy.Device(1):
                return x.get().tolist()

        assert in_a_thread(read) == [2, 2, 2]
