"""Every dtype comes as it went, fields and byte order included, by every way; what cannot go, goes on no rank."""

import functools
import itertools

import ml_dtypes
import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.arrays import dtypes
from spmd_engine.errors import MismatchError, UsageError
from support.on_ranks import everywhere, numbers_of_ranks, on_ranks
from support.pairwise import every_pair

INNER = np.dtype([("x", ">i2"), ("y", ml_dtypes.bfloat16, (2, 2))])
KINDS = {
    "big-endian": np.dtype(">f4"),
    "big-endian-half": np.dtype(">f2"),
    "big-endian-text": np.dtype(">U2"),
    "two-fields": np.dtype("i4,>f8"),
    "aligned": np.dtype([("a", "i1"), ("b", "f8")], align=True),
    "nested": np.dtype([("a", INNER), ("b", "S3")]),
    "nested-aligned": np.dtype([("a", [("b", [("c", "i1"), ("d", ">f8", 3)])])], align=True),
    "out-of-order": np.dtype({"names": ["a", "b"], "formats": ["i4", ">i2"], "offsets": [4, 1], "itemsize": 11}),
    "with-titles": np.dtype([(("the first", "a"), "f4"), ("b", "f4")]),
}
NUMBERS = [KINDS["big-endian"], KINDS["big-endian-half"], np.dtype(">i8"), np.dtype(">c16")]
TIMES = 5  # the first call, calls that are known, and every place that data have in a table


@functools.cache
def numbered(shape, dtype, seed):
    """An array whose every field has numbers of its own; no padding between them is ever looked at, nothing written."""
    x = np.zeros(shape, dtype)
    for i, each in enumerate(leaves(x)):
        each[...] = (np.arange(each.size).reshape(each.shape) % 50 + i + seed).astype(np.uint8)
    x.flags.writeable = False
    return x


def leaves(x):
    """The arrays of plain numbers that a structured array is made of."""
    return [x] if x.dtype.names is None else [leaf for name in x.dtype.names for leaf in leaves(x[name])]


def assert_came(result, *parts, axis=0):
    """``result`` is the ``parts``, joined along ``axis``, of the very dtype that they have."""
    dtype = parts[0].dtype
    assert (result.dtype, repr(result.dtype)) == (dtype, repr(dtype))
    for found, *expected in zip(leaves(result), *map(leaves, parts), strict=True):
        joined = np.concatenate(expected, axis)
        assert found.shape == joined.shape and (found == joined).all()


def lengths_and_times(every):
    """Few rows and many, even and uneven, again and again; all but few even ones less often unless for ``every``."""
    for lengths, times in zip(itertools.product((4, 4000), (0, 1)), (TIMES, 2, 2, 3), strict=True):
        yield from itertools.product([lengths], range(TIMES if every else times))


def exchanges(dtype, every=False):
    """All that hands data on, of even shards and uneven ones, that go with a header, by memory, or by messages."""
    group = Mesh(timeout=60).group()
    n, rank = group.size, group.rank
    for (length, uneven), time in lengths_and_times(every):
        arrays = [numbered((length + uneven * r, 3), dtype, time + r) for r in range(n)]
        lengths = [len(x) for x in arrays]
        mine, out = arrays[rank], np.empty((sum(lengths), 3), dtype)
        assert_came(group.all_gather(mine), *arrays)
        assert_came(group.all_gather(mine, sizes=lengths, out=out), *arrays)
        if not uneven:
            assert_came(group.all_gather(mine, 1), *arrays, axis=1)
            parts = [np.array_split(x, n, 1)[rank] for x in arrays]
            assert_came(group.all_to_all(mine, 1), *parts, axis=1)
        assert_came(group.all_to_all(mine), *[np.array_split(x, n)[rank] for x in arrays])
        came, _ = group.all_to_all(mine, splits=[0] * (n - 1) + lengths[rank : rank + 1])
        assert_came(came, *last_part(arrays, rank))
        assert_came(group.broadcast(mine, time % n), arrays[time % n])
        sent = group.start_send((rank + 1) % n, mine)
        assert_came(group.receive(rank - 1 if rank else n - 1), arrays[rank - 1])
        sent.wait()


def last_part(arrays, rank):
    """All of every array for the last rank, nothing for the others."""
    return [x if rank == len(arrays) - 1 else x[:0] for x in arrays]


def reductions(dtype):
    group = Mesh(timeout=60).group()
    n, rank = group.size, group.rank
    for length in (5,) * TIMES + (9000,) * 2:
        arrays = [numbered((length, 2), dtype, r) for r in range(n)]
        total = sum(x.astype(dtype.newbyteorder("=")) for x in arrays).astype(dtype)
        assert_came(group.all_reduce(arrays[rank]), total)
        assert_came(group.all_reduce(arrays[rank], out=np.empty_like(total)), total)
        for axis in (0, 1):
            part = np.array_split(total, n, axis)[rank]
            out = np.empty(part.shape, dtype)
            assert_came(group.reduce_scatter(arrays[rank], axis), part)
            assert_came(group.reduce_scatter(arrays[rank], axis, out=out), part)


each_kind = pytest.mark.parametrize("kind", KINDS)


