"""Memory that ranks of a node share: what is given out and given back, and arrays of a mesh in it."""

import gc
import logging
import os
import stat

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spmd_engine import Mesh, run_threads, world
from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.connections import connections_of
from spmd_engine.comm.shared_memory.arena import ALIGNMENT, HEAD, Arena, OwnMemory, bound
from support.on_ranks import everywhere, on_ranks

MIB = 1 << 20


# --- allocation


def test_arrays_lie_side_by_side_in_whole_cache_lines():
    arena = Arena(bytearray(MIB))
    arrays = [arena.empty((size,), np.dtype(np.uint8)) for size in (1, 64, 65, 1000)]
    begin = address_of(np.frombuffer(arena.memory, np.uint8))
    assert [address_of(x) - begin - HEAD for x in arrays] == [0, 64, 128, 256]


def test_memory_comes_back_with_the_last_view():
    arena = Arena(bytearray(MIB))
    whole = arena.free
    x = arena.empty((10, 100), np.dtype(float))
    view = x[3:, ::2].T.view(np.int64)
    del x
    gc.collect()
    assert arena.free == whole - 8000
    view[...] = 1
    del view
    assert arena.free == whole
    assert arena.empty((10, 100), np.dtype(float)) is not None
    assert address_of(arena.empty((1,), np.dtype(float))) == address_of(np.frombuffer(arena.memory, np.uint8)) + HEAD


def test_what_finds_no_room_is_ordinary_memory_and_one_line(caplog):
    arena = Arena(bytearray(MIB))
    with caplog.at_level(logging.WARNING):
        assert arena.empty((2 * MIB,), np.dtype(np.uint8)) is None
        assert arena.empty((2 * MIB,), np.dtype(np.uint8)) is None
    assert len(caplog.records) == 1 and "SPMD_ARENA_MIB" in caplog.text
    assert arena.empty((MIB // 2,), np.dtype(np.uint8)) is not None  # what fits is still to be had


@given(st.lists(st.one_of(st.integers(1, 3000), st.integers(-20, -1)), max_size=60))
def test_blocks_never_overlap_and_all_comes_back(steps):
    """Positive: allocate so many bytes. Negative: give one of the blocks back."""
    arena = Arena(bytearray(HEAD + 20 * 1024))
    whole, blocks = arena.free, []
    for step in steps:
        if step > 0:
            if (start := arena.allocate(step)) is not None:
                assert start % ALIGNMENT == 0 and start >= HEAD and start + step <= arena.size
                assert all(start + step <= other or other + size <= start for other, size in blocks)
                blocks.append((start, step))
        elif blocks:
            arena.release(*blocks.pop(step % len(blocks)))
    for block in blocks:
        arena.release(*block)
    assert arena.free == whole
    assert arena.allocate(20 * 1024) == HEAD  # in one piece again


def test_its_size_can_be_said(monkeypatch):
    monkeypatch.setenv("SPMD_ARENA_MIB", "3")
    assert bound(2) == 3 * MIB
    monkeypatch.delenv("SPMD_ARENA_MIB")
    assert 0 < bound(8) <= bound(1) // 8 and bound(8) % MIB == 0


# --- arrays of a mesh


@everywhere(1, 2, 4)
def test_empty(ranks):
    def program():
        mesh = Mesh()
        x = mesh.empty((3, 5), np.int16)
        assert (x.shape, x.dtype, x.flags.c_contiguous, x.flags.writeable) == ((3, 5), np.int16, True, True)
        assert mesh.empty(7).shape == (7,) and mesh.empty(7).dtype == np.float32
        assert not mesh.empty((2, 100), float, zero=True).any()
        assert mesh.empty((0, 3)).shape == (0, 3)
        assert mesh.empty(2, object).tolist() == [None, None]
        if mesh.size > 1:
            assert connections_of(world()).neighbours.offset(x) is not None
            assert connections_of(world()).neighbours.offset(np.empty(3)) is None

    on_ranks(program, ranks)


@everywhere(2, 3)
def test_neighbours_see_what_is_written(ranks):
    def program():
        mesh = Mesh()
        x = mesh.empty(1000, np.int64)
        x[...] = mesh.rank
        neighbours = connections_of(world()).neighbours
        offsets = mesh.all_gather(np.array([neighbours.offset(x)]))
        for rank, offset in enumerate(offsets):
            theirs = neighbours.view(rank, int(offset), (1000,), np.dtype(np.int64))
            assert (theirs == rank).all()
        mesh.barrier()

    on_ranks(program, ranks)


def test_an_array_outlives_the_run_it_was_made_in():
    arrays = run_threads(lambda: Mesh().empty(1000, zero=True), 3)
    gc.collect()
    for i, x in enumerate(arrays):
        x += i
    assert [x.sum() for x in arrays] == [0, 1000, 2000]


def test_no_other_user_may_open_what_ranks_share():
    own = OwnMemory(MIB)
    assert own.handle
    process, descriptor, *_ = own.handle.split()
    assert stat.S_IMODE(os.stat(f"/proc/{process}/fd/{descriptor}").st_mode) == 0o600
    own.close()


def test_no_call_keeps_its_copy_of_an_array_until_garbage_is_collected():
    def program():
        with Mesh(data=2) as mesh:
            x, arena = np.ones(1 << 17), mesh.group().connections.neighbours.own
            mesh.all_reduce(x, out=x)
            before = arena.free
            for _ in range(3):
                mesh.all_reduce(x, out=x)
            return before - arena.free

    gc.disable()
    try:
        assert run_threads(program, 2) == [0, 0]
    finally:
        gc.enable()
