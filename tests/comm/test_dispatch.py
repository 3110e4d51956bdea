"""The route of a call: ``choose`` for all that it depends on, and every route in real programs."""

import threading
from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from mpi_harness.launch import mpiexec
from spmd_engine import Mesh, run_threads
from spmd_engine.comm import collectives, dispatch
from spmd_engine.comm.agreement.call_agreement import Signature
from spmd_engine.comm.dispatch import Facts, Route, Tuning, choose, inline_limit

KIB, MIB = 1 << 10, 1 << 20
HIERARCHICAL, LIBRARY, MESSAGES = Route.HIERARCHICAL, Route.MPI, Route.MESSAGES


def chosen(operation, size, ranks, *, axis=0, **facts):
    return choose(Signature(operation, axis=axis), Facts(size, ranks, **{"library": True, **facts}))


OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "size, ranks, flat, by_nodes",
    [
        (0, 4, MESSAGES, MESSAGES),
        (32 * KIB, 4, LIBRARY, LIBRARY),
        (63 * KIB, 4, LIBRARY, LIBRARY),
        (64 * KIB, 4, MESSAGES, HIERARCHICAL),
        (64 * KIB, 32, LIBRARY, HIERARCHICAL),
        (4 * MIB, 32, MESSAGES, HIERARCHICAL),
        (MIB, 128, LIBRARY, HIERARCHICAL),
        (4 << 30, 4, MESSAGES, HIERARCHICAL),
    ],
)
def test_routes_between_nodes_by_size_and_placement(operation, size, ranks, flat, by_nodes):
    """Only reductions, and gathers along the first axis, are hierarchical."""
    assert chosen(operation, size, ranks) is flat
    can_be_hierarchical = operation in ("all_reduce", "reduce_scatter", "all_gather")
    assert chosen(operation, size, ranks, even_nodes=True) is (by_nodes if can_be_hierarchical else flat)


@pytest.mark.parametrize("unusual", [{"lengths_known": False}, {"axis": 1}], ids=["unknown lengths", "axis 1"])
def test_gathers_that_are_not_hierarchical(unusual):
    assert chosen("all_gather", MIB, 4, even_nodes=True, **unusual) is MESSAGES
    assert chosen("all_gather", MIB, 128, even_nodes=True, **unusual) is LIBRARY


def test_the_library_never_gets_what_it_cannot_take():
    """Device memory and too large counts; in an all_to_all one rank may receive everything."""
    for operation, size, ranks, even_nodes in product(OPERATIONS, (8, KIB, MIB, 1 << 40), (2, 64, 4096), (False, True)):
        assert chosen(operation, size, ranks, even_nodes=even_nodes, host=False) is not LIBRARY
        assert chosen(operation, size, ranks, even_nodes=even_nodes, library=False) is not LIBRARY
        small_counts = Tuning(largest_count=size - 1)
        assert chosen(operation, size, ranks, even_nodes=even_nodes, tuning=small_counts) is not LIBRARY
    assert chosen("all_to_all", KIB, 64, tuning=Tuning(largest_count=64 * KIB)) is LIBRARY
    assert chosen("all_to_all", KIB, 64, tuning=Tuning(largest_count=64 * KIB - 1)) is MESSAGES


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nccl_takes_all_calls_whose_arrays_are_on_devices(operation):
    for size, one_node, even_nodes in product((0, KIB, 1 << 40), (False, True), (False, True)):
        nodes = {"one_node": one_node, "even_nodes": even_nodes}
        assert chosen(operation, size, 4, host=False, nccl=True, **nodes) is Route.NCCL
        assert chosen(operation, size, 4, host=False, **nodes) is not Route.NCCL


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "offered, expected",
    [
        ({"readable": True}, Route.SHARED_MEMORY),
        ({}, MESSAGES),
        ({"inline": True, "readable": True}, Route.INLINE),
        ({"inline": True, "host": False}, MESSAGES),
    ],
)
def test_routes_within_a_node_by_what_all_ranks_offer(operation, offered, expected):
    """For any size: ``inline_limit`` has been applied before."""
    for size, library in product((0, 8, MIB, 1 << 40), (False, True)):
        assert chosen(operation, size, 4, one_node=True, library=library, **offered) is expected


