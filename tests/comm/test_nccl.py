"""Collectives of device arrays by NCCL, on a stand-in for it: results, order, streams, errors."""

import gc
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.arrays.backend import backend_of
from spmd_engine.comm.connections import connections_of
from spmd_engine.errors import CommunicationTimeout, SpmdError
from spmd_engine.runtime.activity import Record
from support import fake_nccl
from support.fake_cupy import events, hazards
from support.on_ranks import DTYPES, INLINE, OPS, assert_same, values
from support.pairwise import in_turn

SIZES = {"small": (3, 4), "uneven": (5, 7), "large": (4, INLINE)}


@pytest.fixture
def nccl(device):
    with fake_nccl.installed() as communicators:
        yield communicators


@contextmanager
def mesh_by_nccl(device, **options):
    """A mesh of all ranks whose device arrays travel by NCCL."""
    comm = world().subset(range(world().size))
    connections_of(comm).set_transport(False, device)
    try:
        yield Mesh(comm, **options)
    finally:
        comm.free()


def nccl_of(mesh):
    return mesh.group().connections.nccl


CALLS = {
    **{f"all_reduce-{op}": lambda g, x, op=op: g.all_reduce(x, op) for op in OPS},
    "all_reduce-in-place": lambda g, x: g.all_reduce(x, out=x),
    "all_gather-0": lambda g, x: g.all_gather(x),
    "all_gather-1": lambda g, x: g.all_gather(x, 1),
    "all_gather-uneven": lambda g, x: g.all_gather(x[: g.rank]),
    "reduce_scatter-0": lambda g, x: g.reduce_scatter(x, op="mean"),
    "reduce_scatter-1": lambda g, x: g.reduce_scatter(x, 1),
    "reduce_scatter-max": lambda g, x: g.reduce_scatter(x, op="max"),
    "all_to_all-0": lambda g, x: g.all_to_all(x),
    "all_to_all-1": lambda g, x: g.all_to_all(x, 0, 1),
    "all_to_all-splits": lambda g, x: g.all_to_all(x, splits=[len(x), *[0] * (g.size - 1)])[0],
    "broadcast": lambda g, x: g.broadcast(x, 1),
    "not-contiguous": lambda g, x: g.all_reduce(x[:, ::2]),
    "of-one-element": lambda g, x: g.all_reduce(x[0, 0]),
    "empty": lambda g, x: g.all_gather(x[:0]),
    "empty-sum": lambda g, x: g.all_reduce(x[:0]),
}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", CALLS)
def test_values(name, size, ranks, device, nccl):
    def program():
        x = values(size, np.dtype(float), world().rank)
        expected = CALLS[name](Mesh().group(), x.copy())
        with mesh_by_nccl(device) as mesh:
            given = device.asarray(x)
            events().clear()
            result = CALLS[name](mesh.group(), given)
            assert device.owns(result) and not events().count("to_host", "start_to_host", "from_host", "synchronize")
            np.testing.assert_allclose(device.to_host(result), expected, rtol=1e-12, atol=1e-15)

    run_threads(program, ranks)
    assert sorted(nccl.created) == [(ranks, rank) for rank in range(ranks)]


# --- reductions that NCCL does not make, or in another order


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, device, nccl):
    def program():
        x = values((5, 3), dtype, world().rank)
        with mesh_by_nccl(device) as mesh:
            for call in CALLS["all_gather-0"], CALLS["all_reduce-max"], CALLS["all_reduce-sum"]:
                found, expected = (device.to_host(call(mesh.group(), device.asarray(x))), call(Mesh().group(), x))
                assert found.dtype == expected.dtype
                assert np.allclose(found.astype(complex), expected.astype(complex), rtol=1e-6)

    run_threads(program, 3)


@pytest.mark.parametrize("how", ["16-bit floats", "deterministic", "product of complex numbers"])
def test_sums_in_rank_order(how, device, nccl):
    """They equal the host's to the last bit, which NCCL's own do not."""
    dtype = {"16-bit floats": np.float16, "product of complex numbers": complex}.get(how, float)
    op = "prod" if dtype is complex else "mean"

    def program():
        x = values((40, 7), np.dtype(dtype), world().rank)
        with mesh_by_nccl(device, deterministic=how == "deterministic") as mesh, Mesh() as on_host:
            for name in "all_reduce", "reduce_scatter":
                found = device.to_host(getattr(mesh, name)(device.asarray(x), op=op))
                assert_same(found, getattr(on_host, name)(x, op=op))

    run_threads(program, 4)


