"""Gathers and scatters into memory of the caller, which may be a part of what they are given."""

import sys
from collections import deque

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.comm.connections import Connections, Tuning
from spmd_engine.comm.transports import shared_memory
from spmd_engine.errors import UsageError
from support.fake_cupy import watch
from support.on_ranks import DTYPES, INLINE, assert_alike, assert_reduced, assert_same, reduced, values
from support.pairwise import every_pair

FLOAT = np.dtype(float)


def numbers_of_ranks(*virtual):
    """Parameters: virtual ``ranks``, on one node and on a node each, and MPI's."""
    ranks = [pytest.param((n, nodes), id=f"{n} ranks on {nodes} nodes") for n in virtual for nodes in {1, n}]
    mpi = [pytest.param(None, id=f"mpi-{n}", marks=pytest.mark.mpi(ranks=n)) for n in (2, 3)]
    return ranks + mpi


def everywhere(*virtual):
    """All of these, but for two ranks of MPI, which are in ``soak``."""
    *others, two, three = numbers_of_ranks(*virtual)
    later = pytest.param(*two.values, id=two.id, marks=[*two.marks, pytest.mark.soak])
    return pytest.mark.parametrize("ranks", [*others, later, three])


def on_ranks(program, ranks):
    if ranks is None:
        return [program()]
    n, nodes = ranks
    return run_threads(program, n, nodes=[f"node{rank % nodes}" for rank in range(n)])


SCALES = {"inline": 1, "large": INLINE // 4}
small_and_large = pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
CHOICES = {"arena": {"arena": True, "ordinary memory": False}, "check": {"checked": True, "unchecked": False}}


def uneven(ranks, scale):
    """Lengths by rank; one rank has none."""
    return [scale * ((rank + 1) % ranks) for rank in range(ranks)]


def part_of(lengths, rank):
    ends = np.cumsum([0, *lengths])
    return slice(ends[rank], ends[rank + 1])


# --- all_gather


@every_pair(dtype=DTYPES[-3:], scale=SCALES, ranks=numbers_of_ranks(2, 4), **CHOICES)
def test_a_rank_gathers_around_its_own_part(dtype, arena, scale, check, ranks):
    def program():
        mesh = Mesh(check=check)
        group = mesh.group()
        lengths = uneven(group.size, scale)
        whole = values((sum(lengths), 3), dtype, 1)
        out = (mesh if arena else np).empty(whole.shape, dtype)
        own = out[part_of(lengths, group.rank)]
        own[...] = whole[part_of(lengths, group.rank)]
        assert group.all_gather(own, sizes=lengths, out=out) is out
        assert_same(out, whole)

    on_ranks(program, ranks)


@everywhere(1, 3)
@small_and_large
def test_what_is_gathered_from_elsewhere_is_left(scale, ranks):
    def program():
        group = Mesh().group()
        lengths = uneven(group.size, scale)
        whole = values((sum(lengths),), FLOAT, 2)
        x, out = whole[part_of(lengths, group.rank)].copy(), np.full(len(whole), np.nan)
        assert group.all_gather(x, out=out) is out
        assert_same(out, whole)
        assert_same(x, whole[part_of(lengths, group.rank)])

    on_ranks(program, ranks)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "axis, out",
    [
        (0, lambda n: np.empty((2 * n + 1, 3))),
        (0, lambda n: np.empty((2 * n, 4))),
        (0, lambda n: np.empty(6 * n)),
        (0, lambda n: np.empty((2 * n, 3), np.float32)),
        (0, lambda n: np.empty((4 * n, 3))[::2]),
        (1, lambda n: np.empty((2, 3 * n))),
    ],
)
def test_an_out_that_does_not_fit_a_gather_is_refused(axis, out, ranks):
    with pytest.raises(UsageError, match="all_gather: out (must be|has shape)"):
        run_threads(lambda: Mesh(timeout=100).group().all_gather(np.ones((2, 3)), axis, out=out(ranks)), ranks)


