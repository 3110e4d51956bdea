"""Every collective against NumPy on the list of all ranks' arrays, on threads and on MPI."""

import functools
import itertools
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from on_ranks import DTYPES, FORMS, INLINE, OPS, assert_same, everywhere, on_ranks, reduced, values
from spmd_engine import Mesh, run, world
from spmd_engine.errors import UsageError

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


def split(x, lengths, axis):
    return np.split(x, np.cumsum(lengths)[:-1], axis)


# --- programs: what every rank runs


def all_reduce(dtype, check):
    group, form = Mesh(check=check).group(), itertools.cycle(FORMS)
    for shape, op in itertools.product(SHAPES, OPS):
        result = group.all_reduce(next(form)(values(shape, dtype, group.rank)), op)
        assert_same(result, whole(shape, dtype, group.size, op), shape, op)


def all_gather(dtype, check):
    group, form = Mesh(check=check).group(), itertools.cycle(FORMS)
    for shape, lengths in itertools.product([(1,), (2, 3), (2, 3, 4)], lengths_of(group.size, dtype)):
        for axis, sizes in itertools.product(axes_of(shape), [None, lengths]):
            shapes = [np.insert(np.delete(shape, axis), axis % len(shape), n) for n in lengths]
            arrays = [values(tuple(map(int, each)), dtype, r) for r, each in enumerate(shapes)]
            result = group.all_gather(next(form)(arrays[group.rank]), axis, sizes=sizes)
            assert_same(result, np.concatenate(arrays, axis), shapes, axis, sizes)


def reduce_scatter(dtype, check):
    group, form, op = Mesh(check=check).group(), itertools.cycle(FORMS), itertools.cycle(OPS)
    for shape in SHAPES[1:]:
        for axis in axes_of(shape):
            last = [0] * (group.size - 1) + [shape[axis]]  # all of it to the last rank
            for sizes, how in itertools.product([None, last], [next(op), next(op)]):
                total = whole(shape, dtype, group.size, how)
                parts = split(total, sizes, axis) if sizes else np.array_split(total, group.size, axis)
                x = next(form)(values(shape, dtype, group.rank))
                result = group.reduce_scatter(x, axis, how, sizes=sizes)
                assert_same(result, parts[group.rank], shape, axis, sizes, how)


def all_to_all(dtype, check):
    group, form = Mesh(check=check).group(), itertools.cycle(FORMS)
    for shape in SHAPES[1:-1]:
        for axis, onto in itertools.product(axes_of(shape), [None, 0, -1]):
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
                assert_same(result, np.concatenate(expected, joined), shapes, axis, onto, mine)


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


def broadcast(dtype, check):
    group, form = Mesh(check=check).group(), itertools.cycle(FORMS)
    for shape, root in itertools.product(SHAPES, range(group.size)):
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

PROGRAMS = [all_reduce, all_gather, reduce_scatter, all_to_all, broadcast]
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


@everywhere(1, 3, 8)
@each_dtype
@each_program
def test_collective(program, dtype, ranks):
    on_ranks(program, ranks, dtype, True)


@everywhere(1, 3, 8)
@each_program
def test_collective_without_checks(program, ranks):
    on_ranks(program, ranks, np.dtype(np.float32), False)


@everywhere(2, 3, 8)
@each_dtype
def test_send_and_receive(dtype, ranks):
    on_ranks(ring, ranks, dtype, True)


# --- what their arguments do


