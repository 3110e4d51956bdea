"""What a call costs a rank of a very large group, with a transport that does nothing."""

import sys
import tracemalloc

import numpy as np

from spmd_engine.comm import Group, Ledger
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.communicators.threads import solo

RANKS = 4096


def crowd(words):
    """A communicator of many ranks, as the first of them sees it, where all others send these words."""
    comm, sent = solo(), []
    comm.size, comm.hosts = RANKS, [str(r) for r in range(RANKS)]

    def start_send(data, to, tag):
        sent.append(data)
        return []

    def start_receive(data, source, tag):
        data[: words.nbytes] = words.view(np.uint8)
        return []

    comm.start_send, comm.start_receive = start_send, start_receive
    return comm, sent


def test_to_agree_takes_neither_many_calls_nor_much_memory():
    comm, sent = crowd(Signature("barrier").words)
    group = Group(comm, "world", Ledger())
    group.barrier()
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if "call" in event else None)
    group.barrier()
    sys.setprofile(None)
    assert len(calls) < RANKS / 2
    assert len(sent) == 2 * 18  # to three children in each of six levels
    tracemalloc.start()
    group.barrier()
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_small_array_of_the_root_comes_with_the_agreement():
    comm, sent = crowd(Signature("broadcast").words)
    assert (Group(comm, "world", Ledger()).broadcast(np.arange(0.0)) == np.arange(0.0)).all()
    assert max(message.nbytes for message in sent) < 500