def test_one_rank_s_wrong_out_is_everyone_s_error():
    def program():
        group = Mesh(timeout=100).group()
        group.all_gather(np.ones(INLINE), out=np.empty(2 * INLINE + group.rank))

    with pytest.raises(UsageError, match=r"all_gather: out has shape \(8193,\), the result \(8192,\)"):
        run_threads(program, 2)


# --- reduce_scatter


@every_pair(dtype=DTYPES[-3:], op=["sum", "mean"], scale=SCALES, ranks=numbers_of_ranks(2, 4), **CHOICES)
def test_a_rank_s_part_is_reduced_where_it_is(dtype, arena, op, scale, check, ranks):
    def program():
        mesh = Mesh(check=check)
        group = mesh.group()
        lengths = uneven(group.size, scale)
        arrays = [values((sum(lengths), 2), dtype, rank) for rank in range(group.size)]
        mine = part_of(lengths, group.rank)
        x = (mesh if arena else np).empty(arrays[0].shape, dtype)
        x[...] = arrays[group.rank]
        out = x[mine]
        assert group.reduce_scatter(x, op=op, sizes=lengths, out=out) is out
        expected = arrays[group.rank].copy()  # what belongs to others is left
        expected[mine] = reduced(arrays, op)[mine]
        assert_reduced(x, expected, group.comm)

    on_ranks(program, ranks)


