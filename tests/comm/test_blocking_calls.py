"""Repeated blocking calls, with inline data or data read in place: against NumPy, mixed with others."""

import itertools
import sys
import threading
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from spmd_engine import run_threads, world
from spmd_engine.comm.connections import connections_of
from spmd_engine.comm.dispatch import Routing
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.shared_memory.slot_table import SLOTS
from spmd_engine.comm.transports.messages import Messages
from spmd_engine.comm.transports.shared_memory import SharedMemory
from spmd_engine.errors import UsageError
from support.on_ranks import assert_same, numbers_of_ranks, on_ranks, reduced, values

ROOM = 256  # bytes of inline data here: few, so that small arrays take the transports of large ones
SPINS = 100  # tests of a condition before a rank yields: few, as there are more ranks than cores
TIMES = 2  # calls of each kind: the signatures of the others are known only after the first
TIMEOUT = 20.0  # seconds, instead of a hang
FLOAT = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def _quick_threads():
    """Threads that look for each other take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def spinning_group():
    """A group of all ranks, each of which acts as if it had a core."""
    comm = world().subset(range(world().size))
    comm.spin_tests = SPINS
    connections_of(comm).table.room = ROOM
    return Group(comm, "all", Ledger(), timeout=TIMEOUT)


def of_rank(r, n, dtype, shape, axis, uneven):
    """An array of rank r; ``uneven`` ranks differ along ``axis``."""
    shape = list(shape)
    if uneven:
        shape[axis] += r
    return values(tuple(shape), dtype, r)


def outputs(group, like):
    """Where results may go: a new array, ordinary memory, or memory that ranks share."""
    return [None, np.empty_like(like), group.connections.empty(like.shape, like.dtype)]


# --- programs: what every rank runs


def all_gather(dtype):
    group = spinning_group()
    n, rank = group.size, group.rank
    for shape, axis, uneven in [((50,), 0, False), ((40, 6), 0, True), ((6, 40), 1, False), ((5, 40, 2), 1, True)]:
        arrays = [of_rank(r, n, dtype, shape, axis, uneven) for r in range(n)]
        whole = np.concatenate(arrays, axis)
        for form in (np.ascontiguousarray, np.asfortranarray):
            for _ in range(TIMES):
                assert_same(group.all_gather(form(arrays[rank]), axis), whole, shape, uneven)
        for out in outputs(group, whole) if axis == 0 else []:
            for _ in range(TIMES):
                result = group.all_gather(arrays[rank], out=out)
                assert_same(result, whole, shape, uneven)
                assert out is None or result is out
        if axis == 0:  # where it lies in the result, or elsewhere in that, on all ranks or some
            starts = np.cumsum([0, *(len(each) for each in arrays)])
            for turn in range(2 * TIMES):
                out = np.zeros_like(whole)
                begin = starts[rank] if turn % 3 != rank else starts[-1] - len(arrays[rank])
                own = out[begin : begin + len(arrays[rank])]
                own[...] = arrays[rank]
                assert_same(group.all_gather(own if turn % 2 or rank else own.copy(), out=out), whole, "in place", turn)
    return group.ledger.total().calls


def all_to_all(dtype):
    group = spinning_group()
    n, rank = group.size, group.rank
    for shape, axis, concat in [((60, 5), 0, 0), ((60,), 0, 0), ((60, 4), 0, 1), ((3, 61), 1, 0), ((2, 7, 40), 2, 1)]:
        arrays = [values(shape, dtype, r) for r in range(n)]
        for splits in (False, True):
            cut = [*range(n - 1), shape[axis] - sum(range(n - 1))]
            cuts = [np.roll(cut, r).tolist() if axis == concat else cut for r in range(n)]
            parts = [
                np.split(x, np.cumsum(cuts[r])[:-1], axis) if splits else np.array_split(x, n, axis)
                for r, x in enumerate(arrays)
            ]
            whole = np.concatenate([parts[r][rank] for r in range(n)], concat)
            for _ in range(TIMES):
                result = group.all_to_all(arrays[rank], axis, concat, splits=cuts[rank] if splits else None)
                assert_same(result[0] if splits else result, whole, shape, splits)
    return group.ledger.total().calls


def parts_that_are_even_on_some_ranks(dtype):
    """What most ranks send and receive is all of one length; only the last has a longer part, for itself."""
    group = spinning_group()
    n, rank = group.size, group.rank
    cuts = [[90 if r == part == n - 1 else 70 for part in range(n)] for r in range(n)]
    arrays = [values((sum(cuts[r]),), dtype, r) for r in range(n)]
    whole = np.concatenate([np.split(x, np.cumsum(cuts[r])[:-1])[rank] for r, x in enumerate(arrays)])
    for _ in range(TIMES):
        assert_same(group.all_to_all(arrays[rank], splits=cuts[rank])[0], whole)
    return group.ledger.total().calls


def reductions(dtype):
    group = spinning_group()
    n, rank = group.size, group.rank
    for shape, op in [((300,), "sum"), ((48, 7), "mean"), ((300,), "max"), ((48, 7), "sum")]:
        arrays = [values(shape, dtype, r) for r in range(n)]
        whole = reduced(arrays, op)
        for out in outputs(group, whole):
            for _ in range(TIMES):
                assert_same(group.all_reduce(arrays[rank], op, out=out), whole, shape, op)
        if whole.dtype == dtype:
            for _ in range(TIMES):
                x = arrays[rank].copy()
                assert_same(group.all_reduce(x, op, out=x), whole, "in place")
        for axis in range(len(shape)):
            part = np.array_split(whole, n, axis)[rank]
            for out in outputs(group, part):
                for _ in range(TIMES):
                    assert_same(group.reduce_scatter(arrays[rank], axis, op, out=out), np.ascontiguousarray(part), op)
    return group.ledger.total().calls


def broadcasts(dtype):
    """Roots, sizes and callers' arrays that change from call to call."""
    group = spinning_group()
    for root, size, times in itertools.product(range(group.size), [1, 0, 20, 500], range(TIMES)):
        x = values((size,), dtype, root + times)
        given = x if group.rank == root else (None, values((3,), dtype, 0))[times % 2]
        assert_same(group.broadcast(given, root), x, root, size)
    return group.ledger.total().calls