def test_limits_of_inline_data():
    tuning = Tuning()
    for readable in (False, True):
        assert inline_limit("reduce_scatter", 2, 256 * KIB, readable, tuning) == 256 * KIB
        assert inline_limit("all_reduce", 64, 256 * KIB, readable, tuning) == tuning.reduced_by_all // 64
        assert inline_limit("all_gather", 2, 16 * KIB, readable, tuning) == 16 * KIB
    assert inline_limit("all_gather", 2, 256 * KIB, False, tuning) == 256 * KIB
    assert inline_limit("all_gather", 2, 256 * KIB, True, tuning) == tuning.copied_to_table
    assert inline_limit("all_to_all", 3, 256 * KIB, True, tuning) == 3 * tuning.copied_to_table  # it has three parts


# --- every route is taken by a real program, and ``choose`` is asked


def routes_of(nodes, size, monkeypatch):
    """The routes that each rank is given for one all_reduce on these ``nodes``, a name for each rank."""
    routes = defaultdict(list)

    def recorded(call, facts):
        route = choose(call, facts)
        if call.operation == "all_reduce":
            routes[threading.get_ident()].append(route)
        return route

    def program():
        with Mesh() as mesh:
            return mesh.all_reduce(np.full(size // 8, mesh.rank + 1.0))

    monkeypatch.setattr(dispatch, "choose", recorded)
    for total in run_threads(program, len(nodes), nodes=nodes):
        assert (total == sum(range(1, len(nodes) + 1))).all()
    assert len({tuple(each) for each in routes.values()}) == 1 and len(routes) == len(nodes)
    return next(iter(routes.values()))


@pytest.mark.parametrize("nodes", ["aa", "ab", "aabb"])
def test_small_arrays_travel_inline(nodes, monkeypatch):
    assert routes_of(nodes, KIB, monkeypatch) == [Route.INLINE]


def test_a_repeated_blocking_call_keeps_its_route(monkeypatch):
    """``choose`` is asked in the first call. The others are one exchange, on the same route."""
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
    assert routes_of("aa", 4 * MIB, monkeypatch) == [Route.SHARED_MEMORY]


def test_large_arrays_on_even_nodes_are_hierarchical(monkeypatch):
    """Shared memory within nodes; between nodes, virtual ranks have no MPI library."""
    levels = [Route.SHARED_MEMORY, Route.MESSAGES]
    assert routes_of("aabb", MIB, monkeypatch) == [Route.HIERARCHICAL, *levels]


def test_large_arrays_on_a_rank_a_node_are_messages(monkeypatch):
    assert routes_of("ab", MIB, monkeypatch) == [Route.MESSAGES]


def test_unreadable_arrays_on_one_node_are_messages(monkeypatch):
    """There is no room in the arena, say."""
    monkeypatch.setattr(collectives, "readable_with_result", lambda *given: (None, None))
    assert routes_of("aa", MIB, monkeypatch) == [Route.MESSAGES]


PROGRAM = """
import sys
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
MPI.Get_processor_name = lambda: f"host {rank}"

import numpy as np
from spmd_engine import Mesh
from spmd_engine.comm import dispatch

routes, choose = [], dispatch.choose
dispatch.choose = lambda call, facts: routes.append(choose(call, facts)) or routes[-1]
with Mesh() as mesh:
    routes.clear()
    assert (mesh.all_reduce(np.ones(3000)) == 2).all()
    print(f"{[route.name for route in routes]}\\n", end="", flush=True)
"""


@pytest.mark.skipif(mpiexec() is None, reason="needs an MPI library and its mpiexec")
def test_medium_arrays_between_nodes_go_to_the_library(mpi_run, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = mpi_run(2, tmp_path / "program.py", timeout=60)
    assert (ended.returncode, ended.stdout.splitlines()) == (0, ["['MPI']"] * 2), ended.stderr