@everywhere(1, 3)
@small_and_large
def test_a_part_is_reduced_into_other_memory(scale, ranks):
    def program():
        group = Mesh().group()
        lengths = uneven(group.size, scale)
        arrays = [values((sum(lengths),), FLOAT, rank) for rank in range(group.size)]
        out = np.full(lengths[group.rank], np.nan)
        assert group.reduce_scatter(arrays[group.rank], sizes=lengths, out=out) is out
        assert_reduced(out, reduced(arrays, "sum")[part_of(lengths, group.rank)], group.comm)

    on_ranks(program, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "out", [lambda n: np.empty(4 // n + 1), lambda n: np.empty(4 // n, int), lambda n: np.empty(8 // n)[::2]]
)
def test_an_out_that_does_not_fit_a_scatter_is_refused(out, ranks):
    with pytest.raises(UsageError, match="reduce_scatter: out must be contiguous"):
        run_threads(lambda: Mesh().group().reduce_scatter(np.ones(4), out=out(ranks)), ranks)


# --- in pieces

LENGTH = 3000
CALLS = {
    "all_reduce": lambda g, x, op: g.all_reduce(x, op, out=x),
    "reduce_scatter": lambda g, x, op: g.reduce_scatter(
        x, op=op, sizes=uneven(g.size, LENGTH // 6), out=x[part_of(uneven(g.size, LENGTH // 6), g.rank)]
    ),
    "reduce_scatter elsewhere": lambda g, x, op: g.reduce_scatter(x, op=op, sizes=uneven(g.size, LENGTH // 6)),
}


@every_pair(
    where=["arena", "one node", "four nodes"],
    name=CALLS.keys(),
    piece={f"pieces of {size}": size for size in (64, 200, 4096)},
    dtype=["float64", "float16"],
    op=["mean", "prod"],
)
def test_pieces_change_no_bit(where, piece, dtype, op, name, monkeypatch):
    """Large arrays are received, or read from others' memory, piece by piece."""
    monkeypatch.setattr(Connections, "tuning", Tuning(piece=piece))
    monkeypatch.setattr(shared_memory, "CACHE", 4 * piece)
    dtype = np.dtype(dtype)

    def program():
        mesh = Mesh()
        group = mesh.group()
        arrays = [values((LENGTH,), dtype, rank) for rank in range(group.size)]
        x = mesh.empty(LENGTH, dtype) if where == "arena" else np.empty(LENGTH, dtype)
        x[...] = arrays[group.rank]
        result = CALLS[name](group, x, op)
        expected = reduced(arrays, op)
        mine = part_of(uneven(group.size, LENGTH // 6), group.rank)
        assert_reduced(result, expected if name == "all_reduce" else expected[mine], group.comm)
        if name == "all_reduce":
            assert_alike(group, result)

    on_ranks(program, (4, 4 if where == "four nodes" else 1))


@everywhere(2, 3)
def test_several_are_under_way_in_parts_of_one_array(ranks):
    """As an engine has it: groups' gradients are reduced in place, parts of one memory, and waited for in any order."""

    def program():
        mesh = Mesh()
        group = mesh.group()
        length = 2000
        memory = mesh.empty(6 * length, FLOAT)  # which a node's ranks share
        memory[...] = np.concatenate([values((length,), FLOAT, 10 * group.rank + i) for i in range(6)])
        lengths = [length // group.size] * (group.size - 1)
        lengths.append(length - sum(lengths))
        mine = part_of(lengths, group.rank)
        flats = memory.reshape(6, length)
        started = [group.start_reduce_scatter(flat, sizes=lengths, out=flat[mine]) for flat in flats]
        order = np.random.default_rng(group.rank).permutation(6)
        for i in order:
            started[i].wait()
        gathers = [group.start_all_gather(flat[mine], sizes=lengths, out=flat) for flat in flats]
        for i in reversed(order):
            gathers[i].wait()
        for i, flat in enumerate(flats):
            arrays = [values((length,), FLOAT, 10 * rank + i) for rank in range(group.size)]
            assert_reduced(flat.copy(), reduced(arrays, "sum"), group.comm)

    on_ranks(program, ranks)


@everywhere(2, 3)
def test_calls_come_and_go_while_others_are_under_way(ranks):
    """As in a backward: what is begun early is waited for many calls of the same ranks later."""

    def program():
        mesh = Mesh(timeout=100)
        group, waiting = mesh.group(), deque()
        for number in range(100):
            x = mesh.empty(INLINE, FLOAT)
            x[...] = number + group.rank
            waiting.append((number, group.start_reduce_scatter(x)))
            small = [group.start_all_to_all(np.full((group.size, 3), number)) for _ in range(3)]
            for each in small:
                assert_same(each.wait(), np.full((group.size, 3), number))
            if len(waiting) > 2:
                begun, pending = waiting.popleft()
                total = group.size * begun + sum(range(group.size))
                assert (pending.wait() == total).all()
        for _, pending in waiting:
            pending.wait()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads overtake each other often
    try:
        on_ranks(program, ranks)
    finally:
        sys.setswitchinterval(interval)


# --- on a device


@pytest.mark.parametrize("aware", [False, True])
@small_and_large
def test_device_memory_is_filled_where_it_is(aware, scale, device):

    def program():
        comm = world().subset(range(world().size))
        group = Mesh(watch(comm, aware=aware)).group()
        lengths = uneven(group.size, scale)
        mine = part_of(lengths, group.rank)
        arrays = [values((sum(lengths),), FLOAT, rank) for rank in range(group.size)]
        x = device.asarray(arrays[group.rank])
        scattered = group.reduce_scatter(x, sizes=lengths, out=x[mine])
        gathered = group.all_gather(x[mine], sizes=lengths, out=x)
        assert device.owns(scattered) and gathered is x
        assert_same(x.memory, reduced(arrays, "sum"))

    run_threads(program, 3)


@pytest.mark.parametrize("nodes", ["aaa", "abc", "aabb"])
@pytest.mark.parametrize("size", [10, 100_000])
def test_a_result_may_overlap_what_is_reduced(nodes, size):
    def program():
        group = Mesh().group()
        space = np.zeros(size + 7)
        space[:size] = np.arange(size) + group.rank
        group.all_reduce(space[:size], out=space[7:])
        assert (space[7:] == sum(np.arange(size) + rank for rank in range(group.size))).all()
        alone = np.array(2.0)
        assert group.all_reduce(alone, out=alone)[()] == 2 * group.size

    run_threads(program, len(nodes), nodes=list(nodes))
