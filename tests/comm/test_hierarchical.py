"""Large collectives of ranks on several nodes: their values, and that every byte leaves a node once."""

import functools
import itertools
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.comm import Group, Ledger
from spmd_engine.comm.communicators.threads import ThreadCommunicator
from spmd_engine.comm.shared_memory.arena import Arena
from spmd_engine.comm.shared_memory.cross_memory import CrossMemory
from support.fake_cupy import watch
from support.nodes import everyone
from support.on_ranks import DTYPES, FORMS, OPS, assert_alike, assert_reduced, assert_same, reduced, values
from support.pairwise import in_turn

LARGE = 1 << 16  # bytes: more than travel with the agreement
PLACEMENTS = [("abab", "shared"), ("aaabbb", "shared"), ("aabb", "sent"), ("abccba", "sent")]
placements = pytest.mark.parametrize("hosts, memory", PLACEMENTS, indirect=["memory"])
HALF = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def dtypes_and_placements(first):
    """Every other dtype on one placement in turn, from this one on; the others are in ``soak``.

    16-bit floats, which are reduced in another dtype, are on one with memory shared and one without.
    """
    pairs = []
    for (i, dtype), (j, place) in itertools.product(enumerate(DTYPES), enumerate(PLACEMENTS)):
        turn = (i + j + first) % 4
        now = turn == 0 and (i + first) % 2 == 0 or (dtype in HALF and turn == 2)
        marks = () if now else pytest.mark.soak
        pairs.append(pytest.param(dtype, *place, marks=marks, id="-".join(map(str, (dtype, *place)))))
    return pytest.mark.parametrize("dtype, hosts, memory", pairs, indirect=["memory"])


@pytest.fixture
def memory(request, monkeypatch):
    """What the ranks of a node have: memory that they share, or none to speak of, so that they send each other all."""
    if request.param == "sent":
        monkeypatch.setattr(Arena, "allocate", lambda *_: None)
        monkeypatch.setattr(CrossMemory, "can_read", lambda *_: False)
    return request.param


