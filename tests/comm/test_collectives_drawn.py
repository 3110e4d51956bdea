"""Collectives of arrays drawn at random, cut in any way, against NumPy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spmd_engine import Mesh, run_threads, world
from support.on_ranks import DTYPES, OPS, assert_same, reduced, split, values


def shards(least=1):
    """A number of ranks, each rank's shape, equal but for one axis, and that axis."""
    shape = st.lists(st.integers(0, 4), min_size=1, max_size=3)
    return st.tuples(st.integers(least, 5), shape).flatmap(
        lambda drawn: st.tuples(
            st.just(drawn[1]),
            st.integers(-len(drawn[1]), len(drawn[1]) - 1),
            st.lists(st.integers(0, 9), min_size=drawn[0], max_size=drawn[0]),
        )
    )


def arrays_of(shape, axis, lengths, dtype):
    shapes = [list(shape) for _ in lengths]
    for each, length in zip(shapes, lengths):
        each[axis] = length
    return [values(tuple(each), dtype, r) for r, each in enumerate(shapes)]


@given(shards(), st.sampled_from(DTYPES))
def test_all_gather_of_any_shards(drawn, dtype):
    arrays, axis = arrays_of(*drawn, dtype), drawn[1]
    for result in run_threads(lambda: Mesh().all_gather(arrays[world().rank], axis), len(arrays)):
        assert_same(result, np.concatenate(arrays, axis))


@given(shards(), st.sampled_from(DTYPES), st.sampled_from(list(OPS)))
def test_reduce_scatter_of_any_cut(drawn, dtype, op):
    shape, axis, lengths = drawn
    shape[axis] = sum(lengths)
    arrays = [values(tuple(shape), dtype, r) for r in range(len(lengths))]

    def program():
        group = Mesh().group()
        return group.reduce_scatter(arrays[group.rank], axis, op, sizes=lengths)

    for result, part in zip(run_threads(program, len(lengths)), split(reduced(arrays, op), lengths, axis)):
        assert_same(result, part, op)


@given(shards(), st.data())
def test_all_to_all_of_any_cut_and_back(drawn, data):
    arrays, axis, n = arrays_of(*drawn, np.dtype(float)), drawn[1], len(drawn[2])
    ends = [sorted(data.draw(st.lists(st.integers(0, m), min_size=n - 1, max_size=n - 1))) for m in drawn[2]]
    there = [np.diff([0, *end, m]).tolist() for end, m in zip(ends, drawn[2])]
    back = np.transpose(there).tolist()

    def program():
        group = Mesh().group()
        result, came = group.all_to_all(arrays[group.rank], axis, splits=there[group.rank])
        assert came == back[group.rank]
        parts = [split(x, cut, axis)[group.rank] for x, cut in zip(arrays, there)]
        assert_same(result, np.concatenate(parts, axis))
        assert_same(group.all_to_all(result, axis, splits=back[group.rank])[0], arrays[group.rank])

    run_threads(program, n)
