"""Arrays that ranks only read: the same everywhere, one copy a node where memory can be shared."""

import numpy as np
import pytest

from spmd_engine import run_threads
from spmd_engine.comm import Mesh
from spmd_engine.comm.agreement import rank_zero
from spmd_engine.comm.agreement.rank_zero import share_array
from support.nodes import everyone

PARTS = [np.arange(6.0).reshape(3, 2), np.empty((0, 2)), np.arange(8.0).reshape(4, 2)[::-1]]
JOINED = np.concatenate(PARTS)


def copies(group):
    """Which ranks have which memory, seen by writing to it: for each rank, the lowest whose memory it shares."""
    x = share_array(group, PARTS if group.rank == 0 else None)
    assert np.array_equal(x, JOINED) and x.dtype == JOINED.dtype
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1
    x.flags.writeable = True
    group.barrier()
    for rank in reversed(range(group.size)):
        if group.rank == rank:
            x[:] = rank
        group.barrier()
    return int(x[0, 0])


@pytest.mark.parametrize(
    ("nodes", "shared"),
    [
        ("aaa", [0, 0, 0]),
        ("aabb", [0, 0, 2, 2]),
        ("abab", [0, 1, 0, 1]),
        ("aab", [0, 0, 2]),
        ("abc", [0, 1, 2]),
        ("a", [0]),
    ],
)
@pytest.mark.parametrize("bytes_at_once", [1 << 20, 40])
def test_ranks_of_a_node_have_one_copy(nodes, shared, bytes_at_once, monkeypatch):
    monkeypatch.setattr(rank_zero, "_AT_ONCE", bytes_at_once)
    assert run_threads(lambda: copies(everyone()), len(nodes), nodes=list(nodes)) == shared


def test_where_one_node_has_no_memory_to_share_each_rank_has_a_copy(monkeypatch):
    opened = rank_zero.mapped

    def mapped(texts):
        return None if everyone().rank == 3 else opened(texts)

    monkeypatch.setattr(rank_zero, "mapped", mapped)
    assert run_threads(lambda: copies(everyone()), 4, nodes=list("aabb")) == [0, 1, 2, 3]


def test_nothing_is_shared_too():
    empty = run_threads(lambda: share_array(everyone(), [np.empty((0, 3), np.uint8)]), 2)
    assert [(x.shape, x.dtype) for x in empty] == [((0, 3), np.uint8)] * 2


@pytest.mark.mpi(min_size=2)
def test_processes_of_a_node_have_one_copy():
    with Mesh() as mesh:
        assert copies(mesh.group()) == 0
