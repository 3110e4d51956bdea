"""Several calls and messages under way at once, waited for in any order."""

import itertools
import time

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from support.on_ranks import INLINE, assert_same, everywhere, on_ranks


@everywhere(2, 3, 8)
def test_many_messages_arrive_in_the_order_sent(ranks):
    def program():
        group = Mesh().group()
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        shapes = [(i % 7, 400 * (i % 3)) for i in range(100)]
        sent = [group.start_send(right, np.full(shape, i)) for i, shape in enumerate(shapes)]
        for i, shape in enumerate(shapes):
            assert_same(group.receive(left), np.full(shape, i))
        for each in sent:
            each.wait()

    on_ranks(program, ranks)


@everywhere(2, 4)
def test_receives_may_be_started_first_and_waited_for_backwards(ranks):
    def program():
        group = Mesh().group()
        partner = group.rank ^ 1
        if partner < group.size:  # with three ranks the last has none
            received = [group.start_receive(partner) for _ in range(5)]
            sent = [group.start_send(partner, np.full(700 * i, i)) for i in range(5)]
            for i in reversed(range(5)):
                assert_same(received[i].wait(), np.full(700 * i, i))
                sent[i].wait()

    on_ranks(program, ranks)


def test_a_rank_may_send_to_itself():
    def program():
        group = Mesh().group()
        sent = group.start_send(group.rank, np.arange(INLINE))
        assert_same(group.receive(group.rank), np.arange(INLINE))
        sent.wait()

    run_threads(program, 2)


@everywhere(2, 3)
@pytest.mark.parametrize("size", [3, INLINE], ids=["inline", "large"])
def test_crossed_waits(size, ranks):
    def program():
        group = Mesh().group()
        first = group.start_all_reduce(np.full(size, 1.0))
        second = group.start_all_gather(np.full(size, group.rank))
        for pending in (first, second) if group.rank else (second, first):
            pending.wait()
        assert_same(first.wait(), np.full(size, float(group.size)))  # again: the same result
        assert_same(second.wait(), np.arange(group.size).repeat(size))

    on_ranks(program, ranks)


@pytest.mark.parametrize(
    "ranks", [pytest.param(4, id="threads-4"), pytest.param(None, id="mpi-4", marks=pytest.mark.mpi(ranks=4))]
)
@pytest.mark.parametrize("size", [3, INLINE], ids=["inline", "large"])
def test_overlapping_groups_waited_for_in_any_order(size, ranks):
    def program():
        with Mesh(data=2, model=2) as mesh:
            x = np.full(size, float(mesh.rank))
            started = {
                over: [mesh.start_all_reduce(x * 2**i, over=over) for i in range(3)]
                for over in ("data", "model", ("model", "data"))
            }
            order = list(itertools.chain(*started.values()))
            np.random.default_rng(mesh.rank).shuffle(order)  # another one on every rank
            for pending in order:
                pending.wait()
            for over, pendings in started.items():
                total = {"data": 2 * (mesh.rank % 2) + 2, "model": 4 * (mesh.rank // 2) + 1}.get(over, 6)
                for i, pending in enumerate(pendings):
                    assert_same(pending.wait(), np.full(size, float(total * 2**i)))

    on_ranks(program, ranks)


@everywhere(1, 3)
def test_barrier(ranks):
    """Nobody leaves before the last has come."""

    def program():
        group = Mesh().group()
        if group.rank == group.size - 1:
            time.sleep(0.05)
        came = time.monotonic()  # of one clock, as all are on one node
        group.barrier()
        left = time.monotonic()
        assert group.all_reduce(np.array(came), "max") <= left

    on_ranks(program, ranks)
