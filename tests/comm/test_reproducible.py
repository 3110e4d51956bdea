"""Sums are made in rank order: equal bits on every rank, in every run, on threads and on MPI."""

import numpy as np
import pytest

from spmd_engine import Mesh
from support.on_ranks import (
    DTYPES,
    INLINE,
    OPS,
    assert_alike,
    assert_same,
    everywhere,
    numbers_of_ranks,
    on_ranks,
    values,
)
from support.pairwise import every_pair

SIZES = {"one": 1, "inline": 50, "large": 3 * INLINE}
each_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


def order_matters(size, rank):
    """Numbers whose float32 sum depends on the order: of different magnitudes."""
    return values((size,), np.dtype(np.float32), rank) * np.float32(10.0 ** (rank * 2 % 5))


def in_order(arrays):
    total = arrays[0].copy()
    for x in arrays[1:]:
        total = total + x
    return total


@pytest.mark.parametrize("n", [3, 4, 8])
def test_the_numbers_of_these_tests_show_the_order(n):
    arrays = [order_matters(50, r) for r in range(n)]
    assert in_order(arrays).tobytes() != in_order(arrays[::-1]).tobytes()
    assert in_order(arrays).tobytes() != in_order(arrays[1:] + arrays[:1]).tobytes()


@everywhere(3, 8)
@each_size
def test_all_reduce_sums_in_rank_order(size, ranks):
    def program():
        group = Mesh().group()
        arrays = [order_matters(size, r) for r in range(group.size)]
        assert_same(group.all_reduce(arrays[group.rank]), in_order(arrays))
        out = arrays[group.rank].copy()
        assert_same(group.all_reduce(out, out=out), in_order(arrays))

    on_ranks(program, ranks)


@everywhere(3, 8)
@each_size
def test_reduce_scatter_sums_in_rank_order(size, ranks):
    def program():
        group = Mesh().group()
        arrays = [order_matters(size, r) for r in range(group.size)]
        expected = np.array_split(in_order(arrays), group.size)[group.rank]
        assert_same(group.reduce_scatter(arrays[group.rank]), expected)

    on_ranks(program, ranks)


@pytest.mark.parametrize(
    "ranks", [pytest.param(4, id="threads"), pytest.param(None, id="mpi", marks=pytest.mark.mpi(ranks=4))]
)
@each_size
def test_over_several_axes_the_order_is_the_axes_as_written(size, ranks):
    def program():
        with Mesh(data=2, model=2) as mesh:
            x = [order_matters(size, r) for r in range(4)]
            for over, order in (("data", "model"), [0, 1, 2, 3]), (("model", "data"), [0, 2, 1, 3]):
                assert_same(mesh.all_reduce(x[mesh.rank], over=over), in_order([x[r] for r in order]))

    on_ranks(program, ranks)


@every_pair(op=OPS.keys(), ranks=numbers_of_ranks(3, 8, mpi=(3,)), size=SIZES)
def test_every_rank_gets_the_same_bits(op, size, ranks):
    def program():
        group = Mesh().group()
        for dtype in DTYPES:
            x = values((size,), dtype, group.rank)
            assert_alike(group, group.all_reduce(x, op))
            if dtype.kind not in "b":
                out = x.astype(float) if op == "mean" and dtype.kind in "iu" else x.copy()
                assert_alike(group, group.all_reduce(out, op, out=out))

    on_ranks(program, ranks)


def test_products_of_complex_numbers_have_the_same_bits_too():
    """NumPy rounds them differently in place and out of place, if there is one."""

    def program():
        group = Mesh().group()
        for seed in range(0, 200, 10):
            x = values((), DTYPES[-2], seed + group.rank).copy()
            assert_alike(group, group.all_reduce(x, "prod"))
            assert_alike(group, group.all_reduce(x, "prod", out=x))

    on_ranks(program, 3)


@each_size
def test_a_second_run_gives_the_same_bits(size):
    def program():
        group = Mesh().group()
        x = order_matters(size, group.rank)
        started = [group.start_all_reduce(x), group.start_reduce_scatter(x), group.start_all_reduce(x, "max")]
        return [pending.wait().tobytes() for pending in reversed(started)]

    assert on_ranks(program, 8) == on_ranks(program, 8)