def test_ranks_that_have_arrays_on_the_host_still_agree(device, nccl):
    """The root's array is on its device, and the others want it on the host; and one rank sums an array of the host."""

    def program():
        x = values((4, 3), np.dtype(float), world().rank)
        with mesh_by_nccl(device) as mesh:
            here = device.asarray(x) if mesh.rank == 1 else None
            assert_same(
                backend_of(here).to_host(mesh.broadcast(here, 1)) if mesh.rank == 1 else mesh.broadcast(None, 1),
                values((4, 3), np.dtype(float), 1),
            )
            total = mesh.all_reduce(x if mesh.rank == 0 else device.asarray(x))
            assert_same(backend_of(total).to_host(total), Mesh().all_reduce(x))

    run_threads(program, 3)
    assert not nccl.created


# --- groups, order and overlap


def test_each_group_of_a_mesh_has_a_communicator(device, nccl):
    def program():
        connections_of(world()).set_transport(False, device)
        with Mesh(data=2, model=2) as mesh:
            x = device.asarray(np.full(3, 10.0**mesh.rank))
            sums = [mesh.all_reduce(x, over=axes) for axes in ("data", "model", None, "data")]
            return [float(device.to_host(total)[0]) for total in sums]

    assert run_threads(program, 4) == [[101, 11, 1111, 101], [1010, 11, 1111, 1010], [101, 1100, 1111, 101],
                                       [1010, 1100, 1111, 1010]]  # fmt: skip
    assert sorted(nccl.created) == sorted([(2, 0), (2, 1)] * 4 + [(4, rank) for rank in range(4)])


def test_started_calls_run_in_the_same_order_on_all_ranks(device, nccl):
    """Whatever order the ranks wait in, and whether a call between them is one of the host."""

    def program():
        with mesh_by_nccl(device) as mesh:
            arrays = [device.asarray(np.full(4, float(mesh.rank + n))) for n in range(6)]
            later = [mesh.start_all_reduce(x) for x in arrays[:3]]
            later.append(mesh.start_all_reduce(np.full(4, float(mesh.rank + 3))))
            later += [mesh.start_all_gather(x) for x in arrays[4:]]
            order = range(6) if mesh.rank % 2 else range(5, -1, -1)
            results = {n: later[n].wait() for n in order}
            return [backend_of(results[n]).to_host(results[n]).sum() for n in range(6)]

    assert run_threads(program, 3) == [[12, 24, 36, 48, 60, 72]] * 3


def test_a_started_sum_waits_for_what_it_reads_and_no_computation_for_it(device, nccl):
    """Computations between the start and the wait neither wait for the sum nor are waited for."""

    def program():
        with mesh_by_nccl(device) as mesh:
            compute = device._stream
            mesh.all_reduce(device.asarray(np.ones(3)))  # connects
            x, other = device.asarray(np.ones(5)) * 2, device.asarray(np.ones(5))
            later = mesh.start_all_reduce(x)
            stream = nccl_of(mesh).stream
            before, (_, written) = compute.after[stream.ptr], (other + 1)._owner._written
            mesh.barrier()
            assert stream.after[compute.ptr] < written  # the sum waits for nothing that was computed since it began
            assert compute.after[stream.ptr] == before  # nor do computations wait for it
            total = later.wait()
            assert compute.after[stream.ptr] > before
            return float(device.to_host(total + other)[0])

    assert run_threads(program, 1 + 1) == [5, 5]


@pytest.mark.parametrize("by", ["nccl", "staged"])
@pytest.mark.parametrize("missing", ["the sum does not wait for x", "computations do not wait for the sum"])
def test_a_missing_event_is_found(missing, by, device, nccl, monkeypatch):
    from support.fake_cupy import Stream

    def wait_event(self, event):
        if (self is device._stream) == (missing == "the sum does not wait for x"):
            wait(self, event)

    wait = Stream.wait_event
    monkeypatch.setattr(Stream, "wait_event", wait_event)

    def program():
        with mesh_by_nccl(device) as mesh:
            mesh.group().connections.set_transport(False, device if by == "nccl" else None)
            return mesh.all_reduce(device.asarray(np.ones(5)) * 2) + 1

    assert "another stream may still" in error_of(program, 2)


def error_of(program, ranks):
    """The text of the error; what its frames held has been freed, without regard to streams."""
    try:
        run_threads(program, ranks)
    except TypeError as error:
        text = str(error)
    gc.collect()
    hazards.clear()
    return text


