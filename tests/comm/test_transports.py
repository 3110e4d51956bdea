"""What every transport promises: results of the reference, and adjoints, of odd sizes, empty arrays and strides."""

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.arrays.backend import CPU
from spmd_engine.comm import dispatch
from spmd_engine.comm.connections import Connections, Tuning, connections_of
from spmd_engine.comm.dispatch import TRANSPORTS, Routing
from spmd_engine.comm.transports.hierarchical import Hierarchical
from spmd_engine.comm.transports.messages import Messages
from spmd_engine.comm.transports.nccl import NcclTransport
from spmd_engine.comm.transports.rounds import MessageRounds
from spmd_engine.comm.transports.shared_memory import SharedMemory
from support import fake_nccl
from support.on_ranks import assert_same, reduced, values

FLOAT = np.dtype(float)
#: Names of the nodes of the ranks on which each transport is taken.
NODES = {
    NcclTransport: "aaa",
    SharedMemory: "aaa",
    Hierarchical: "aabb",
    MessageRounds: "abc",
    Messages: "abc",
}
REDUCTIONS = {"all_reduce", "reduce_scatter"}
ALL = REDUCTIONS | {"all_gather", "all_to_all", "broadcast"}
MOVES = {kind: ALL - {"all_to_all"} for kind in (Hierarchical, MessageRounds)}  # others: all operations


def test_every_transport_is_tested_here():
    assert list(NODES) == list(TRANSPORTS)


each_transport = pytest.mark.parametrize("kind", NODES, ids=lambda kind: kind.__name__)


@pytest.fixture
def taken(kind, monkeypatch):
    """The operations that each transport has moved; of what ``kind`` can move, it moves all, however small."""
    taken, transport_of = defaultdict(set), Routing.transport

    def recorded(self, call, *facts):
        transport = transport_of(self, call, *facts)
        taken[type(transport)].add(call.operation)
        return transport

    monkeypatch.setattr(Routing, "transport", recorded)
    at_once = 1 << 30 if kind is MessageRounds else 0
    monkeypatch.setattr(Connections, "tuning", Tuning(hierarchical=1, at_once=at_once, piece=64))
    for limit in ("inline_limit", "inline_between_nodes"):
        monkeypatch.setattr(dispatch, limit, lambda *given: 0)
    return taken


@pytest.fixture
def on_ranks(kind, request):
    """Runs a program on the ranks of ``NODES``; it gets a group, and functions to and from the transport's arrays."""
    device = request.getfixturevalue("device") if kind is NcclTransport else None

    def body(program):
        comm = world().subset(range(world().size))
        here = SimpleNamespace(put=CPU.asarray, get=np.asarray, empty=connections_of(comm).empty)
        if kind is NcclTransport:
            connections_of(comm).set_transport(False, device)
            here = SimpleNamespace(put=device.asarray, get=device.to_host, empty=device.empty)
        try:
            program(Mesh(comm).group(), here)
        finally:
            comm.free()

    def run(program):
        nodes = list(NODES[kind])
        with fake_nccl.installed() if device else nullcontext():
            return run_threads(body, len(nodes), nodes=nodes, args=[program])

    return run


def shares(n, size):
    """Lengths of parts: uneven, and the last is empty."""
    return [size - (n - 2) * (size // n), *[size // n] * (n - 2), 0]


@each_transport
def test_results_are_those_of_the_reference(kind, taken, on_ranks):
    def program(group, here):
        n, rank = group.size, group.rank
        for shape in (1,), (7, 3), (0, 3), (1001,):
            arrays = [values(shape, FLOAT, r) for r in range(n)]
            strided = here.put(np.repeat(arrays[rank], 2, axis=0))[::2]
            lengths = shares(n, shape[0])
            joined, mine = np.concatenate(arrays), np.split(np.arange(shape[0]), np.cumsum(lengths)[:-1])[rank]
            for op in ("mean", "max"):
                total = reduced(arrays, op)
                results = {
                    f"all_reduce {op}": (group.all_reduce(strided, op), total),
                    f"reduce_scatter {op}": (group.reduce_scatter(strided, op=op, sizes=lengths), total[mine]),
                }
                for about, (result, expected) in results.items():
                    np.testing.assert_allclose(here.get(result), expected, rtol=1e-12, err_msg=f"{about} {shape}")
            assert_same(here.get(group.all_gather(strided)), joined, shape)
            part = here.put(arrays[0][mine])
            assert_same(here.get(group.all_gather(part, sizes=lengths)), arrays[0], shape)
            sent, received = group.all_to_all(strided, splits=lengths)
            assert_same(here.get(sent), np.concatenate([x[mine] for x in arrays]), shape)
            assert received == [len(mine)] * n
            assert_same(here.get(group.broadcast(strided, n - 1)), arrays[-1], shape)

    on_ranks(program)
    missing = MOVES.get(kind, ALL) - taken[kind]
    assert not missing, taken


@each_transport
def test_adjoints(kind, taken, on_ranks):
    """<A x, y> = <x, A' y>, summed over ranks: of a gather and the reduction of its parts, and of sums."""

    def program(group, here):
        def product(x, y):
            return float(here.get(group.all_reduce(here.put(np.asarray(np.vdot(here.get(x), here.get(y)))))))

        lengths = shares(group.size, 11)
        x, y = here.put(values((lengths[group.rank], 3), FLOAT, group.rank)), here.put(values((11, 3), FLOAT, 9))
        back = group.reduce_scatter(y, sizes=lengths)
        assert np.isclose(product(group.all_gather(x, sizes=lengths), y), product(x, back), rtol=1e-12)
        z = here.put(values((11, 3), FLOAT, group.rank))
        assert np.isclose(product(group.all_reduce(z), y), product(z, group.all_reduce(y)), rtol=1e-12)
        sent, received = group.all_to_all(z, splits=lengths)
        w = here.put(values(tuple(sent.shape), FLOAT, 20 + group.rank))
        assert np.isclose(product(sent, w), product(z, group.all_to_all(w, splits=received)[0]), rtol=1e-12)

    on_ranks(program)
    assert taken[kind] >= REDUCTIONS & MOVES.get(kind, ALL)
