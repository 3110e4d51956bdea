"""The end of a program is no news before its last message is: ranks that wait for a message get it, however late."""

import threading
import time

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.comm import pending
from spmd_engine.comm.communicators.threads import ThreadCommunicator
from spmd_engine.errors import MismatchError


@pytest.fixture
def checks(monkeypatch):
    """``checks.hook(rank, number)`` is called before that rank's check, from 1, whether ranks have ended; a rank that
    waits checks soon."""
    for name in ("CHECK_AFTER", "MESSAGES_AFTER"):
        monkeypatch.setattr(pending, name, 1e-3)
    counts = {}

    def ended(communicator, awaited, real=ThreadCommunicator.ended):
        me = communicator._me
        counts[me] = counts.get(me, 0) + 1
        ended.hook(me, counts[me])
        return real(communicator, awaited)

    monkeypatch.setattr(ThreadCommunicator, "ended", ended)
    return ended


@pytest.fixture
def announced(monkeypatch):
    """Events, by rank, that are set when it has announced its end."""
    events = [threading.Event() for _ in range(4)]

    def announce_end(communicator, real=ThreadCommunicator.announce_end):
        real(communicator)
        events[communicator._me].set()

    monkeypatch.setattr(ThreadCommunicator, "announce_end", announce_end)
    return events


MOST = 60  # seconds after which a test gives up


@pytest.mark.parametrize("nodes", [["one"] * 4, ["one"] * 2 + ["two"] * 2, ["one", "two", "three", "four"]], ids=len)
@pytest.mark.parametrize("how", ["message", "collective"])
def test_what_a_rank_sends_just_before_its_end_arrives(how, nodes, checks, announced):
    """Rank 1 has looked for it in vain; before it asks whether rank 0 has ended, that rank sends it, and ends."""
    asks = threading.Event()

    def hook(rank, number):
        if rank == 1 and number == 1:
            asks.set()
            assert announced[0].wait(MOST)

    checks.hook = hook

    def program():
        mesh = Mesh(rows=2, columns=2, timeout=MOST)
        if mesh.rank == 0:
            assert asks.wait(MOST)
        if mesh.rank < 2 and how == "collective":
            return float(mesh.all_reduce(np.ones(1), over="columns")[0])
        if mesh.rank == 0:
            mesh.send(1, np.full(9, 2.0), over="columns")
        return float(mesh.receive(0, over="columns")[3]) if mesh.rank == 1 else 2.0

    # In a collective rank 0 cannot end first: it waits for rank 1, which has begun already.
    assert run_threads(program, 4, nodes=nodes)[1] == 2.0


def test_a_rank_that_ends_while_a_call_of_it_is_under_way_has_not_ended_yet(checks):
    """Rank 0 starts a sum and ends; rank 3 begins it only when rank 2 has waited for rank 0's part for long."""
    waited = threading.Event()
    checks.hook = lambda rank, number: waited.set() if rank == 2 and number == 5 else None

    def program():
        mesh = Mesh(timeout=MOST)
        if mesh.rank == 0:
            mesh.start_all_reduce(np.ones(1))
            return 4.0
        if mesh.rank == 3:
            assert waited.wait(MOST)
        return float(mesh.all_reduce(np.ones(1))[0])

    assert run_threads(program, 4, nodes=["one", "two", "three", "four"]) == [4.0] * 4


def test_an_end_without_the_awaited_message_is_an_error(checks):
    checks.hook = lambda *_: None

    def program():
        mesh = Mesh(rows=2, columns=2, timeout=MOST)
        if mesh.rank == 1:
            mesh.receive(0, over="columns")

    with pytest.raises(MismatchError, match=r"waits for ranks whose program has ended \(\[0\]\)"):
        run_threads(program, 4)


@pytest.mark.parametrize(("ranks", "busy"), [(3, 2), (4, 3), (4, 0)])
def test_ranks_that_end_wait_for_one_that_computes_however_long(ranks, busy, monkeypatch):
    """Also between nodes, where the next message of a rank comes from one that itself waits."""
    for name in ("CHECK_AFTER", "MESSAGES_AFTER", "APART_AFTER"):
        monkeypatch.setattr(pending, name, 1e-3)

    def program():
        mesh = Mesh()
        mesh.all_reduce(np.ones(3))
        if mesh.rank == busy:
            time.sleep(0.4)  # the others have given up by then, if they do

    run_threads(program, ranks, nodes=[str(rank) for rank in range(ranks)])