def test_memory_that_a_sum_reads_is_kept_until_it_is_used(device, nccl):
    def program(forgets):
        with mesh_by_nccl(device) as mesh:
            later = mesh.start_all_reduce(device.asarray(np.ones(5)) * 2)
            while not later.done:
                mesh.comm.progress.advance_all()
            if forgets:
                later.result._held = None
            mesh.barrier()
            return later.wait()

    run_threads(program, 2, args=[False])
    assert not hazards
    run_threads(program, 2, args=[True])
    assert hazards
    hazards.clear()


# --- ranks that do not arrive, and errors


def test_a_rank_that_ends_is_named_and_the_others_end(device, nccl):
    """It ends after the call was agreed on, before its device has taken part in it."""

    def program():
        with mesh_by_nccl(device) as mesh:
            mesh.all_reduce(device.asarray(np.ones(3)))  # connects
            if mesh.rank == 1:
                nccl_of(mesh).communicator.allReduce = lambda *args: None
            total = mesh.all_reduce(device.asarray(np.ones(3)))
            if mesh.rank == 1:
                raise ValueError("broken")
            device.to_host(total)

    with pytest.raises(ValueError, match="broken"):
        run_threads(program, 2)


def test_a_wait_for_a_device_has_the_timeout_and_is_recorded_for_the_watchdog(device, nccl, monkeypatch):
    """The first call that is not complete is named, though the host waits for the device.

    The timeout is over when the other rank has looked at the record.
    """
    activities, late = {}, [0.0]
    monkeypatch.setattr("spmd_engine.comm.pending.perf_counter", lambda: perf_counter() + late[0])

    def program():
        with mesh_by_nccl(device, timeout=1000.0) as mesh:
            mesh.all_reduce(device.asarray(np.ones(3)))
            ranks = nccl_of(mesh)
            if mesh.rank == 1:
                ranks.communicator.allReduce = lambda *args: None
            activities[mesh.rank] = mesh.activity
            total = mesh.all_reduce(device.asarray(np.ones(3)), label="gradients")
            if mesh.rank == 1:
                while (wait := Record(0, activities[0].memory).state().wait) is None or not wait.missing:
                    mesh.comm.pause(1)
                call = wait.call
                assert (call.operation, call.label, call.number, call.members) == ("all_reduce", "gradients", 2, (0, 1))
                assert wait.missing == (1,) and "test_nccl.py" in wait.at
                late[0] = 2000.0
                while not ranks.communicator.error:
                    mesh.comm.pause(1)
                with pytest.raises(SpmdError, match="NCCL between ranks 0, 1: .*remote process exited; set NCCL_DEBUG"):
                    ranks.check()
                return
            what = r"all_reduce\(sum, float64\[3\]\) as its call number 2 over 'data' \(gradients\), group rank 0 of 2"
            with pytest.raises(CommunicationTimeout, match=f"waited 1000 s: {what}"):
                device.to_host(total)
            assert not ranks.communicator.works
            with pytest.raises(CommunicationTimeout):  # nothing goes on with wrong values
                mesh.all_reduce(device.asarray(np.ones(3)))

    run_threads(program, 2)


def test_an_error_of_nccl_ends_the_wait(device, nccl):
    def program():
        with mesh_by_nccl(device) as mesh:
            mesh.all_reduce(device.asarray(np.ones(3)))
            communicator = nccl_of(mesh).communicator
            communicator.allReduce = (lambda *args: None) if mesh.rank else communicator.allReduce
            total = mesh.all_reduce(device.asarray(np.ones(3)))
            mesh.barrier()
            communicator.error = "NCCL_ERROR_SYSTEM_ERROR: connection lost"
            if mesh.rank == 0:
                with pytest.raises(SpmdError, match="connection lost"):
                    device.to_host(total)

    run_threads(program, 2)


def test_ranks_that_never_connect_are_waited_for_with_the_timeout(device, nccl, monkeypatch):
    connected = fake_nccl.threading.Event()
    monkeypatch.setattr(device.nccl, "NcclCommunicator", lambda *args: connected.wait())

    def program():
        with mesh_by_nccl(device, timeout=1.0) as mesh:
            with pytest.raises(CommunicationTimeout, match="waited 1 s: all_reduce"):
                mesh.all_reduce(device.asarray(np.ones(3)))
            both.wait(100)  # neither ends while the other waits

    both = fake_nccl.threading.Barrier(2)
    run_threads(program, 2)
    connected.set()


# --- messages


ARRAYS = {
    "matrix": lambda x: x,
    "not contiguous": lambda x: x[:, ::2],
    "one element": lambda x: x[1, 2],
    "empty": lambda x: x[:0],
}