def kinds_and_ranks():
    """Each kind on one virtual rank and in turn on 2 or 3; every other one under MPI; the rest in ``soak``.

    And whether every length is handed on as often as any.
    """
    for (i, kind), ranks in itertools.product(enumerate(KINDS), numbers_of_ranks(1, 2, 3)):
        later = ranks.id not in ("threads-1", f"threads-{2 + i % 2}") and (i % 2 or ranks.id != f"mpi-{2 + i % 3}")
        marks = [*ranks.marks, *([pytest.mark.soak] if later else [])]
        yield pytest.param(kind, *ranks.values, later, marks=marks, id=f"{kind}-{ranks.id}")


@pytest.mark.parametrize("kind, ranks, every", list(kinds_and_ranks()))
def test_exchanges(kind, ranks, every):
    on_ranks(exchanges, ranks, KINDS[kind], every) if ranks != 1 else run_threads(alone, 1, args=(KINDS[kind],))


def alone(dtype):
    """A group of one rank has nobody to send to."""
    group, x = Mesh().group(), numbered((4, 3), dtype, 0)
    for result in group.all_gather(x), group.all_gather(x, out=x.copy()), group.all_to_all(x), group.broadcast(x):
        assert_came(result, x)


def kinds_and_nodes():
    """Every other kind on one of two placements in turn; the rest, and every length as often, in ``soak``."""
    for (i, kind), (j, nodes) in itertools.product(enumerate(KINDS), enumerate(["aabb", "abcd"])):
        later = (i + 2 * j) % 4 != 1
        yield pytest.param(kind, nodes, later, id=f"{kind}-{nodes}", marks=pytest.mark.soak if later else ())


@pytest.mark.parametrize("kind, nodes, every", list(kinds_and_nodes()))
def test_exchanges_between_nodes(kind, nodes, every):
    run_threads(exchanges, 4, args=(KINDS[kind], every), nodes=list(nodes))


@everywhere(1, 3)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_reductions(dtype, ranks):
    on_ranks(reductions, ranks, dtype)


@pytest.mark.parametrize("dtype", NUMBERS[1::2], ids=str)
def test_reductions_between_nodes(dtype):
    run_threads(reductions, 4, args=(dtype,), nodes=list("aabb"))


@everywhere(2)
def test_a_dtype_of_many_fields(ranks):
    dtype = np.dtype([(f"field{i}", ">f4") for i in range(60)])
    x = numbered((4, 3), dtype, 0)
    on_ranks(lambda: assert_came(Mesh().broadcast(x if Mesh().rank == 0 else None), x), ranks)


@each_kind
def test_a_description_makes_the_dtype_again(kind):
    made = dtypes.described(dtypes.describe(KINDS[kind]))
    assert made == KINDS[kind] and repr(made) == repr(KINDS[kind])


def test_a_mismatch_of_byte_orders_names_them():
    def program():
        group = Mesh(timeout=100).group()
        group.all_reduce(np.ones(3, ">f4" if group.rank else "<f4"))

    with pytest.raises(MismatchError, match=r"rank 0 called .*float32\[3\].*; rank 1 called .*>f4\[3\]"):
        run_threads(program, 2)


# --- what cannot go

INDESCRIBABLE = {
    "objects": (np.array([None] * 4), "arrays of Python objects cannot be sent"),
    "objects-in-a-field": (np.zeros(4, [("a", object)]), "arrays of Python objects cannot be sent"),
    "strings-of-any-length": (np.array(["a"] * 4, np.dtypes.StringDType()), "arrays of Python objects cannot"),
    "too-many-fields": (np.zeros(4, [(f"field{i}", float) for i in range(200)]), "200 fields .* is too long"),
    "no-bytes": (np.zeros(4, []), "cannot be described"),
    "no-text-for-a-title": (np.zeros(4, [((b"1", "a"), float)]), "cannot be described"),
}
OPERATIONS = {
    "all_gather": lambda group, x: group.all_gather(x),
    "all_to_all": lambda group, x: group.all_to_all(x),
    "all_reduce": lambda group, x: group.all_reduce(x, "max"),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x, op="max"),
    "broadcast": lambda group, x: group.broadcast(x, 1),
    "send": lambda group, x: group.send(0, x) if group.rank == 1 else group.receive(1),
}


@every_pair(name=OPERATIONS.keys(), ranks=numbers_of_ranks(2, 3, mpi=(3,)), nodes=[1, 2])
def test_what_one_rank_cannot_send_all_refuse(name, nodes, ranks):
    def program(call):
        group = Mesh(timeout=100).group()
        for x, text in INDESCRIBABLE.values():
            for _ in range(2):
                if name == "send" and group.rank > 1:
                    said = ""
                else:
                    with pytest.raises(UsageError, match=f"{text}|there is no max of") as caught:
                        call(group, x if group.rank == 1 else np.ones(4))
                    said = str(caught.value)
                    assert "rank 1 of 'data'" in said
                told = group.all_gather(np.frombuffer(f"{said}\n".encode(), np.uint8)).tobytes().decode()
                assert len(set(told.split("\n")) - {""}) == 1  # all the same; and the group goes on

    if ranks is None:
        program(OPERATIONS[name])
    else:
        run_threads(program, ranks, args=(OPERATIONS[name],), nodes=[str(r % nodes) for r in range(ranks)])
