"""Runs one SPMD program on virtual ranks and on MPI ranks, for the tests of communication."""

import functools

import ml_dtypes
import numpy as np
import pytest

from spmd_engine import run_threads
from support.queue_ranks import Queues

OPS = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
NUMPY_DTYPES = ("bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex128")
DTYPES = [np.dtype(each) for each in (*NUMPY_DTYPES, ml_dtypes.bfloat16)]
INLINE = 4096  # bytes; larger arrays take another transport


def everywhere(*virtual, soak=(), mpi=(3,), queues=0):
    """Run a test with these numbers of virtual ``ranks``, and under MPI with ``ranks`` None; and on so many ranks that
    have the least communicator, by ``queues``.

    MPI runs use 3 ranks; runs on 2 and 4 are in ``soak``, because cross-products cover all three numbers.
    """
    least = [pytest.param(Queues(queues), id=f"queues-{queues}")] if queues else []
    return pytest.mark.parametrize("ranks", [*numbers_of_ranks(*virtual, soak=soak, mpi=mpi), *least])


def numbers_of_ranks(*virtual, soak=(), mpi=(2, 3, 4)):
    """Parameters: these numbers; those in ``soak``, which take long; and None under MPI, on 2, 3 and 4 ranks.

    MPI runs on numbers of ranks that are not in ``mpi`` are also in ``soak``.
    """
    threads = [pytest.param(n, id=f"threads-{n}") for n in virtual]
    threads += [pytest.param(n, id=f"threads-{n}", marks=pytest.mark.soak) for n in soak]
    later = {n: [] if n in mpi else [pytest.mark.soak] for n in (2, 3, 4)}
    processes = [pytest.param(None, id=f"mpi-{n}", marks=[pytest.mark.mpi(ranks=n), *later[n]]) for n in (2, 3)]
    processes += [pytest.param(None, id="mpi-4", marks=[pytest.mark.mpi(min_size=4), *later[4]])]
    return threads + processes


def on_ranks(program, ranks, *args):
    """Run ``program(*args)`` on virtual ranks; if ``ranks`` is None, as one rank of the current MPI job."""
    if isinstance(ranks, Queues):
        return ranks.run(program, args)
    return run_threads(program, ranks, args=args) if ranks else [program(*args)]


@functools.cache
def values(shape, dtype, seed):
    """Read-only random numbers."""
    rng = np.random.default_rng([seed, *shape])
    if dtype.kind in "biu":
        x = rng.integers(1, 4, shape)
    else:
        x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.kind == "c" else 0)
    x = np.asarray(x > 1 if dtype.kind == "b" else x).astype(dtype)
    x.flags.writeable = False
    return x


def split(x, lengths, axis):
    """Parts of these lengths along an axis."""
    return np.split(x, np.cumsum(lengths)[:-1], axis)


def reduced(arrays, op):
    """The arrays of all ranks, combined by NumPy in rank order, with the dtypes that ``Group`` documents."""
    dtype = arrays[0].dtype
    if dtype.kind == "b" and op in ("sum", "mean", "prod"):
        dtype = np.dtype(np.int64)
    if dtype.kind in "iu" and op == "mean":
        dtype = np.dtype(np.float64)
    wide = np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype.newbyteorder("=")
    total = functools.reduce(lambda a, b: OPS[op](a, b, dtype=wide), [x.astype(wide) for x in arrays])
    return np.asarray(total / wide.type(len(arrays)) if op == "mean" else total, wide).astype(dtype)


def assert_same(result, expected, *about):
    """Equal dtype, shape and bits, except complex products, whose rounding in NumPy depends on the length."""
    assert isinstance(result, np.ndarray), (about, type(result))
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), about
    equal = result.tobytes() == expected.tobytes()
    if "prod" in about and result.dtype.kind == "c":
        equal = np.allclose(result, expected, rtol=1e-13)
    assert equal, (about, result, expected)


def assert_reduced(result, total, comm, *about):
    """``assert_same``; but among more than two nodes, sums are not in rank order, and differ by rounding."""
    if comm.connections.table is not None or len(set(comm.hosts)) == 2 or total.dtype.kind in "biu":
        return assert_same(result, total, *about)
    assert (result.dtype, result.shape) == (total.dtype, total.shape), about
    wide = np.complex128 if total.dtype.kind == "c" else np.float64
    tolerance = 1e-2 if total.dtype.itemsize == 2 else 100 * np.finfo(total.dtype).eps
    np.testing.assert_allclose(result.astype(wide), total.astype(wide), tolerance, tolerance, err_msg=str(about))


def assert_alike(group, x):
    """Assert that ``x`` has the same bits on every rank."""
    mine = np.frombuffer(x.tobytes(), np.uint8)
    theirs = group.all_gather(mine[None])
    assert (theirs == mine).all(), [row.tobytes() for row in theirs]


def transposed(x):
    return np.array(x.T, order="C").T


def sliced(x):
    """The same values, with gaps between them in memory."""
    big = np.zeros([2 * n for n in x.shape], x.dtype)
    view = big[(..., *[slice(None, None, 2)] * x.ndim)]
    view[...] = x
    return view


def backwards(x):
    """The same values, with negative strides."""
    reverse = (..., *[slice(None, None, -1)] * x.ndim)
    return np.array(x[reverse], order="C")[reverse]


FORMS = [lambda x: x, transposed, sliced, backwards]