@in_turn(2, name=list(ARRAYS), dtype=DTYPES)
def test_a_message(name, dtype, device, nccl):
    """Both directions at once; nothing is copied to the host or from it."""

    def program():
        x = values((4, 6), dtype, world().rank)
        with mesh_by_nccl(device) as mesh:
            group, other = mesh.group(), 1 - mesh.rank
            given = ARRAYS[name](device.asarray(x))
            events().clear()
            sent = group.start_send(other, given)
            found = group.receive(other, like=device)
            assert sent.wait() is None
            copies = events().count("to_host", "start_to_host", "from_host", "start_from_host", "synchronize")
            assert not copies or name == "empty"
            assert device.owns(found)
            assert_same(device.to_host(found), ARRAYS[name](values((4, 6), dtype, other)))

    run_threads(program, 2)
    assert sorted(nccl.created) == ([] if name == "empty" else [(2, 0)] * 2 + [(2, 1)] * 2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_messages_that_are_sent_and_awaited_in_other_orders(ranks, device, nccl):
    """Each rank sends to all others on channels, in an order of its own, and awaits theirs in another one."""

    def program():
        with mesh_by_nccl(device) as mesh:
            group, draw = mesh.group(), np.random.default_rng(mesh.rank)
            messages = [(other, channel) for other in range(ranks) if other != mesh.rank for channel in range(4)]
            sent, awaited = [], {}
            for turn in draw.permutation(2 * len(messages)):
                other, channel = messages[turn // 2]
                if turn % 2:
                    x = device.asarray(np.full(3 + channel, 100.0 * mesh.rank + channel))
                    sent.append(group.start_send(other, x, channel=channel))
                else:
                    awaited[other, channel] = group.start_receive(other, like=device, channel=channel)
            for other, channel in draw.permutation(messages):
                found = device.to_host(awaited[other, channel].wait())
                assert_same(found, np.full(3 + channel, 100.0 * other + channel))
            for message in sent:
                message.wait()

    run_threads(program, ranks)
    assert len(nccl.created) == 2 * ranks * (ranks - 1)  # a communicator for each direction of each pair


def test_messages_between_the_host_and_a_device(device, nccl):
    """The sender says where its array is; the receiver, where it wants it."""

    def program():
        with mesh_by_nccl(device) as mesh:
            group, x = mesh.group(), np.arange(6.0).reshape(2, 3)
            if mesh.rank == 0:
                group.send(1, device.asarray(x))
                group.send(1, x)
                return
            on_host, on_device = group.receive(0), group.receive(0, like=device)
            assert isinstance(on_host, np.ndarray) and device.owns(on_device)
            assert_same(on_host, x)
            assert_same(device.to_host(on_device), x)

    run_threads(program, 2)


def test_a_message_waits_for_what_it_reads_and_its_memory_is_kept(device, nccl):
    def program():
        with mesh_by_nccl(device) as mesh:
            group = mesh.group()
            for _ in range(3):
                if mesh.rank == 0:
                    sent = group.start_send(1, device.asarray(np.ones(5)) * 2)
                    device.asarray(np.ones(5)) * 3  # may get memory that is free
                    sent.wait()
                else:
                    assert float(device.to_host(group.receive(0, like=device).sum())) == 10

    run_threads(program, 2)
    assert not hazards


def test_a_message_that_is_not_received_has_the_timeout(device, nccl):
    def program():
        with mesh_by_nccl(device, timeout=1.0) as mesh:
            x = device.asarray(np.ones(3))
            if mesh.rank == 0:
                with pytest.raises(CommunicationTimeout, match="waited 1 s: send over 'data', group rank 0 of 2"):
                    mesh.group().send(1, x)

    run_threads(program, 2)


def test_a_transfer_that_does_not_happen_is_named(device, nccl):
    """The receiver has answered, and its device never takes part."""

    def program():
        with mesh_by_nccl(device) as mesh:
            group, x = mesh.group(), device.asarray(np.ones(3))
            if mesh.rank == 0:
                group.send(1, x)  # connects
                group.timeout = group._routing._timeout = 2.0
                group.send(1, x, label="input")
                with pytest.raises(CommunicationTimeout, match=r"waited 2 s: send to rank 1 over 'data' \(input\)"):
                    device.synchronize()
                return
            group.receive(0, like=device)
            communicator = nccl_of(mesh).pair(0, 1).communicator
            communicator.recv = lambda *args: None
            group.receive(0, like=device)
            while not communicator.error:
                mesh.comm.pause(1)

    run_threads(program, 2)