def some_wait_and_some_start(dtype):
    """Ranks that call the same in different ways: blocking or begun, with ordinary memory or shared."""
    group = spinning_group()
    n, rank = group.size, group.rank
    for turn in range(4 * n):
        odd = turn % n == rank
        x = values((200,), dtype, rank)
        if odd and turn % 2:
            shared = group.connections.empty(x.shape, x.dtype)
            shared[...] = x
            x = shared
        arrays = [values((200,), dtype, r) for r in range(n)]
        starts = odd and turn % 4 < 2
        calls = {
            "all_gather": np.concatenate(arrays),
            "all_reduce": reduced(arrays, "sum"),
            "reduce_scatter": np.array_split(reduced(arrays, "sum"), n)[rank],
            "all_to_all": np.concatenate([np.array_split(each, n)[rank] for each in arrays]),
        }
        for name, expected in calls.items():
            result = getattr(group, f"start_{name}")(x).wait() if starts else getattr(group, name)(x)
            assert_same(result, expected, name, turn)
    return group.ledger.total().calls


OFFERS = list(itertools.product(["ordinary", "shared"], ["waits", "starts"], ["", "shared"]))


def every_pair_of_offers(dtype, reads):
    """Memory of either kind, for the array and for the result, in calls that are waited for or begun.

    ``reads``: whether ranks can read each other's ordinary memory; else no copies are made for them.
    """
    group = spinning_group()
    if not reads:
        connections = group.connections
        connections.neighbours.cross_memory, connections.tuning = None, replace(connections.tuning, copied=0)
    n, rank = group.size, group.rank
    arrays = [values((6 * n * 20,), dtype, r) for r in range(n)]
    total = reduced(arrays, "sum")
    results = {
        "all_reduce": total,
        "reduce_scatter": np.split(total, n)[rank],
        "all_gather": np.concatenate(arrays),
        "all_to_all": np.concatenate([np.split(each, n)[rank] for each in arrays]),
        "broadcast": arrays[1],
    }

    def empty(kind, like):
        return np.empty_like(like) if kind == "ordinary" else group.connections.empty(like.shape, like.dtype)

    for usual, odd in itertools.product(OFFERS, OFFERS):
        memory, how, where = odd if rank == n - 1 else usual
        for name, expected in results.items():
            x = empty(memory, arrays[rank])
            x[...] = arrays[rank]
            options = {}
            if name == "broadcast":
                options["root"] = 1
            elif name != "all_to_all" and where:
                options["out"] = empty(where, expected)
            if how == "waits":
                result = getattr(group, name)(x, **options)
            else:
                result = getattr(group, f"start_{name}")(x, **options).wait()
            assert_same(result, expected, name, usual, odd)
    return group.ledger.total().calls


