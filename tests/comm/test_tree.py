"""The tree in which ranks on several nodes agree."""

from math import ceil, log

import pytest

from spmd_engine.comm.agreement.tree import RADIX, edges


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 12, 16, 17, 64, 100])
def test_each_rank_has_one_parent_and_a_subtree_of_consecutive_ranks(n):
    depth = {0: 0}
    for rank in range(n):
        parent, children = edges(rank, n)
        assert parent <= rank and (parent == rank) == (rank == 0)
        end = rank + 1
        for child, child_end in children:
            assert child == end and edges(child, n)[0] == rank
            depth[child], end = depth[rank] + 1, child_end
        assert len(children) <= (RADIX - 1) * ceil(log(n, RADIX) if n > 1 else 0)
        assert rank > 0 or end == n
    assert sorted(depth) == list(range(n)) and max(depth.values()) <= ceil(log(n, RADIX))
