"""Times of collectives: hosts exchange messages in log2(n) rounds, devices in rings and trees."""

from dataclasses import replace

import pytest

from spmd_engine.planning.machine.machine import Curve, Link, Machine, NodeKind
from spmd_engine.planning.simulator.times import CollectiveTimes

LATENCY, BANDWIDTH, RANKS = 1e-4, 1e9, 16
NODE = NodeKind("node", RANKS, 1, {"float32": Curve.flat(1e10)}, 1e10, Curve.flat(1e10), Link(1e-6, 1e12), cores=1.0)
DEVICES = replace(NODE, cores=None)


def seconds(operation, size, node=NODE):
    machine = Machine("machine", (node,), Link(LATENCY, BANDWIDTH))
    return CollectiveTimes(machine).of(operation, range(RANKS), size).seconds


@pytest.mark.parametrize(
    "operation, rounds", [("reduce_scatter", 4), ("all_gather", 4), ("all_reduce", 8), ("broadcast", 8)]
)
def test_hosts_exchange_parts_in_rounds(operation, rounds):
    size = 1 << 24
    expected = rounds * LATENCY + rounds / 4 * size * 15 / 16 / BANDWIDTH
    assert seconds(operation, size) == pytest.approx(expected)


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_small_arrays_of_hosts_travel_as_a_whole(operation):
    assert seconds(operation, 8) == pytest.approx(4 * LATENCY, rel=1e-3)


def test_devices_keep_the_algorithms_of_their_library():
    assert seconds("reduce_scatter", 8, DEVICES) == pytest.approx(15 * LATENCY, rel=1e-3)
    assert seconds("all_reduce", 8, DEVICES) == pytest.approx(8 * LATENCY, rel=1e-3)
