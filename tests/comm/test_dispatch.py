"""The transport of a call: ``choose`` for all that it depends on, and every transport in real programs."""

import threading
from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.comm import collectives, dispatch
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.connections import Tuning
from spmd_engine.comm.dispatch import Routing, choose, inline_between_nodes, inline_limit
from spmd_engine.comm.transports.hierarchical import Hierarchical
from spmd_engine.comm.transports.messages import Messages
from spmd_engine.comm.transports.nccl import NcclTransport
from spmd_engine.comm.transports.rounds import MessageRounds
from spmd_engine.comm.transports.shared_memory import SharedMemory
from spmd_engine.comm.transports.transport import Facts

KIB, MIB = 1 << 10, 1 << 20


def chosen(operation, size, ranks, *, axis=0, **facts):
    return choose(Signature(operation, axis=axis), Facts(size, ranks, **facts))


OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "size, ranks, flat, by_nodes",
    [
        (0, 4, MessageRounds, MessageRounds),
        (2 * KIB - 1, 4, MessageRounds, MessageRounds),
        (2 * KIB, 4, MessageRounds, Hierarchical),
        (31 * KIB, 4, MessageRounds, Hierarchical),
        (32 * KIB, 4, Messages, Hierarchical),
        (64 * KIB, 32, MessageRounds, Hierarchical),
        (MIB, 32, Messages, Hierarchical),
        (256 * KIB, 128, MessageRounds, Hierarchical),
        (4 << 30, 4, Messages, Hierarchical),
    ],
)
def test_transports_between_nodes_by_size_and_placement(operation, size, ranks, flat, by_nodes):
    """An all_to_all is an exchange of messages at any size."""
    if operation == "all_to_all":
        flat = by_nodes = Messages
    assert chosen(operation, size, ranks) is flat
    assert chosen(operation, size, ranks, even_nodes=True) is by_nodes


@pytest.mark.parametrize("unusual", [{"lengths_known": False}, {"axis": 1}], ids=["unknown lengths", "axis 1"])
def test_gathers_that_are_not_hierarchical(unusual):
    assert chosen("all_gather", MIB, 4, even_nodes=True, **unusual) is Messages
    assert chosen("all_gather", 256 * KIB, 128, even_nodes=True, **unusual) is MessageRounds


def test_sums_in_rank_order_are_exchanges_of_all_arrays():
    for operation, size in product(("all_reduce", "reduce_scatter"), (8, KIB, MIB)):
        assert chosen(operation, size, 4, in_rank_order=True) is Messages
    assert chosen("broadcast", KIB, 4, in_rank_order=True) is MessageRounds


def test_limits_of_inline_data_between_nodes():
    """The first rank sends the array to its children; lanes send the arrays of their node several times."""
    limits = {
        ("all_reduce", 2, 2): 128 * KIB,
        ("broadcast", 5, 5): 32 * KIB,
        ("reduce_scatter", 33, 33): 16 * KIB,
        ("all_gather", 33, 33): 16 * KIB // 33,
        ("all_to_all", 2, 2): 64 * KIB,
        ("all_to_all", 12, 12): 6 * KIB,
        ("all_to_all", 32, 32): 4 * KIB,
        ("broadcast", 4, 2): 8 * KIB,
        ("all_reduce", 132, 33): 16 * KIB,
        ("all_gather", 128, 32): KIB // 32,
    }
    for (operation, ranks, senders), limit in limits.items():
        assert inline_between_nodes(operation, ranks, senders, False, Tuning()) == limit
    assert inline_between_nodes("all_reduce", 16, 16, True, Tuning()) == 8 * KIB


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nccl_takes_all_calls_whose_arrays_are_on_devices(operation):
    for size, one_node, even_nodes in product((0, KIB, 1 << 40), (False, True), (False, True)):
        nodes = {"one_node": one_node, "even_nodes": even_nodes}
        assert chosen(operation, size, 4, host=False, nccl=True, **nodes) is NcclTransport
        assert chosen(operation, size, 4, host=False, **nodes) is not NcclTransport


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "offered, expected",
    [
        ({"readable": True}, SharedMemory),
        ({}, Messages),
        ({"inline": True, "readable": True}, None),
        ({"inline": True, "host": False}, Messages),
    ],
)
def test_transports_within_a_node_by_what_all_ranks_offer(operation, offered, expected):
    """For any size: ``inline_limit`` has been applied before."""
    for size in (0, 8, MIB, 1 << 40):
        assert chosen(operation, size, 4, one_node=True, **offered) is expected


def test_limits_of_inline_data():
    tuning = Tuning()
    assert inline_limit("all_reduce", 64, 256 * KIB, tuning) == tuning.reduced_by_all // 64
    for operation in set(OPERATIONS) - {"all_reduce"}:
        assert inline_limit(operation, 2, 256 * KIB, tuning) == 256 * KIB


# --- every transport is taken by a real program, and ``choose`` is asked


def transports_of(nodes, size, monkeypatch):
    """What moves the data of one all_reduce on each rank, and on both levels, on these ``nodes``, a name for each."""
    taken, transport_of = defaultdict(list), Routing.transport

    def recorded(self, call, *facts):
        transport = transport_of(self, call, *facts)
        if call.operation == "all_reduce":
            levels = [transport._local, transport._lane] if isinstance(transport, Hierarchical) else []
            taken[threading.get_ident()] += [transport and type(transport), *map(type, levels)]
        return transport

    def program():
        with Mesh() as mesh:
            return mesh.all_reduce(np.full(size // 8, mesh.rank + 1.0))

    monkeypatch.setattr(Routing, "transport", recorded)
    for total in run_threads(program, len(nodes), nodes=nodes):
        assert (total == sum(range(1, len(nodes) + 1))).all()
    assert len({tuple(each) for each in taken.values()}) <= 1 and len(taken) in (0, len(nodes))
    return next(iter(taken.values()), [None])


@pytest.mark.parametrize("nodes", ["aa", "ab", "aabb"])
def test_small_arrays_travel_inline(nodes, monkeypatch):
    assert transports_of(nodes, KIB, monkeypatch) == [None]


def test_a_repeated_blocking_call_keeps_its_transport(monkeypatch):
    """``choose`` is asked in the first call. The others are one exchange, by the same transport."""
    asked = []
    monkeypatch.setattr(dispatch, "choose", lambda call, facts: asked.append(call.operation) or choose(call, facts))

    def program():
        with Mesh() as mesh:
            mesh.comm.spin_tests = 10**6
            group = mesh.group()
            return [float(group.all_reduce(np.ones(1))[0]) for _ in range(5)]

    assert run_threads(program, 2) == [[2.0] * 5] * 2
    assert asked.count("all_reduce") == 2  # once on each rank


def test_large_arrays_on_one_node_take_shared_memory(monkeypatch):
    assert transports_of("aa", 4 * MIB, monkeypatch) == [SharedMemory]


def test_large_arrays_on_even_nodes_are_hierarchical(monkeypatch):
    """Shared memory within nodes, messages between them."""
    levels = [SharedMemory, Messages]
    assert transports_of("aabb", MIB, monkeypatch) == [Hierarchical, *levels]


def test_large_arrays_on_a_rank_a_node_are_messages(monkeypatch):
    assert transports_of("ab", MIB, monkeypatch) == [Messages]


def test_unreadable_arrays_on_one_node_are_messages(monkeypatch):
    """There is no room in the arena, say."""
    monkeypatch.setattr(collectives, "readable_with_result", lambda *given: (None, None))
    assert transports_of("aa", MIB, monkeypatch) == [Messages]