@everywhere(1, 2, 4)
@pytest.mark.parametrize("size", [5, INLINE], ids=["inline", "large"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_all_reduce_into_out(dtype, size, ranks):
    def program():
        group = Mesh().group()
        arrays = [values((size,), dtype, r) for r in range(group.size)]
        expected = reduced(arrays, "sum")
        x, out = arrays[group.rank].copy(), np.empty(size, dtype)
        assert group.all_reduce(x, out=out) is out
        assert_same(out, expected)
        assert_same(x, arrays[group.rank])
        assert group.all_reduce(x, out=x) is x
        assert_same(x, expected)

    on_ranks(program, ranks)


@pytest.mark.parametrize("size", [16, INLINE], ids=["inline", "large"])
@pytest.mark.parametrize("shift", [-3, 3])
def test_out_may_overlap_the_input(size, shift):
    def program():
        group = Mesh().group()
        arrays = [values((size,), np.dtype(float), r) for r in range(group.size)]
        memory = np.zeros(size + 6)
        x, out = memory[3 : size + 3], memory[3 + shift : size + 3 + shift]
        x[...] = arrays[group.rank]
        assert_same(group.all_reduce(x, out=out), reduced(arrays, "sum"))

    run(program, 4)


@pytest.mark.parametrize("out", [np.empty(3), np.empty((2, 2)), np.empty(2, int), np.empty(4)[::2]])
def test_out_must_fit(out):
    with pytest.raises(UsageError, match="out must be contiguous"):
        run(lambda: Mesh().group().all_reduce(np.ones(2), out=out), 2)


@pytest.mark.parametrize(
    "text, call",
    [
        ("axis 1 of an array of shape", lambda g: g.all_gather(np.ones(3), 1)),
        ("axis 0 of an array of shape", lambda g: g.all_gather(np.ones(()))),
        ("axis -2 of an array of shape", lambda g: g.reduce_scatter(np.ones(3), -2)),
        ("axis 2 of an array of shape", lambda g: g.all_to_all(np.ones((2, 2)), 0, 2)),
        ("unknown op 'average'; choose one of sum, mean", lambda g: g.all_reduce(np.ones(3), "average")),
        ("root 2 is not one of 2 ranks", lambda g: g.broadcast(np.ones(3), 2)),
        ("the root must give an array", lambda g: g.broadcast(None, g.rank)),
        ("rank -1 is not one of 2 ranks", lambda g: g.send(-1, np.ones(3))),
        ("rank 2 is not one of 2 ranks", lambda g: g.receive(2)),
        ("must be 2 numbers that add up to 3", lambda g: g.reduce_scatter(np.ones(3), sizes=[3])),
        ("must be 2 numbers that add up to 3", lambda g: g.reduce_scatter(np.ones(3), sizes=[2, 2])),
        ("must be 2 numbers that add up to 3", lambda g: g.all_to_all(np.ones(3), splits=[4, -1])),
        ("must be 2 numbers; number", lambda g: g.all_gather(np.ones(3), sizes=[2, 2])),
        ("arrays of Python objects", lambda g: g.all_gather(np.array([None]))),
        ("17 dimensions", lambda g: g.all_reduce(np.ones((1,) * 17))),
        ("dtype of 1 fields .* is too long", lambda g: g.all_gather(np.zeros(2, [("a" * 2100, int)]))),
    ],
)
def test_wrong_arguments(text, call):
    with pytest.raises(UsageError, match=text):
        run(lambda: call(Mesh(timeout=5).group()), 2)


def test_a_group_of_one_has_nobody_to_talk_to():
    with pytest.raises(UsageError, match="one rank has nobody to talk to"):
        run(lambda: Mesh().group().send(0, np.ones(3)), 1)


@pytest.mark.parametrize("name", ["broadcast", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_results_are_new_arrays(name, ranks):
    def program():
        x = np.ones(4)
        result = getattr(Mesh().group(), name)(x)
        assert not np.may_share_memory(result, x)
        result += 1  # and may be written to

    run(program, ranks)


SOME_DTYPES = ["S3", "U2", "M8[s]", "m8[ms]", ">f4", "longdouble", "complex64", "V5", "i4,f8"]
SOME_DTYPES += ["float8_e5m2", "float8_e4m3fn", "int4"]


@pytest.mark.parametrize("name", SOME_DTYPES, ids=str)
def test_any_dtype_that_numpy_knows(name):
    dtype = np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)

    def program():
        group = Mesh().group()
        x = np.arange(6).astype(np.uint8).view("V1").repeat(dtype.itemsize).view(dtype)
        sent = group.start_send(1 - group.rank, x)
        for result in group.receive(1 - group.rank), group.broadcast(x), group.all_to_all(x):
            assert result.dtype == dtype and result.shape == (6,)
        assert group.all_gather(x.reshape(2, 3), 1).dtype == dtype
        assert group.all_gather(x).tobytes() == x.tobytes() * 2
        sent.wait()

    run(program, 2)


# --- several under way


@everywhere(2, 3, 8)
def test_many_messages_arrive_in_the_order_sent(ranks):
    def program():
        group = Mesh().group()
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        shapes = [(i % 7, 400 * (i % 3)) for i in range(100)]
        sent = [group.start_send(right, np.full(shape, i)) for i, shape in enumerate(shapes)]
        for i, shape in enumerate(shapes):
            assert_same(group.receive(left), np.full(shape, i))
        for each in sent:
            each.wait()

    on_ranks(program, ranks)


@everywhere(2, 4)
def test_receives_may_be_started_first_and_waited_for_backwards(ranks):
    def program():
        group = Mesh().group()
        partner = group.rank ^ 1
        if partner < group.size:  # with three ranks the last has none
            received = [group.start_receive(partner) for _ in range(5)]
            sent = [group.start_send(partner, np.full(700 * i, i)) for i in range(5)]
            for i in reversed(range(5)):
                assert_same(received[i].wait(), np.full(700 * i, i))
                sent[i].wait()

    on_ranks(program, ranks)


def test_a_rank_may_send_to_itself():
    def program():
        group = Mesh().group()
        sent = group.start_send(group.rank, np.arange(INLINE))
        assert_same(group.receive(group.rank), np.arange(INLINE))
        sent.wait()

    run(program, 2)


@everywhere(2, 3)
@pytest.mark.parametrize("size", [3, INLINE], ids=["inline", "large"])
def test_crossed_waits(size, ranks):
    def program():
        group = Mesh().group()
        first = group.start_all_reduce(np.full(size, 1.0))
        second = group.start_all_gather(np.full(size, group.rank))
        for pending in (first, second) if group.rank else (second, first):
            pending.wait()
        assert_same(first.wait(), np.full(size, float(group.size)))  # again: the same result
        assert_same(second.wait(), np.arange(group.size).repeat(size))

    on_ranks(program, ranks)


@pytest.mark.parametrize(
    "ranks", [pytest.param(4, id="threads-4"), pytest.param(None, id="mpi-4", marks=pytest.mark.mpi(ranks=4))]
)
@pytest.mark.parametrize("size", [3, INLINE], ids=["inline", "large"])
def test_overlapping_groups_waited_for_in_any_order(size, ranks):
    def program():
        with Mesh(data=2, model=2) as mesh:
            x = np.full(size, float(mesh.rank))
            started = {
                over: [mesh.start("all_reduce", x * 2**i, over=over) for i in range(3)]
                for over in ("data", "model", ("model", "data"))
            }
            order = list(itertools.chain(*started.values()))
            np.random.default_rng(mesh.rank).shuffle(order)  # another one on every rank
            for pending in order:
                pending.wait()
            for over, pendings in started.items():
                total = {"data": 2 * (mesh.rank % 2) + 2, "model": 4 * (mesh.rank // 2) + 1}.get(over, 6)
                for i, pending in enumerate(pendings):
                    assert_same(pending.wait(), np.full(size, float(total * 2**i)))

    on_ranks(program, ranks)


@everywhere(1, 3)
def test_barrier(ranks):
    """Nobody leaves before the last has come."""

    def program():
        group = Mesh().group()
        if group.rank == group.size - 1:
            time.sleep(0.05)
        came = time.monotonic()  # of one clock, as all are on one node
        group.barrier()
        left = time.monotonic()
        assert group.all_reduce(np.array(came), "max") <= left

    on_ranks(program, ranks)


# --- random arrays and cuts


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
    for result in run(lambda: Mesh().all_gather(arrays[world().rank], axis), len(arrays)):
        assert_same(result, np.concatenate(arrays, axis))


@given(shards(), st.sampled_from(DTYPES), st.sampled_from(list(OPS)))
def test_reduce_scatter_of_any_cut(drawn, dtype, op):
    shape, axis, lengths = drawn
    shape[axis] = sum(lengths)
    arrays = [values(tuple(shape), dtype, r) for r in range(len(lengths))]

    def program():
        group = Mesh().group()
        return group.reduce_scatter(arrays[group.rank], axis, op, sizes=lengths)

    for result, part in zip(run(program, len(lengths)), split(reduced(arrays, op), lengths, axis)):
        assert_same(result, part, op)


@given(shards(), st.data())
def test_all_to_all_of_any_cut_and_back(drawn, data):
    arrays, axis, n = arrays_of(*drawn, np.dtype(float)), drawn[1], len(drawn[2])
    ends = [sorted(data.draw(st.lists(st.integers(0, m), min_size=n - 1, max_size=n - 1))) for m in drawn[2]]
    there = [np.diff([0, *end, m]).tolist() for end, m in zip(ends, drawn[2])]
    back = np.transpose(there).tolist()

    def program():
        group = Mesh().group()
        result = group.all_to_all(arrays[group.rank], axis, splits=there[group.rank])
        parts = [split(x, cut, axis)[group.rank] for x, cut in zip(arrays, there)]
        assert_same(result, np.concatenate(parts, axis))
        assert_same(group.all_to_all(result, axis, splits=back[group.rank]), arrays[group.rank])

    run(program, n)
