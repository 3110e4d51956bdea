"""What ranks send between nodes: two messages a rank to agree, and the bytes of a ring."""

from collections import Counter
from math import ceil, log, log2

import numpy as np
import pytest

from spmd_engine import run_threads
from spmd_engine.comm.agreement.tree import RADIX
from spmd_engine.comm.communicators.threads import ThreadCommunicator
from spmd_engine.comm.connections import Tuning
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
    "all_to_all": lambda group: group.all_to_all(np.ones(group.size)),
    "broadcast": lambda group: group.broadcast(np.ones(9) if group.rank == 3 else None, 3),
}


@placements
@pytest.mark.parametrize("name", SMALL)
def test_messages_of_a_small_call(name, ranks, per_node, sent):
    """In each lane of M nodes 2 (M - 1), as few as all ranks need to learn of all."""
    messages, _ = of_one_call(sent, SMALL[name], ranks, per_node)
    nodes = ranks // per_node
    assert messages.sum() == 2 * (nodes - 1) * per_node
    assert max(messages) <= (RADIX - 1) * ceil(log(nodes, RADIX))


MEDIUM = {
    "reduce_scatter": (lambda group: group.reduce_scatter(np.ones(3 << 11)), 1),
    "all_reduce": (lambda group: group.all_reduce(np.ones(3 << 11)), 2),
}


@placements
@pytest.mark.parametrize("name", MEDIUM)
def test_messages_of_a_medium_reduction(name, ranks, per_node, sent):
    """Of 48 KiB: the agreement, and log2(M) rounds of messages of M nodes, or twice, if it does not carry it."""
    call, times = MEDIUM[name]
    messages, _ = of_one_call(sent, call, ranks, per_node)
    nodes = ranks // per_node
    rounds = times * ceil(log2(nodes)) if Tuning().inline_between(nodes) < 48 << 10 else 0
    assert messages.sum() == per_node * (2 * (nodes - 1) + nodes * rounds)


def test_a_small_sum_sends_each_array_once_and_the_sum_to_each_rank(sent):
    messages, data = of_one_call(sent, lambda group: group.all_reduce(np.ones(1 << 8)), 12, 1)
    assert messages.sum() == 22 and abs(data.sum() - 22 * 2048) <= 22 * 100


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_sums_of_medium_size_go_up_the_tree_in_lanes(name, sent):
    """Of 40 KiB on four nodes of four ranks: each lane adds a quarter of the array."""
    call = lambda group: getattr(group, name)(np.ones(5 << 10))  # noqa: E731
    messages, data = of_one_call(sent, call, 16, 4)
    down = 1 if name == "all_reduce" else 1 / 4
    assert messages.sum() == 4 * 6 and abs(data.sum() - 3 * (1 + down) * 40960) <= 24 * 100


def test_a_small_exchange_gathers_arrays_and_sends_each_rank_its_parts(sent):
    """Of 4 ranks, of which the first gets three arrays, and sends three."""
    messages, data = of_one_call(sent, lambda group: group.all_to_all(np.ones(1 << 8)), 4, 1)
    assert messages.tolist() == [3, 1, 1, 1] and (abs(data - messages * 2048) <= messages * 100).all()


def test_a_broadcast_leaves_a_node_in_lanes(sent):
    """Its root's node scatters, and the others gather, too: no node sends the array more than twice."""
    x = np.ones(1 << 16)
    _, data = of_one_call(sent, lambda group: group.broadcast(x if group.rank == 1 else None, 1), 8, 2)
    by_node = data.reshape(4, 2).sum(axis=1) / x.nbytes
    assert abs(by_node - [1.5, 0.5, 0.5, 0.5]).max() < 0.01


@placements
def test_bytes_of_a_large_call(ranks, per_node, sent):
    """2 S (M-1)/M leave each of M nodes for an all_reduce of S bytes, which is 2 S (n-1)/n a rank where each is one."""
    x, nodes = np.ones(1 << 15), ranks // per_node
    messages, data = of_one_call(sent, lambda group: group.all_reduce(x), ranks, per_node)
    payload = 2 * x.nbytes * (nodes - 1) // nodes // per_node
    assert (abs(data - payload) <= 100 * nodes).all()
    assert messages.sum() == per_node * 2 * (nodes - 1) * (1 + nodes)


def test_lengths_that_all_know_are_not_asked_for(sent):
    """Each rank knows of other lengths than its neighbour."""

    def call(group):
        splits = [1000 * (1 + (group.rank + r) % 2) for r in range(group.size)]
        group.all_to_all(np.ones(sum(splits)), splits=splits, received=splits)

    messages, _ = of_one_call(sent, call, 4, 1)
    assert messages.sum() == 2 * 3 + 4 * 3
