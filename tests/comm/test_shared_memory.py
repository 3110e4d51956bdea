"""What collectives do with memory that ranks share, by every way that data can take."""

import time

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.comm.communicators import threads
from spmd_engine.comm.connections import Connections, Tuning, connections_of
from spmd_engine.comm.shared_memory import slot_table
from spmd_engine.comm.shared_memory.arena import ALIGNMENT, HEAD
from spmd_engine.comm.shared_memory.cross_memory import CrossMemory
from spmd_engine.comm.transports import shared_memory
from spmd_engine.errors import MismatchError
from support.on_ranks import DTYPES, OPS, assert_alike, assert_same, everywhere, on_ranks, reduced, values
from support.pairwise import every_pair

# --- collectives, by every way that data can take

LENGTH = 5000
#: Bytes that go into an entry, or a staging buffer; that every rank reduces whole; and that are copied for neighbours.
WAYS = {
    "in-entries": (1 << 18, 1 << 18, 1 << 30, 1 << 30),
    "in-buffers": (64, 1 << 18, 1 << 30, 1 << 30),
    "in-arenas": (64, 64, 64, 0),
    "in-processes": (64, 64, 64, 0),
    "as-copies": (64, 64, 64, 1 << 30),
    "by-messages": (64, 64, 64, 0),
}


@pytest.fixture
def way(request, monkeypatch):
    """How large data come to others; they are to become the same by all ways: a name of ``WAYS``."""
    small, room, whole, copied = WAYS[request.param]
    monkeypatch.setattr(slot_table, "SMALL", small)
    monkeypatch.setattr(slot_table, "ROOM", room)
    monkeypatch.setattr(shared_memory, "CACHE", 4096)
    monkeypatch.setattr(Connections, "tuning", Tuning(reduced_by_all=whole, copied=copied))
    if request.param != "in-processes":
        monkeypatch.setattr(CrossMemory, "can_read", lambda *args: False)
    if request.param == "by-messages":
        monkeypatch.setattr(threads, "bound", lambda ranks: HEAD + 1024)  # no room for anything
    return request.param


def placed(mesh, way, x):
    """A copy of ``x``, where this way has it."""
    y = mesh.empty(x.shape, x.dtype) if way == "in-arenas" else np.empty_like(x)
    y[...] = x
    return y


@every_pair(dtype=[DTYPES[1], *DTYPES[6:]], way=WAYS.keys(), ranks=[2, 3], indirect=["way"])
def test_reductions(ranks, dtype, way):
    arrays = [values((LENGTH, 2), dtype, rank) for rank in range(ranks)]

    def program():
        mesh = Mesh()
        group = mesh.group()
        for op in OPS:
            expected = reduced(arrays, op)
            x = placed(mesh, way, arrays[group.rank])
            result = group.all_reduce(x, op)
            assert_same(result, expected, op)
            assert_alike(group, result)
            assert_same(group.reduce_scatter(x, op=op), np.array_split(expected, ranks)[group.rank], op)
            assert_same(group.reduce_scatter(x, 1, op), np.array_split(expected, ranks, 1)[group.rank], op)
            assert_same(x, arrays[group.rank])
            if x.dtype == expected.dtype:
                out = placed(mesh, way, np.zeros_like(x))
                assert group.all_reduce(x, op, out=out) is out
                assert_same(out, expected, op)
                assert group.all_reduce(x, op, out=x) is x
                assert_same(x, expected, op)

    run_threads(program, ranks)


@every_pair(ranks=[2, 4], way=WAYS.keys(), indirect=["way"])
def test_moves(ranks, way):
    arrays = [values((LENGTH + 4 * rank, 4), np.dtype(float), rank) for rank in range(ranks)]
    alike = [values((LENGTH, 4), np.dtype(float), rank) for rank in range(ranks)]

    def program():
        mesh = Mesh()
        group = mesh.group()
        x, y = placed(mesh, way, arrays[group.rank]), placed(mesh, way, alike[group.rank])
        for i in range(12):  # more often than there are places to lie in
            assert_same(group.all_gather(x), np.concatenate([a + i for a in arrays]))
            assert_same(group.all_gather(y, 1), np.concatenate([a + i for a in alike], 1))
            assert_same(group.broadcast(x, i % ranks), arrays[i % ranks] + i)
            parts = [np.array_split(a + i, ranks, 1)[group.rank] for a in arrays]
            assert_same(group.all_to_all(x, 1, 0), np.concatenate(parts))
            for each, before in (x, arrays), (y, alike):  # as soon as a rank has its result, it may write
                each[...] = before[group.rank] + (i + 1)

    run_threads(program, ranks)


