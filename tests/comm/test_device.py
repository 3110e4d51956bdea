"""What becomes of device arrays on their way: a stand-in for CuPy counts the copies and synchronisations."""

import ctypes
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.arrays.backend import CPU, backend_of, get_backend
from spmd_engine.comm.shared_memory.cross_memory import CrossMemory
from spmd_engine.errors import SpmdError, UsageError
from support import fake_cupy
from support.fake_cupy import events, watch
from support.on_ranks import DTYPES, INLINE, OPS, assert_same, everywhere, numbers_of_ranks, on_ranks, values
from support.pairwise import every_pair

FLOAT = np.dtype(float)
SIZES = {"inline": (3, 4), "large": (3, INLINE)}
each_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


@contextmanager
def group_on(*, aware):
    """A group whose communicator is, or is not, aware of the device."""
    comm = world().subset(range(world().size))
    try:
        yield Mesh(watch(comm, aware=aware)).group()
    finally:
        comm.free()


def right(group):
    return (group.rank + 1) % group.size


def left(group):
    return (group.rank - 1) % group.size


# One call, and the transfers that it costs where device memory has to be staged through the host's.
ROUND_TRIP = ["start_to_host", "from_host"]
CALLS = {
    **{f"all_reduce-{op}": (lambda g, x, op=op: g.all_reduce(x, op), ROUND_TRIP) for op in OPS},
    "all_reduce-in-place": (lambda g, x: g.all_reduce(x, out=x), ROUND_TRIP),
    "all_gather-0": (lambda g, x: g.all_gather(x), ROUND_TRIP),
    "all_gather-1": (lambda g, x: g.all_gather(x, 1), ROUND_TRIP),
    "reduce_scatter-0": (lambda g, x: g.reduce_scatter(x, op="mean"), ROUND_TRIP),
    "reduce_scatter-1": (lambda g, x: g.reduce_scatter(x, 1), ROUND_TRIP),
    "all_to_all-0": (lambda g, x: g.all_to_all(x), ROUND_TRIP),
    "all_to_all-1": (lambda g, x: g.all_to_all(x, 0, 1), ROUND_TRIP),
    "not-contiguous": (lambda g, x: g.all_reduce(x[:, ::2]), ROUND_TRIP),
    "of-one-element": (lambda g, x: g.all_reduce(x[0, 0]), ROUND_TRIP),
    "empty": (lambda g, x: g.all_gather(x[:0]), ROUND_TRIP),
    "barrier": (lambda g, x: g.barrier(), []),
}
# A device's arrays go the ways of all others.
calls_and_sizes = every_pair(name=CALLS.keys(), ranks=numbers_of_ranks(2, 3, mpi=(3,)), size=SIZES)


def on_the_host(name, x):
    """What the same call gives for host arrays."""
    result = CALLS[name][0](Mesh().group(), x.copy())
    return result if result is not None else np.empty(0)


def transfers():
    """The copies and messages of this rank since the last call; the host waits for those to it alone."""
    kinds = [kind for kind, _ in events() if kind != "launch"]
    assert all(after == "is_done" for kind, after in pairwise(kinds) if kind == "start_to_host")
    kinds = [kind for kind in kinds if kind != "is_done"]
    events().clear()
    return kinds


def assert_synchronized():
    """No message starts before the host has found that its memory is complete."""
    settled = False
    for kind, _ in events():
        assert kind != "start" or settled, events()
        settled = kind == "is_done" or (settled and kind == "start")


@calls_and_sizes
def test_staged_through_the_host(name, size, device, ranks):
    def program():
        host = values(size, FLOAT, world().rank)
        expected = on_the_host(name, host)
        with group_on(aware=False) as group:
            x = device.asarray(host)
            events().clear()
            call, costs = CALLS[name]
            result = call(group, x)
            assert transfers() == costs
            if result is not None:
                assert device.owns(result)
                assert_same(result.memory, expected)

    on_ranks(program, ranks)


@calls_and_sizes
def test_handed_over_as_it_is(name, size, device, ranks):
    def program():
        host = values(size, FLOAT, world().rank)
        expected = on_the_host(name, host)
        with group_on(aware=True) as group:
            x = device.asarray(host)
            events().clear()
            result = CALLS[name][0](group, x)
            assert not events().count("to_host", "from_host")
            assert events().count("start") or name in ("barrier", "empty")
            assert_synchronized()
            if result is not None:
                assert device.owns(result)
                assert_same(result.memory, expected)

    on_ranks(program, ranks)


def test_pinned_memory_that_others_cannot_read_is_not_offered_to_them(device, monkeypatch):
    """A driver may map it so that process_vm_readv fails; the array is then copied to ordinary memory."""
    read = CrossMemory.read

    def refuses_pinned(self, local_rank, address, out):
        if address in fake_cupy.pinned_addresses():
            raise SpmdError("cannot read the memory of process 1: Bad address")
        read(self, local_rank, address, out)

    monkeypatch.setattr(CrossMemory, "read", refuses_pinned)

    def program():
        with group_on(aware=False) as group:
            x = values(SIZES["large"], FLOAT, group.rank)
            assert_same(group.all_gather(device.asarray(x)).memory, group.all_gather(x))

    run_threads(program, 2)