def one_fails(dtype):
    """A rank that cannot have its result leaves the others theirs, and goes on with them."""
    group = spinning_group()
    n, rank = group.size, group.rank
    for size in (20, 500):
        arrays = [values((size,), dtype, r) for r in range(n)]
        for _ in range(TIMES):
            assert_same(group.all_gather(arrays[rank]), np.concatenate(arrays))
        if rank == 0:
            with pytest.raises(UsageError, match="out has shape"):
                group.all_gather(arrays[rank], out=np.empty(n * size + 1, dtype))
        else:
            assert_same(group.all_gather(arrays[rank]), np.concatenate(arrays))
    large = np.full(3, 3e38, np.float32)
    for turn in range(TIMES):
        fails = rank == 0 and turn == TIMES - 1
        error = pytest.raises(FloatingPointError) if fails else nullcontext()
        with error, np.errstate(over="raise" if fails else "ignore"):
            assert np.isinf(group.all_reduce(large)).all()
    for _ in range(2 * SLOTS):
        group.barrier()
    return group.ledger.total().calls


def where_no_result_can_go(dtype):
    """Said before anyone waits, whichever way the call would take."""
    group = spinning_group()
    for size in (20, 500):
        x = values((size,), dtype, group.rank)
        for operation, length in (("all_gather", size * group.size), ("all_reduce", size)):
            for _ in range(TIMES):
                getattr(group, operation)(x)
            out = np.empty(length, dtype)
            out.flags.writeable = False
            with pytest.raises(UsageError, match="writable"):
                getattr(group, operation)(x, out=out)
    x = values((2, 3), dtype, group.rank)
    for _ in range(TIMES):
        group.all_gather(x, 1)
    with pytest.raises(UsageError, match="axis 0"):
        group.all_gather(x, 1, out=np.empty((2, 3 * group.size), dtype))
    return group.ledger.total().calls


# --- tests


PROGRAMS = [all_gather, all_to_all, parts_that_are_even_on_some_ranks, broadcasts]
PROGRAMS += [some_wait_and_some_start, one_fails, where_no_result_can_go, reductions]
OTHER_DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype(">f4")]  # reduced in another dtype than they have