def shapes(dtype):
    """Arrays that are large, but cannot be cut evenly."""
    rows = LARGE // dtype.itemsize
    return [(rows + 5,), (7, rows // 7 + 1), (3, 1, rows // 3 + 2)]


@functools.cache
def total_of(shape, dtype, op, hosts):
    """What all ranks' ``values`` are reduced to."""
    return expected([values(shape, dtype, r) for r in range(len(hosts))], op, hosts)


def expected(arrays, op, hosts):
    """The nodes' own reductions, in the order of the nodes; 16-bit floats are rounded once, at the end."""
    dtype, between = arrays[0].dtype, "sum" if op == "mean" else op
    wide = [x.astype(np.float32) if dtype in HALF else x for x in arrays]
    if op == "mean" and dtype.kind in "biu":
        wide = [x.astype(np.float64) for x in wide]
    nodes = [[x for x, host in zip(wide, hosts, strict=True) if host == node] for node in dict.fromkeys(hosts)]
    total = reduced([reduced(node, between) for node in nodes], between)
    if op == "mean":
        total = total / total.dtype.type(len(arrays))
    return total.astype(dtype) if dtype in HALF else total


# --- the values


@dtypes_and_placements(0)
def test_all_reduce(dtype, hosts, memory):
    def program():
        form, groups = itertools.cycle(FORMS), itertools.cycle([everyone(), everyone(check=False)])
        for shape, op in zip(itertools.cycle(shapes(dtype)), [*OPS, *OPS][:6]):  # all operations, shapes and groups
            group = next(groups)
            total = total_of(shape, dtype, op, hosts)
            mine = values(shape, dtype, group.rank)
            about = shape, op
            result = group.all_reduce(next(form)(mine), op)
            assert_reduced(result, total, group.comm, *about)
            assert_alike(group, result.reshape(-1)[:1000].view(np.uint8))
            out = group.connections.empty(total.shape, total.dtype)
            assert group.all_reduce(mine, op, out=out) is out
            assert_reduced(out, total, group.comm, *about)
            if total.dtype == dtype:
                x = (np if op == "sum" else group.connections).empty(shape, dtype)
                x[...] = mine
                assert group.all_reduce(x, op, out=x) is x
                assert_reduced(x, total, group.comm, *about)

    run_threads(program, len(hosts), nodes=list(hosts))


@dtypes_and_placements(1)
def test_reduce_scatter(dtype, hosts, memory):
    ranks = len(hosts)

    def program():
        group, form, ops = everyone(), itertools.cycle(FORMS), itertools.cycle(OPS)
        for shape in shapes(dtype):
            for axis in range(len(shape)):
                last = [0] * (ranks - 1) + [shape[axis]]
                for sizes, op in (None, next(ops)), (last, next(ops)):
                    total = total_of(shape, dtype, op, hosts)
                    parts = np.array_split(total, np.cumsum(sizes)[:-1] if sizes else ranks, axis)
                    x = next(form)(values(shape, dtype, group.rank))
                    result = group.reduce_scatter(x, axis, op, sizes=sizes)
                    assert_reduced(result, parts[group.rank], group.comm, shape, axis, sizes, op)

    run_threads(program, ranks, nodes=list(hosts))


@placements
@pytest.mark.parametrize("arena", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["arena", "ordinary memory"])
def test_results_that_are_parts_of_what_is_given(arena, hosts, memory):
    """As the gradients and parameters of ZeRO are; and a result that lies across the parts of others."""
    ranks, n = len(hosts), LARGE // 8 + 5

    def program():
        group = everyone()
        place = group.connections if arena else np
        sizes = [0, n - 4000, *[1000] * (ranks - 3), 4000 - 1000 * (ranks - 3)]
        total = expected([values((n,), np.dtype(float), r) for r in range(ranks)], "sum", hosts)
        ends = np.cumsum([0, *sizes])
        parts = [slice(*pair) for pair in itertools.pairwise(ends)]
        x = place.empty((n,), float)
        x[...] = values((n,), np.dtype(float), group.rank)
        mine = x[parts[group.rank]]
        assert group.reduce_scatter(x, sizes=sizes, out=mine) is mine
        assert_reduced(mine, total[parts[group.rank]], group.comm)
        whole = place.empty((n,), float)
        whole[parts[group.rank]] = mine
        assert group.all_gather(whole[parts[group.rank]], sizes=sizes, out=whole) is whole
        assert_reduced(whole, total, group.comm)
        x[...] = values((n,), np.dtype(float), group.rank)
        across = x[n // 2 - 2000 : n // 2 - 2000 + sizes[group.rank]]
        assert_reduced(group.reduce_scatter(x, sizes=sizes, out=across), total[parts[group.rank]], group.comm)

    run_threads(program, ranks, nodes=list(hosts))


@in_turn(3, **{"nodes, per_node": [(2, 8), (4, 4), (8, 2), (3, 5), (2, 17)], "check": [True, False]})
def test_sizes_of_many_ranks_on_several_nodes(nodes, per_node, check):
    """Each rank says as many sizes as the group has ranks, however few of them share its node."""
    ranks = nodes * per_node
    sizes = [LARGE // 8 // ranks + r % 3 for r in range(ranks)]
    whole = np.arange(float(sum(sizes)))

    def program():
        group = everyone(check)
        assert group.connections.lanes is not None
        for _ in range(2):
            part = group.reduce_scatter(whole, sizes=sizes)
            assert_same(part, ranks * np.split(whole, np.cumsum(sizes)[:-1])[group.rank])
            assert_same(group.all_gather(part, sizes=sizes), ranks * whole)

    run_threads(program, ranks, nodes=[str(r // per_node) for r in range(ranks)])


@dtypes_and_placements(2)
def test_all_gather(dtype, hosts, memory):
    """Shards of all lengths: none, few enough to come with a header, many."""
    ranks, many = len(hosts), LARGE // dtype.itemsize

    def program():
        form, groups = itertools.cycle(FORMS), itertools.cycle([everyone(), everyone(check=False)])
        uneven = [many // 3 * (r % 3) + r % 2 for r in range(ranks)]
        for lengths, rest in itertools.product([[many] * ranks, uneven], [(), (2, 3)]):
            arrays = [values((n, *rest), dtype, r) for r, n in enumerate(lengths)]
            for sizes in (None, None, lengths):
                group = next(groups)
                result = group.all_gather(next(form)(arrays[group.rank]), sizes=sizes)
                assert_same(result, np.concatenate(arrays), lengths, sizes)

    run_threads(program, ranks, nodes=list(hosts))


@placements
def test_broadcast(hosts, memory):
    ranks = len(hosts)

    def program():
        group = everyone()
        for root, length in itertools.product(range(ranks), (LARGE, LARGE // 8 + 5)):
            x = values((length,), np.dtype(np.float32), root)
            assert_same(group.broadcast(x if group.rank == root else None, root), x, root)

    run_threads(program, ranks, nodes=list(hosts))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_rounded_once(dtype):
    """On each node 1 + 2**-12 would be 1, and all of it 4."""

    def program():
        group = Mesh().group()
        x = np.full(LARGE, 1 if group.rank % 2 == 0 else 3 * 2.0**-12, dtype)
        total = group.all_reduce(np.concatenate([x, np.full(5, -1 if group.rank == 2 else 0, dtype)]))
        shifted = group.all_reduce(x - (group.rank == 2) * np.ones(LARGE, dtype))
        assert (total[:LARGE] == dtype.type(np.float32(2 + 6 * 2.0**-12))).all()
        assert (shifted == dtype.type(np.float32(1 + 6 * 2.0**-12))).all()
        return float(shifted[0])

    results = run_threads(program, 4, nodes=list("aabb"))
    assert dtype.name == "bfloat16" or results[0] > 1


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("some", [[0, 1, 2, 3], [2]], ids=["all", "one"])
@pytest.mark.parametrize("length", [5, LARGE // 4 + 3])
def test_device_memory(length, some, aware, device):
    """Ranks of a node that do not all show their arrays send them; where nodes differ, too."""

    def program():
        comm = watch(world().subset(range(4)), aware=aware)
        group = Group(comm, "world", Ledger())
        arrays = [values((length,), np.dtype(np.float16), r) for r in range(4)]
        total = expected(arrays, "mean", "abab")
        x = arrays[group.rank] if group.rank not in some else device.asarray(arrays[group.rank])
        for result, right in [
            (group.all_reduce(x, "mean"), total),
            (group.reduce_scatter(x, op="mean"), np.array_split(total, 4)[group.rank]),
            (group.all_gather(x), np.concatenate(arrays)),
        ]:
            assert device.owns(result) == (group.rank in some)
            assert_same(getattr(result, "memory", result), right)

    run_threads(program, 4, nodes=list("abab"))


# --- what passes between nodes


@placements
def test_every_byte_leaves_a_node_once(hosts, memory, monkeypatch):
    """2 S (M-1)/M out of each of M nodes for an all_reduce, and half of it for the others, headers aside.

    Where a node's ranks send each other all, everyone sends what the ledger says.
    """
    sent, start_send = Counter(), ThreadCommunicator.start_send
    ranks, nodes = len(hosts), len(set(hosts))

    def counted(self, data, to, tag):
        here, there = hosts[self._me], hosts[self.members[to]]
        sent[here if here != there else "within"] += data.nbytes if data.nbytes > 4000 else 0  # no headers
        return start_send(self, data, to, tag)

    monkeypatch.setattr(ThreadCommunicator, "start_send", counted)
    size = 9 * LARGE  # of all ranks together
    x = np.ones(size // 8)
    for call, times in [
        (lambda group: group.all_reduce(x), 2),
        (lambda group: group.reduce_scatter(x), 1),
        (lambda group: group.all_gather(x[: len(x) // ranks]), 1),
    ]:
        sent.clear()
        ledger = run_threads(lambda: everyone_s_bytes(call), ranks, nodes=list(hosts))  # noqa: B023 (it is called now)
        within = sent.pop("within", 0)
        assert dict(sent) == {host: times * size * (nodes - 1) // nodes for host in set(hosts)}
        assert within == (sum(ledger) - sum(sent.values()) if memory == "sent" else 0)
        assert sum(ledger) == times * size * (ranks - 1)


def everyone_s_bytes(call):
    group = everyone()
    call(group)
    return group.ledger.total().sent
