"""What every communicator promises: MPI processes, threads, and the least one that there can be, by queues.

``test_collectives.py`` runs all collectives on the same three.
"""

import time

import numpy as np
import pytest

from spmd_engine import Mesh, world
from spmd_engine.comm import pending
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.errors import CommunicationTimeout, MismatchError
from support.on_ranks import everywhere, on_ranks
from support.queue_ranks import Queues

each_communicator = everywhere(3, queues=3)


def wait_for(comm, requests):
    """As ``Progress`` waits, without operations."""
    idle, began = 0, time.monotonic()
    while True:
        comm.prepare_to_pause(idle)
        if comm.done(requests):
            return
        assert time.monotonic() - began < 60, "a message does not arrive"
        comm.pause(idle)
        idle += 1


def test_a_communicator_must_write_at_most_ten_members():
    assert Communicator.__abstractmethods__ == {
        *("start_send", "start_receive", "done", "create_subset", "pause", "announce_end", "ended")
    }


@each_communicator
def test_messages_of_a_tag_arrive_in_order_and_those_of_tags_apart(ranks):
    def program():
        comm = world()
        to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        late = np.empty(1)
        receiving = comm.start_receive(late, source, 6)
        assert not comm.done(receiving) and comm.done([])
        Mesh(comm).barrier()
        sent = [np.arange(size) + 10.0 * comm.rank for size in (3, 1, 4)]
        requests = [comm.start_send(x, to, tag) for x, tag in zip(sent, (7, 7, 32_000), strict=True)]
        requests += [comm.start_send(np.full(1, 5.0), to, 6), receiving]
        other, first, second = (np.full(5, -1.0) for _ in range(3))  # longer than the messages
        requests += [comm.start_receive(x, source, tag) for x, tag in ((other, 32_000), (first, 7), (second, 7))]
        wait_for(comm, [request for each in requests for request in each])
        base = 10.0 * source
        assert first.tolist() == [base, base + 1, base + 2, -1, -1] and second[:2].tolist() == [base, -1]
        assert other[:4].tolist() == [base, base + 1, base + 2, base + 3] and late[0] == 5
        Mesh(comm).barrier()

    on_ranks(program, ranks)


@each_communicator
def test_a_subset_has_its_order_and_messages_of_its_own(ranks):
    def program():
        comm = world()
        order = list(range(comm.size))[::-1]
        subset, again = comm.subset(order), comm.subset(order)
        assert (subset.rank, subset.size) == (order.index(comm.rank), comm.size)
        assert [subset.members[subset.rank], subset.hosts, subset.node] == [comm.rank, comm.hosts, comm.node]
        assert subset.progress is comm.progress
        got = [np.empty(1) for _ in range(2)]
        to, source = (subset.rank + 1) % subset.size, (subset.rank - 1) % subset.size
        requests = subset.start_send(np.full(1, 1.0), to, 3) + subset.start_receive(got[0], source, 3)
        wait_for(subset, requests)
        ranks_of_all = Mesh(subset).all_gather(np.array([comm.rank]))
        assert ranks_of_all.tolist() == order and got[0][0] == 1
        if comm.rank == 0:
            alone = comm.subset([0])
            assert Mesh(alone).all_reduce(np.ones(2)).tolist() == [1, 1]
            alone.free()
        again.free()
        subset.free()

    on_ranks(program, ranks)


@each_communicator
def test_different_calls_are_one_error_on_all_ranks(ranks):
    def program():
        mesh = Mesh()
        with pytest.raises(MismatchError, match=r"rank 1 called all_gather.* as its call number \d+"):
            mesh.all_gather(np.ones(3)) if mesh.rank == 1 else mesh.all_reduce(np.ones(3))
        assert mesh.all_reduce(np.ones(1))[0] == mesh.size

    on_ranks(program, ranks)


@pytest.mark.parametrize("ranks", [3, Queues(3)], ids=["threads", "queues"])
def test_a_rank_that_has_ended_is_named_and_a_timeout_reported(ranks, monkeypatch):
    for name in ("CHECK_AFTER", "MESSAGES_AFTER"):
        monkeypatch.setattr(pending, name, 1e-3)

    def program():
        mesh = Mesh()
        if mesh.rank == 0:
            with pytest.raises(CommunicationTimeout, match=r"waited 0.05 s: .*group rank 0 of 3"):
                Mesh(timeout=0.05).receive(1)
        mesh.barrier()
        if mesh.rank == 0:
            mesh.receive(1)  # which has ended

    with pytest.raises(MismatchError, match=r"waits for ranks whose program has ended \(\[1\]\)"):
        on_ranks(program, ranks)