@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_rank_has_no_room(ranks, lends, monkeypatch):
    monkeypatch.setattr(CrossMemory, "can_read", lambda *args: lends)

    def program():
        mesh = Mesh()
        group = mesh.group()
        arena = connections_of(world()).neighbours.own
        hog = mesh.empty(arena.free - 10_000, np.uint8) if mesh.rank == 1 else None
        for length in 100, 100_000:
            arrays = [values((length,), np.dtype(float), rank) for rank in range(group.size)]
            for x in arrays[mesh.rank].copy(), placed(mesh, "in-arenas", arrays[mesh.rank]):
                assert_same(group.all_reduce(x), reduced(arrays, "sum"))
                assert_same(group.all_gather(x), np.concatenate(arrays))
                parts = np.array_split(reduced(arrays, "max"), group.size)
                assert_same(group.reduce_scatter(x, op="max"), parts[mesh.rank])
                assert_same(group.broadcast(x, 1), arrays[1])
                assert group.all_reduce(x, out=x) is x
                assert_same(x, reduced(arrays, "sum"))
        del hog

    run_threads(program, ranks)


@everywhere(2)
def test_ranks_need_not_have_their_arrays_in_the_same_kind_of_memory(ranks):
    def program():
        mesh = Mesh()
        group = mesh.group()
        arrays = [values((80_000,), np.dtype(float), rank) for rank in range(group.size)]
        x = placed(mesh, "in-arenas" if mesh.rank else "ordinary", arrays[mesh.rank])
        for out in None, x:
            assert_same(group.all_reduce(x, out=out), reduced(arrays, "sum"))
            x[...] = arrays[mesh.rank]
        assert_same(group.all_gather(x), np.concatenate(arrays))
        assert_same(group.all_to_all(x), np.concatenate([np.array_split(a, group.size)[mesh.rank] for a in arrays]))

    on_ranks(program, ranks)


@pytest.mark.parametrize("slow", [0.1, 1.2])
def test_who_waits_for_a_slow_reader_is_not_told_that_another_has_ended(slow):
    """Rank 0 has what it needs, and ends; rank 1 must wait until rank 2 has read its memory."""

    def program():
        mesh = Mesh()
        x = placed(mesh, "in-arenas", values((200_000,), np.dtype(float), 0)) if mesh.rank == 1 else None
        mesh.barrier()
        time.sleep(0.0 if mesh.rank == 2 else 0.05)
        pending = mesh.start_broadcast(x, 1)  # rank 2 is the first, and finds nothing yet
        time.sleep(slow if mesh.rank == 2 else 0.0)
        return pending.wait().shape

    assert run_threads(program, 3) == [(200_000,)] * 3


# --- many calls


@everywhere(2, 3)
@pytest.mark.parametrize("length", [1, 2000, 70_000])
def test_more_calls_under_way_than_slots(length, ranks):
    def program():
        group = Mesh().group()
        many = 3 * slot_table.SLOTS + 1
        started = [group.start_all_reduce(np.full(length, i + group.rank)) for i in range(many)]
        order = np.random.default_rng(group.rank).permutation(many).tolist()  # another one on every rank
        for i in order:
            result = started[i].wait()
            assert (result == sum(i + rank for rank in range(group.size))).all()

    on_ranks(program, ranks)


@everywhere(2, 3)
@pytest.mark.parametrize("slow", [0, 1])
def test_who_is_late_still_reads_what_was_said(slow, ranks):
    """Ranks that are fast go on as far as they can, and then wait; the slow one meets every call as it was made."""

    def program():
        mesh = Mesh()
        group = mesh.group()
        started = [group.start_all_gather(np.full(length, i)) for i, length in enumerate([1, 3000, 30_000] * 8)]
        if mesh.rank == slow:
            for _ in range(2):
                world().pause(1)
        for i, pending in enumerate(started):
            assert (pending.wait() == i).all()

    on_ranks(program, ranks)


def test_a_mismatch_uses_up_its_slot_alone():
    def program():
        group = Mesh(timeout=100).group()
        for i in range(3 * slot_table.SLOTS):
            with pytest.raises(MismatchError):
                group.all_reduce(np.ones(1 + group.rank))
            assert group.all_reduce(np.full(10, i))[0] == 2 * i

    run_threads(program, 2)


@everywhere(2, 3)
def test_copies_are_given_back(ranks):
    def program():
        mesh = Mesh()
        group, arena = mesh.group(), connections_of(world()).neighbours.own
        x = np.ones(80_000)
        for _ in range(2 * slot_table.SLOTS):
            group.reduce_scatter(x)
            group.all_gather(x)
        mesh.barrier()
        mesh.barrier()
        before = arena.free
        for _ in range(2 * slot_table.SLOTS):
            group.reduce_scatter(x)
            group.all_gather(x)
        mesh.barrier()
        group.reduce_scatter(x)  # and with it the last of what went before
        assert before - arena.free <= x.nbytes + ALIGNMENT

    on_ranks(program, ranks)


@everywhere(2, 4)
def test_tables_of_closed_meshes_are_given_back(ranks):
    def program():
        free = []
        for _ in range(30):
            with Mesh(a=world().size, b=1) as mesh:
                mesh.all_reduce(np.ones(3), over="b")
                mesh.all_reduce(np.ones(3), over=("b", "a"))
            connections_of(world()).neighbours.retire()
            free.append(connections_of(world()).neighbours.own.free)
            Mesh().barrier()
        assert min(free[10:]) >= min(free[:10])

    on_ranks(program, ranks)
