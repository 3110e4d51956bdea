"""Which nodes have lanes, many calls under way in them, and errors."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.comm.connections import connections_of, even_nodes
from spmd_engine.comm.shared_memory.slot_table import SlotTable
from spmd_engine.errors import MismatchError
from support.nodes import everyone
from support.on_ranks import assert_same, reduced, values

LARGE = 1 << 16  # bytes: more than travel with the agreement


@pytest.mark.parametrize("hosts", [None, "aabb", "aaab", "abcd"])
def test_the_ledger_says_the_same_on_any_nodes(hosts):
    """Sums over ranks: 2 S (n-1) for an all_reduce, S (n-1) for the others."""

    def program():
        mesh = Mesh()
        x = np.ones(LARGE + 3)
        part = mesh.reduce_scatter(mesh.all_reduce(x))
        mesh.all_gather(part)
        return [mesh.ledger.total(each).sent for each in ("all_reduce", "reduce_scatter", "all_gather")]

    totals = np.sum(run_threads(program, 4, nodes=hosts and list(hosts)), axis=0)
    assert totals.tolist() == [3 * 8 * (LARGE + 3) * n for n in (2, 1, 1)]


def test_lengths_that_are_known_may_differ_by_rank_where_all_split_alike():
    """Small arrays, which come with the agreement: each rank knows of other lengths than its neighbour."""
    splits = [1, 2, 1, 3]

    def program():
        group = everyone()
        x = np.arange(7.0) + 10 * group.rank
        return group.all_to_all(x, splits=splits, received=[splits[group.rank]] * 4)

    for rank, (y, received) in enumerate(run_threads(program, 4, nodes=list("aabb"))):
        parts = [np.split(np.arange(7.0) + 10 * r, np.cumsum(splits)[:-1])[rank] for r in range(4)]
        assert received == [splits[rank]] * 4
        assert_same(y, np.concatenate(parts))


def test_nodes_with_different_numbers_of_ranks_add_up_in_rank_order():
    def program():
        group = everyone()
        x = values((LARGE,), np.dtype(np.float32), group.rank)
        assert group.connections.lanes is None
        assert_same(group.all_reduce(x), reduced([values(x.shape, x.dtype, r) for r in range(3)], "sum"))

    run_threads(program, 3, nodes=["a", "b", "a"])


@pytest.mark.parametrize(
    "hosts, nodes",
    [
        ("aabb", [[0, 1], [2, 3]]),
        ("baab", [[0, 3], [1, 2]]),
        ("abcabc", [[0, 3], [1, 4], [2, 5]]),
        ("aaab", None),
        ("ab", None),
        ("aa", [[0, 1]]),
        ("aba", None),
    ],
)
def test_even_nodes(hosts, nodes):
    assert even_nodes(hosts) == nodes


@pytest.mark.parametrize("hosts", ["aabb", "abccba"])
def test_many_calls_under_way(hosts):
    """More than a table has slots, large and small in turn, waited for in another order on every rank."""
    ranks = len(hosts)

    def program():
        with Mesh(rows=2, columns=ranks // 2) as mesh:
            whole, column = mesh.group(), mesh.group("rows")
            x = values((LARGE // 8 + 3,), np.dtype(float), 0)
            pending = []
            for i in range(24):
                group = column if i % 3 == 1 else whole
                mine = (x if i % 5 else x[:5]) * i
                pending.append((group.start_all_reduce(mine), mine * group.size))
                pending.append((group.start_all_gather(mine), np.tile(mine, group.size)))
                pending.append((group.start_barrier(), None))
            for i in np.random.default_rng(mesh.rank).permutation(len(pending)):
                result, right = pending[i][0].wait(), pending[i][1]
                assert right is None or np.allclose(result, right, rtol=1e-14)

    run_threads(program, ranks, nodes=list(hosts))


def test_groups_come_and_go():
    """Their tables are given back."""

    def program():
        free = None
        for _ in range(6):
            with Mesh(data=4) as mesh, Mesh(rows=2, columns=2) as other:
                mesh.barrier()
                comm = mesh.comm.subset([2, 3, 0, 1])
                assert connections_of(comm).lanes.nodes == [[0, 2], [1, 3]]
                comm.free()
                other.all_reduce(np.ones(LARGE), over="rows")
            free = free or connections_of(mesh.comm).neighbours.own.free
        assert connections_of(mesh.comm).neighbours.own.free >= free

    run_threads(program, 4, nodes=list("abab"))


BIG = np.ones((5, LARGE // 8))
ODD_CALLS = {
    "operation": (lambda group: group.reduce_scatter(BIG), "reduce_scatter"),
    "small": (lambda group: group.all_reduce(BIG[0, :3]), "all_reduce(sum, float64[3])"),
    "dtype": (lambda group: group.all_reduce(BIG.astype(np.float32)), "float32"),
    "reduction": (lambda group: group.all_reduce(BIG, "max"), "max"),
    "sizes": (lambda group: group.reduce_scatter(BIG, sizes=[2, 0, 2, 1]), "sizes=[2, 0, 2, 1]"),
    "none": (lambda group: group.barrier(), "barrier()"),
}


@pytest.mark.parametrize("name", ODD_CALLS)
@pytest.mark.parametrize("odd", [0, 1, 3])
def test_a_mismatch_is_everyone_s(odd, name):
    """Also of ranks on other nodes, with a right call under way before; and the group goes on afterwards."""

    def program():
        group = everyone()
        before = group.start_all_reduce(BIG)
        call, text = ODD_CALLS[name]
        with pytest.raises(MismatchError) as caught:
            call(group) if group.rank == odd else group.all_reduce(BIG)
        assert text in str(caught.value) and f"rank {odd} called" in str(caught.value)
        assert (before.wait() == 4).all()
        for _ in range(10):
            assert (group.all_reduce(BIG) == 4).all()

    run_threads(program, 4, nodes=list("aabb"))


@pytest.mark.parametrize("hosts", ["abcd", "aabb"])
@pytest.mark.parametrize("length", [1, LARGE // 8])
def test_some_ranks_know_the_sizes_of_what_they_gather(hosts, length):
    """It is no mismatch that others do not say them, whether all lengths are the same or not."""

    def program():
        group = everyone()
        for lengths in [length] * 4, [length, 0, 2 * length, 1]:
            x = np.full(lengths[group.rank], group.rank)
            result = group.all_gather(x, sizes=lengths if group.rank in (1, 2) else None)
            assert_same(result, np.repeat(np.arange(4), lengths))

    run_threads(program, 4, nodes=list(hosts))


def test_a_rank_that_offers_its_result_waits_until_the_others_have_read_it(monkeypatch):
    """Small data are in the slot table, in records that later calls use again; the result is not."""
    exchange, offered = SlotTable.exchange, []

    def spied(table, number, signature, data, result, expected):
        entries = exchange(table, number, signature, data, result, expected)
        if entries is not None:
            offered.append((result is not None, entries.exposed))
        return entries

    monkeypatch.setattr(SlotTable, "exchange", spied)

    def program():
        with Mesh(data=4) as mesh:
            for _ in range(3):
                mesh.all_reduce(np.ones(9000, np.float32), out=np.empty(9000, np.float32))

    run_threads(program, 4, nodes=list("aabb"))
    assert (True, True) in offered and (True, False) not in offered
