"""The way of a call's data, for all that it depends on: one table, as docs/collectives.md has it."""

from itertools import product

import pytest

from spmd_engine.comm.dispatch import Facts, Tuning, Way, inline_at_most, way

KIB, MIB = 1 << 10, 1 << 20
BY_NODES, LIBRARY, MESSAGES = Way.HIERARCHICAL, Way.MPI, Way.MESSAGES


def chosen(operation, size, ranks, *, tuning=None, **facts):
    return way(Facts(operation, size, ranks, **{"library": True, **facts}), tuning or Tuning())


OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "size, ranks, flat, by_nodes",
    [
        (0, 4, MESSAGES, MESSAGES),
        (32 * KIB, 4, LIBRARY, LIBRARY),
        (63 * KIB, 4, LIBRARY, LIBRARY),
        (64 * KIB, 4, MESSAGES, BY_NODES),
        (64 * KIB, 32, LIBRARY, BY_NODES),
        (4 * MIB, 32, MESSAGES, BY_NODES),
        (MIB, 128, LIBRARY, BY_NODES),
        (4 << 30, 4, MESSAGES, BY_NODES),
    ],
)
def test_between_nodes_by_size_and_placement(operation, size, ranks, flat, by_nodes):
    """Only reductions, and gathers along the first axis, go by nodes."""
    assert chosen(operation, size, ranks) is flat
    goes_by_nodes = operation in ("all_reduce", "reduce_scatter", "all_gather")
    assert chosen(operation, size, ranks, by_nodes=True) is (by_nodes if goes_by_nodes else flat)


@pytest.mark.parametrize("unusual", [{"lengths_known": False}, {"axis": 1}], ids=["unknown lengths", "axis 1"])
def test_gathers_that_do_not_go_by_nodes(unusual):
    assert chosen("all_gather", MIB, 4, by_nodes=True, **unusual) is MESSAGES
    assert chosen("all_gather", MIB, 128, by_nodes=True, **unusual) is LIBRARY


def test_the_library_never_gets_what_it_cannot_take():
    """Device memory, and counts that are too large for it; of an all_to_all one rank may get everyone's."""
    for operation, size, ranks, by_nodes in product(OPERATIONS, (8, KIB, MIB, 1 << 40), (2, 64, 4096), (False, True)):
        assert chosen(operation, size, ranks, by_nodes=by_nodes, host=False) is not LIBRARY
        assert chosen(operation, size, ranks, by_nodes=by_nodes, library=False) is not LIBRARY
        few = Tuning(largest_count=size - 1)
        assert chosen(operation, size, ranks, by_nodes=by_nodes, tuning=few) is not LIBRARY
    assert chosen("all_to_all", KIB, 64, tuning=Tuning(largest_count=64 * KIB)) is LIBRARY
    assert chosen("all_to_all", KIB, 64, tuning=Tuning(largest_count=64 * KIB - 1)) is MESSAGES


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "offered, expected",
    [
        ({"shown": True}, Way.SHARED_MEMORY),
        ({}, MESSAGES),
        ({"inline": True, "shown": True}, Way.INLINE),
        ({"inline": True, "host": False}, MESSAGES),
    ],
)
def test_within_a_node_by_what_all_offer(operation, offered, expected):
    """Of any size: who brings data along has looked at that before."""
    for size, library in product((0, 8, MIB, 1 << 40), (False, True)):
        assert chosen(operation, size, 4, one_node=True, library=library, **offered) is expected


def test_what_a_rank_brings_along():
    tuning = Tuning()
    for reads in (False, True):
        assert inline_at_most("reduce_scatter", 2, 256 * KIB, reads, tuning) == 256 * KIB
        assert inline_at_most("all_reduce", 64, 256 * KIB, reads, tuning) == tuning.reduced_by_all // 64
        assert inline_at_most("all_gather", 2, 16 * KIB, reads, tuning) == 16 * KIB
    assert inline_at_most("all_gather", 2, 256 * KIB, False, tuning) == 256 * KIB
    assert inline_at_most("all_gather", 2, 256 * KIB, True, tuning) == tuning.copied_to_table
    assert inline_at_most("all_to_all", 3, 256 * KIB, True, tuning) == 3 * tuning.copied_to_table  # it is cut in three
