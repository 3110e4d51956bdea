"""Every collective against NumPy on the list of all ranks' arrays, on threads and on MPI."""

import functools
import itertools

import numpy as np
import pytest

from spmd_engine import Mesh
from support.on_ranks import (
    DTYPES,
    FORMS,
    INLINE,
    OPS,
    assert_reduced,
    assert_same,
    everywhere,
    numbers_of_ranks,
    on_ranks,
    reduced,
    split,
    values,
)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = [(), (0,), (0, 3), (1,), (5,), (4, 0, 2), (2, 3, 4), (INLINE + 7,), (9, 23, 29)]


def lengths_of(n, dtype):
    """Shards' lengths along an axis: even, uneven, some empty, all empty, some inline and some not."""
    yield [2] * n
    yield [r + 1 for r in range(n)]
    yield [3 * (r % 2) for r in range(n)]
    yield [0] * n
    yield [INLINE // dtype.itemsize + 1 if r % 2 else 1 for r in range(n)]


def axes_of(shape):
    return [*range(len(shape)), -1]


@functools.cache
def whole(shape, dtype, ranks, op):
    """The reduction of all ranks' arrays."""
    return reduced([values(shape, dtype, r) for r in range(ranks)], op)


# --- programs: what every rank runs; of what they call, those that are ``chosen``

ALL = slice(None)


def all_reduce(dtype, check, chosen=ALL):
    group, form, ops = Mesh(check=check).group(), itertools.cycle(FORMS), itertools.cycle(OPS)
    calls = [(each, op) for each in SHAPES for op in (next(ops), next(ops))]
    for shape, op in calls[chosen]:
        result = group.all_reduce(next(form)(values(shape, dtype, group.rank)), op)
        assert_reduced(result, whole(shape, dtype, group.size, op), group.comm, shape, op)


def all_gather(dtype, check, chosen=ALL):
    group, form = Mesh(check=check).group(), itertools.cycle(FORMS)
    pairs = itertools.product([(1,), (2, 3), (2, 3, 4)], lengths_of(group.size, dtype))
    calls = [(*pair, axis) for pair in pairs for axis in axes_of(pair[0])]
    for shape, lengths, axis in calls[chosen]:
        for sizes in (None, lengths):
            shapes = [np.insert(np.delete(shape, axis), axis % len(shape), n) for n in lengths]
            arrays = [values(tuple(map(int, each)), dtype, r) for r, each in enumerate(shapes)]
            result = group.all_gather(next(form)(arrays[group.rank]), axis, sizes=sizes)
            assert_same(result, np.concatenate(arrays, axis), shapes, axis, sizes)


def reduce_scatter(dtype, check, chosen=ALL):
    group, form, op = Mesh(check=check).group(), itertools.cycle(FORMS), itertools.cycle(OPS)
    calls = [(each, axis) for each in SHAPES[1:] for axis in axes_of(each)]
    for shape, axis in calls[chosen]:
        last = [0] * (group.size - 1) + [shape[axis]]  # all of it to the last rank
        for sizes, how in itertools.product([None, last], [next(op), next(op)]):
            total = whole(shape, dtype, group.size, how)
            parts = split(total, sizes, axis) if sizes else np.array_split(total, group.size, axis)
            x = next(form)(values(shape, dtype, group.rank))
            result = group.reduce_scatter(x, axis, how, sizes=sizes)
            assert_reduced(result, parts[group.rank], group.comm, shape, axis, sizes, how)


def all_to_all(dtype, check, chosen=ALL):
    group, form = Mesh(check=check).group(), itertools.cycle(FORMS)
    calls = [(each, *axes) for each in SHAPES[1:-1] for axes in cut_and_joined(len(each))]
    for shape, axis, onto in calls[chosen]:
        joined = axis if onto is None else onto
        shapes = [list(shape) for _ in range(group.size)]
        for r, each in enumerate(shapes):
            each[joined] += r  # uneven where they are joined
        arrays = [values(tuple(each), dtype, r) for r, each in enumerate(shapes)]
        for lengths in splits_of(arrays, axis, joined % len(shape) == axis % len(shape)):
            parts = zip(arrays, lengths or even(arrays, axis))
            expected = [split(x, cut, axis)[group.rank] for x, cut in parts]
            mine = lengths and lengths[group.rank]
            result = group.all_to_all(next(form)(arrays[group.rank]), axis, onto, splits=mine)
            if mine is not None:
                result, came = result
                assert came == [part.shape[joined] for part in expected]
                again, _ = group.all_to_all(arrays[group.rank], axis, onto, splits=mine, received=came)
                assert_same(again, result, "known lengths", shapes, axis, onto, mine)
            assert_same(result, np.concatenate(expected, joined), shapes, axis, onto, mine)
            if joined % len(shape) == 0:
                out = np.empty_like(result)
                started = group.start_all_to_all(arrays[group.rank], axis, onto, splits=mine, out=out).wait()
                assert (started if mine is None else started[0]) is out
                assert_same(out, result, "out", shapes, axis, onto, mine)


def cut_and_joined(ndim):
    """Axes to cut and to join along: of one dimension there are no two; axes counted from the end, once more."""
    return [*itertools.product(range(ndim), [None, 0, -1] if ndim > 1 else [None]), (-1, 0), (-1, None)]


def even(arrays, axis):
    """The lengths of all ranks' parts where nobody says otherwise."""
    n = len(arrays)
    return [[len(part) for part in np.array_split(range(x.shape[axis]), n)] for x in arrays]


def splits_of(arrays, axis, any_cut):
    """None, and lengths that are not even; where any cut will do, different ones on every rank."""
    n = len(arrays)
    yield None
    if n > 1:
        yield [[x.shape[axis] - r * any_cut, *[0] * (n - 2), r * any_cut] for r, x in enumerate(arrays)]


def broadcast(dtype, check, chosen=ALL):
    group, form = Mesh(check=check).group(), itertools.cycle(FORMS)
    for shape, root in list(itertools.product(SHAPES, range(group.size)))[chosen]:
        expected = values(shape, dtype, root)
        other = [None, np.ones((3, 2), np.int32)][group.rank % 2]  # what is not the root's does not matter
        result = group.broadcast(next(form)(expected) if group.rank == root else other, root)
        assert_same(result, expected, shape, root)


def ring(dtype, check):
    group, form = Mesh(check=check).group(), itertools.cycle(FORMS)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for shape in SHAPES:
        sent = group.start_send(right, next(form)(values(shape, dtype, group.rank)))
        assert_same(group.receive(left), values(shape, dtype, left), shape)
        sent.wait()


# --- against NumPy

MPI_SIZES = ["mpi-2", "mpi-3", "mpi-4"]
PROGRAMS = [all_reduce, all_gather, reduce_scatter, all_to_all, broadcast]
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


def programs_and_dtypes():
    """Every pair on one virtual rank, and half of them in turn on 3 or 5, or under MPI on 2, 3 or 4.

    Below, in one dtype, these numbers meet every program. The other triples, and those with 8 virtual ranks (below
    again), are in ``soak``. Of several ranks each dtype makes a third of the calls, another one than its neighbours; in
    ``soak`` all of them, those of ``make test`` too.
    """
    turns = ["threads-3", "threads-5", *MPI_SIZES]
    cases = []
    for (i, program), (j, dtype) in itertools.product(enumerate(PROGRAMS), enumerate(DTYPES)):
        for ranks in numbers_of_ranks(1, 3, 5, soak=[8]):
            name = f"{program.__name__}-{dtype}-{ranks.id}"
            given = program, dtype, *ranks.values
            if ranks.id == turns[(i + j) % 5] and (i + j // 5) % 2 == 0:
                cases.append(pytest.param(*given, slice(j % 3, None, 3), marks=ranks.marks, id=f"{name}-a third"))
            marks = [*ranks.marks, *([] if ranks.id == "threads-1" else [pytest.mark.soak])]
            cases.append(pytest.param(*given, ALL, marks=marks, id=name))
    return cases


@pytest.mark.parametrize("program, dtype, ranks, chosen", programs_and_dtypes())
def test_collective(program, dtype, ranks, chosen):
    on_ranks(program, ranks, dtype, True, chosen)


@everywhere(1, 3, soak=[8], mpi=(2, 4), queues=3)
@each_program
def test_collective_without_checks(program, ranks):
    """Every third call, as they are made above."""
    on_ranks(program, ranks, np.dtype(np.float32), False, slice(0, None, 3))


@everywhere(2, 3, 5, soak=[8])
@each_dtype
def test_send_and_receive(dtype, ranks):
    on_ranks(ring, ranks, dtype, True)
