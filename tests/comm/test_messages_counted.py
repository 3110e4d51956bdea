"""What a rank sends between nodes: messages that grow with log2(n), and the bytes of a ring."""

from collections import Counter
from math import ceil, log2

import numpy as np
import pytest

from spmd_engine import run_threads
from spmd_engine.comm.communicators.threads import ThreadCommunicator
from support.nodes import everyone

PLACEMENTS = [(8, 1), (16, 4)]  # ranks, and how many share a node
SOAK = [pytest.param(*each, marks=pytest.mark.soak) for each in ((16, 1), (32, 1), (32, 4), (16, 8), (32, 8))]
placements = pytest.mark.parametrize("ranks, per_node", [*PLACEMENTS, *SOAK])


@pytest.fixture
def sent(monkeypatch):
    """Messages, and their bytes, by the rank that sends them."""
    counts = Counter(), Counter()
    start_send = ThreadCommunicator.start_send

    def counted(self, data, to, tag):
        counts[0][self._me] += 1
        counts[1][self._me] += data.nbytes
        return start_send(self, data, to, tag)

    monkeypatch.setattr(ThreadCommunicator, "start_send", counted)
    return counts


def times(call, many):
    """A program of that many calls; messages of its end are not of interest, so what they are without calls is."""

    def program():
        group = everyone()
        for _ in range(many):
            call(group)

    return program


def of_one_call(sent, call, ranks, per_node):
    """What each rank sends for a call: messages and bytes."""
    nodes = [str(r // per_node) for r in range(ranks)]
    totals = []
    for many in (1, 3):
        for count in sent:
            count.clear()
        run_threads(times(call, many), ranks, nodes=nodes)
        totals.append([np.array([count[r] for r in range(ranks)]) for count in sent])
    (messages, data), (more_messages, more_data) = totals
    return (more_messages - messages) / 2, (more_data - data) / 2


SMALL = {
    "barrier": lambda group: group.barrier(),
    "all_reduce": lambda group: group.all_reduce(np.ones(1)),
    "reduce_scatter": lambda group: group.reduce_scatter(np.ones(group.size)[: 512 // group.size]),
    "all_gather": lambda group: group.all_gather(np.ones(1)),
    "broadcast": lambda group: group.broadcast(np.ones(9) if group.rank == 3 else None, 3),
}


@placements
@pytest.mark.parametrize("name", SMALL)
def test_messages_of_a_small_call(name, ranks, per_node, sent):
    messages, _ = of_one_call(sent, SMALL[name], ranks, per_node)
    assert set(messages) == {ceil(log2(ranks // per_node))}


MEDIUM = {
    "reduce_scatter": (lambda group: group.reduce_scatter(np.ones(1 << 13)), 1),
    "all_reduce": (lambda group: group.all_reduce(np.ones(3 << 9)), 2),
    "sum of 2 KiB": (lambda group: group.all_reduce(np.ones(1 << 8)), 1),
}


@placements
@pytest.mark.parametrize("name", MEDIUM)
def test_reductions_travel_with_the_agreement(name, ranks, per_node, sent):
    """As many messages as by the MPI library: log2(M) for parts of 64 KiB, twice that for all of 12 KiB."""
    call, times = MEDIUM[name]
    messages, _ = of_one_call(sent, call, ranks, per_node)
    assert set(messages) == {times * ceil(log2(ranks // per_node))}


def test_a_sum_of_2_kib_takes_log2_messages_also_on_twelve_nodes(sent):
    """Each rank sends two arrays of others with its own, and two sums, where parts would take 8 messages."""
    messages, data = of_one_call(sent, MEDIUM["sum of 2 KiB"][0], 12, 1)
    assert set(messages) == {4} and (abs(data - 4 * 2048) <= 4 * 100).all()


def test_a_broadcast_leaves_a_node_in_lanes(sent):
    """Its root's node scatters, and all nodes gather: no node sends the array more than twice."""
    x = np.ones(1 << 16)
    _, data = of_one_call(sent, lambda group: group.broadcast(x if group.rank == 1 else None, 1), 8, 2)
    by_node = data.reshape(4, 2).sum(axis=1) / x.nbytes
    assert abs(by_node - [1.5, 0.75, 0.75, 0.75]).max() < 0.01


@placements
def test_bytes_of_a_large_call(ranks, per_node, sent):
    """2 S (M-1)/M leave each of M nodes for an all_reduce of S bytes, which is 2 S (n-1)/n a rank where each is one."""
    x, nodes = np.ones(1 << 15), ranks // per_node
    messages, data = of_one_call(sent, lambda group: group.all_reduce(x), ranks, per_node)
    payload = 2 * x.nbytes * (nodes - 1) // nodes // per_node
    assert (abs(data - payload) <= 100 * ceil(log2(nodes))).all()
    assert set(messages) == {ceil(log2(nodes)) + 2 * (nodes - 1)}


def test_lengths_that_all_know_are_not_asked_for(sent):
    """Each rank knows of other lengths than its neighbour."""

    def call(group):
        splits = [1000 * (1 + (group.rank + r) % 2) for r in range(group.size)]
        group.all_to_all(np.ones(sum(splits)), splits=splits, received=splits)

    messages, _ = of_one_call(sent, call, 4, 1)
    assert set(messages) == {ceil(log2(4)) + 3}