@everywhere(3)
@each_size
@pytest.mark.parametrize("aware", [False, True])
def test_broadcast(aware, size, device, ranks):
    """The root's array comes to each rank's own device, or where nothing was given, to the host."""

    def program():
        with group_on(aware=aware) as group:
            x = device.asarray(values(size, FLOAT, group.rank))
            events().clear()
            result = group.broadcast(x, root=1)
            assert device.owns(result)
            assert_same(result.memory, values(size, FLOAT, 1))
            assert_synchronized()
            staged = ROUND_TRIP if group.rank == 1 else ["from_host"]
            assert aware or transfers() == staged
            assert not events().count("to_host", "from_host")

            result = group.broadcast(x if group.rank == 1 else None, root=1)
            assert device.owns(result) == (group.rank == 1)

    on_ranks(program, ranks)


@everywhere(3)
@each_size
@pytest.mark.parametrize("aware", [False, True])
def test_send_and_receive(aware, size, device, ranks):
    def program():
        with group_on(aware=aware) as group:
            x = device.asarray(values(size, FLOAT, group.rank))
            events().clear()
            sent = group.start_send(right(group), x)
            assert_synchronized()
            assert transfers() == (["start"] if aware else ["start_to_host"])
            result = group.receive(left(group), like=device)
            assert_synchronized()
            assert transfers() == (["start"] if aware else ["from_host"])
            assert device.owns(result)
            assert_same(result.memory, values(size, FLOAT, left(group)))
            sent.wait()

            sent = group.start_send(right(group), x)
            assert isinstance(group.receive(left(group)), np.ndarray)  # unless told, to the host
            sent.wait()

    on_ranks(program, ranks)


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_dtype(dtype, aware, device):
    def program():
        with group_on(aware=aware) as group:
            x = values((5, 3), dtype, group.rank)
            result = group.all_reduce(device.asarray(x))
            assert_same(result.memory, Mesh().all_reduce(x))

    run_threads(program, 3)


@pytest.mark.parametrize("aware", [False, True])
def test_a_rank_alone_copies_on_the_device(aware, device):
    def program():
        with group_on(aware=aware) as group:
            x = device.asarray(np.ones((2, 2)))
            events().clear()
            for name in "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast":
                result = getattr(group, name)(x)
                assert device.owns(result) and not np.may_share_memory(result.memory, x.memory)
            assert len(events().launches) == len(events()) > 0

    run_threads(program, 1)


def test_bytes_count_once_whichever_way_they_go(device):
    def program(aware):
        with group_on(aware=aware) as group:
            group.all_reduce(device.asarray(np.ones(10)))
            group.broadcast(device.asarray(np.ones(10)))
            return group.ledger.total().payload, group.ledger.total().sent

    assert run_threads(program, 3, args=[True]) == run_threads(program, 3, args=[False])


# --- which communicators are aware


def test_threads_copy_with_the_device_s_own_module():
    assert all(run_threads(lambda: world().is_device_aware, 2))


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("library", [SimpleNamespace(), SimpleNamespace(MPIX_Query_cuda_support=lambda: 0), None])
def test_an_mpi_library_is_not_aware_unless_it_says_so(library, monkeypatch):
    from spmd_engine.comm.communicators.mpi import is_device_aware

    def load(name):
        if library is None:
            raise OSError(name)
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.delenv("SPMD_CUDA_AWARE", raising=False)
    assert is_device_aware() is False
    monkeypatch.setenv("SPMD_CUDA_AWARE", "1")
    assert is_device_aware() is True


@pytest.mark.mpi(ranks=2)
def test_an_mpi_library_may_say_that_it_is_aware(monkeypatch):
    from spmd_engine.comm.communicators.mpi import is_device_aware

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(MPIX_Query_cuda_support=lambda: 1))
    monkeypatch.delenv("SPMD_CUDA_AWARE", raising=False)
    assert is_device_aware() is True
    monkeypatch.setenv("SPMD_CUDA_AWARE", "0")
    assert is_device_aware() is False


# --- which backend an array belongs to


def test_backends_are_found_by_name_and_by_array(device):
    assert get_backend("cuda") is device and get_backend("cpu") is CPU
    assert backend_of(device.asarray(np.ones(3))) is device
    assert backend_of(np.ones(3)) is CPU
    assert isinstance(CPU.asarray(device.asarray(np.ones(3))), np.ndarray)


def test_unknown_backends():
    with pytest.raises(UsageError, match=r"unknown device 'tpu'; did you mean 'cpu'\? There are: cpu, cuda"):
        get_backend("tpu")