def programs_and_dtypes():
    """Every program in turn on 2, 3 or 4 ranks under MPI, and on 2, 3 or 5 by threads; each dtype on all of
    these by threads or MPI in turn; else ``soak``."""
    for way in numbers_of_ranks(2, 3, 5, soak=[8]):  # 5: as many rounds as 8 has, and no power of two
        for i, program in enumerate(PROGRAMS):
            turn = [f"mpi-{2 + i % 3}", f"threads-{(2, 3, 5)[i % 3]}"]
            marks = [*way.marks, *([] if way.id in turn else [pytest.mark.soak])]
            name = f"{program.__name__}-{FLOAT}-{way.id}"
            yield pytest.param(program, FLOAT, *way.values, marks=marks, id=name)
    ways = numbers_of_ranks(2, 3, 5, soak=[8])
    for (i, dtype), way in itertools.product(enumerate(OTHER_DTYPES), ways):
        turn = [["threads-2", "mpi-3", "threads-5"], ["mpi-2", "threads-3", "mpi-4"]][i]
        marks = [*way.marks, *([] if way.id in turn else [pytest.mark.soak])]
        yield pytest.param(reductions, dtype, *way.values, marks=marks, id=f"reductions-{dtype}-{way.id}")


@pytest.mark.parametrize("program, dtype, ranks", list(programs_and_dtypes()))
def test_repeated_calls_return_what_numpy_computes(program, dtype, ranks):
    assert all(calls > 0 for calls in on_ranks(program, ranks, dtype))


@pytest.mark.parametrize("reads, expected", [(True, {SharedMemory}), (False, {SharedMemory, Messages})])
def test_all_ranks_take_the_same_route(reads, expected, monkeypatch, ranks=3):
    """Whatever each of them offers. A call without a transport was inline in shared memory."""
    taken, transport_of = defaultdict(dict), Routing.transport

    def recorded(self, signature, number, *facts):
        transport = transport_of(self, signature, number, *facts)
        if self.axes == "all" and transport is not None:
            taken[threading.get_ident()][number] = type(transport)
        return transport

    monkeypatch.setattr(Routing, "transport", recorded)
    on_ranks(every_pair_of_offers, ranks, FLOAT, reads)
    assert len(taken) == ranks
    numbers = {number for each in taken.values() for number in each}
    ways = [{each.get(number, SharedMemory) for each in taken.values()} for number in numbers]
    assert {len(each) for each in ways} == {1}
    assert set.union(*ways) == expected


@pytest.mark.parametrize("ranks", numbers_of_ranks(2, mpi=(2,)))
def test_a_rank_alone_has_its_own_array_however_often(ranks):
    """An axis of size 1, on ranks that have a core each."""

    def program():
        comm = world().subset([world().rank])
        comm.spin_tests = SPINS
        group, x = Group(comm, "alone", Ledger(), timeout=TIMEOUT), np.arange(5.0)
        for _ in range(4):
            results = group.all_reduce(x), group.all_gather(x), group.reduce_scatter(x), group.all_to_all(x)
            for result in (*results, group.broadcast(x)):
                assert_same(result, x)
            group.barrier()
        return group.ledger.total().calls

    assert set(on_ranks(program, ranks)) == {0}


def test_memory_is_the_callers_again_when_all_have_read_it(ranks=3):
    """Also where one of them is slow: the others, whose results are there, wait for it."""

    def program():
        group = spinning_group()
        exchange = group.connections.table.exchange
        if group.rank == 1:
            group.connections.table.exchange = lambda *arguments: time.sleep(2e-3) or exchange(*arguments)
        for turn in range(3 * TIMES):
            arrays = [values((90,), FLOAT, turn + r) for r in range(ranks)]
            x = arrays[group.rank].copy()
            for name, expected in {
                "broadcast": arrays[0],
                "all_gather": np.concatenate(arrays),
                "all_to_all": np.concatenate([np.split(each, ranks)[group.rank] for each in arrays]),
                "reduce_scatter": np.split(reduced(arrays, "sum"), ranks)[group.rank],
            }.items():
                result = getattr(group, name)(x)
                x.fill(0)
                assert_same(result, expected, name, turn)
                x[...] = arrays[group.rank]
        return group.ledger.total().calls

    assert set(run_threads(program, ranks)) == {3 * TIMES * 4}
