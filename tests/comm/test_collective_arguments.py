"""What the arguments of collectives do, which are refused, and any dtype that NumPy knows."""

import ml_dtypes
import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.errors import UsageError
from support.on_ranks import DTYPES, INLINE, assert_same, everywhere, numbers_of_ranks, on_ranks, reduced, values
from support.pairwise import every_pair


@every_pair(dtype=DTYPES[1:], ranks=numbers_of_ranks(1, 2, 4, mpi=(3,)), size={"inline": 5, "large": INLINE})
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

    run_threads(program, 4)


@everywhere(2)
@pytest.mark.parametrize("starts", [False, True], ids=["waits", "starts"])
def test_a_root_s_array_need_not_be_contiguous(starts, ranks):
    """Neither one that travels with the call, nor one that the others read where it lies."""

    def program():
        group = Mesh().group()
        for rows in 10, 100_000:
            whole = values((rows, 6), np.dtype(float), 0)
            for x in whole[:, ::2], whole.T:
                given = x if group.rank == 1 else None
                for _ in range(2):
                    got = group.start_broadcast(given, 1).wait() if starts else group.broadcast(given, 1)
                    assert_same(got, x)

    on_ranks(program, ranks)


@pytest.mark.parametrize("out", [np.empty(3), np.empty((2, 2)), np.empty(2, int), np.empty(4)[::2]])
def test_out_must_fit(out):
    with pytest.raises(UsageError, match="out must be contiguous"):
        run_threads(lambda: Mesh().group().all_reduce(np.ones(2), out=out), 2)


@pytest.mark.parametrize(
    "text, call",
    [
        ("axis 1 of an array of shape", lambda g: g.all_gather(np.ones(3), 1)),
        ("axis 0 of an array of shape", lambda g: g.all_gather(np.ones(()))),
        ("axis -2 of an array of shape", lambda g: g.reduce_scatter(np.ones(3), -2)),
        ("axis 2 of an array of shape", lambda g: g.all_to_all(np.ones((2, 2)), 0, 2)),
        ("all_reduce takes an array, not a list: make it one, by numpy.asarray", lambda g: g.all_reduce([1.0, 2.0])),
        ("all_gather takes an array, not a float", lambda g: g.start_all_gather(1.0).wait()),
        ("send takes an array, not a list", lambda g: g.receive(0) if g.rank else g.send(1, [1.0])),
        ("unknown op 'average'; there are: sum, mean", lambda g: g.all_reduce(np.ones(3), "average")),
        ("root 2 is not one of 2 ranks", lambda g: g.broadcast(np.ones(3), 2)),
        ("the root must pass an array", lambda g: g.broadcast(None, g.rank)),
        ("rank -1 is not one of 2 ranks", lambda g: g.send(-1, np.ones(3))),
        ("rank 2 is not one of 2 ranks", lambda g: g.receive(2)),
        ("must be 2 numbers that add up to 3", lambda g: g.reduce_scatter(np.ones(3), sizes=[3])),
        ("must be 2 numbers that add up to 3", lambda g: g.reduce_scatter(np.ones(3), sizes=[2, 2])),
        ("must be 2 numbers that add up to 3", lambda g: g.all_to_all(np.ones(3), splits=[4, -1])),
        ("must be 2 numbers; number", lambda g: g.all_gather(np.ones(3), sizes=[2, 2])),
        ("arrays of Python objects", lambda g: g.all_gather(np.array([None]))),
        ("all_reduce: there is no sum of <U1; give numbers", lambda g: g.all_reduce(np.array(["a", "b"]))),
        ("axis 'x' of an array of shape", lambda g: g.all_gather(np.ones(2), "x")),
        ("sizes .'a', 'b'.: give a list with a whole number", lambda g: g.reduce_scatter(np.ones(2), sizes=["a", "b"])),
        ("root is 0.5; give a number of the group", lambda g: g.broadcast(np.ones(2), 0.5)),
        ("rank is an array of shape .2,.; give a number", lambda g: g.send(np.ones(2), 1)),
        ("all_reduce: out is a list; give an array", lambda g: g.all_reduce(np.ones(2), out=[0.0, 0.0])),
        ("17 dimensions", lambda g: g.all_reduce(np.ones((1,) * 17))),
        ("dtype of 1 fields .* is too long", lambda g: g.all_gather(np.zeros(2, [("a" * 2100, int)]))),
    ],
)
def test_wrong_arguments(text, call):
    with pytest.raises(UsageError, match=text):
        run_threads(lambda: call(Mesh(timeout=100).group()), 2)


def test_a_group_of_one_rank_has_no_partner_for_messages():
    with pytest.raises(UsageError, match="a group of one rank has no other rank"):
        run_threads(lambda: Mesh().group().send(0, np.ones(3)), 1)


@pytest.mark.parametrize("name", ["broadcast", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_results_are_new_arrays(name, ranks):
    def program():
        x = np.ones(4)
        result = getattr(Mesh().group(), name)(x)
        assert not np.may_share_memory(result, x)
        result += 1  # and may be written to

    run_threads(program, ranks)


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

    run_threads(program, 2)
