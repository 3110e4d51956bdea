"""A call that one rank alone cannot make is refused on all of them, at once; and the group goes on."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.comm.agreement.call_agreement import INLINE, bytes_of, text_of
from spmd_engine.errors import UsageError
from support.on_ranks import numbers_of_ranks, on_ranks
from support.pairwise import every_pair

ONES, LARGE = np.ones(4), np.ones((4, 3000))

# What rank 1 calls, what the others call, and what the error says.
CASES = {
    "axis": (lambda g: g.all_gather(ONES, 1), lambda g: g.all_gather(ONES), "axis 1 of an array of shape"),
    "sizes": (
        lambda g: g.all_gather(ONES, sizes=[1] * g.size),
        lambda g: g.all_gather(ONES, sizes=[4] * g.size),
        "number 1 is 4, the length of this rank's array",
    ),
    "splits": (
        lambda g: g.all_to_all(LARGE, splits=[4]),
        lambda g: g.all_to_all(LARGE),
        "that add up to 4",
    ),
    "op": (lambda g: g.all_reduce(LARGE, "average"), lambda g: g.all_reduce(LARGE), "unknown op 'average'"),
    "out": (
        lambda g: g.all_reduce(LARGE, out=np.empty(3)),
        lambda g: g.all_reduce(LARGE, out=np.empty_like(LARGE)),
        "out must be contiguous",
    ),
    "part's out": (
        lambda g: g.reduce_scatter(LARGE, out=np.empty(3)),
        lambda g: g.reduce_scatter(LARGE),
        "out must be contiguous",
    ),
    "root": (lambda g: g.broadcast(None, g.size), lambda g: g.broadcast(ONES, 0), "root . is not one of"),
    "no array": (lambda g: g.broadcast(None, 1), lambda g: g.broadcast(None, 1), "the root must pass an array"),
    "dimensions": (
        lambda g: g.all_reduce(np.ones((1,) * 17)),
        lambda g: g.all_reduce(ONES),
        "17 dimensions",
    ),
}


@every_pair(name=CASES.keys(), ranks=numbers_of_ranks(2, 3, mpi=(3,)), nodes=[1, 2])
def test_all_refuse_what_one_rank_cannot_call(nodes, name, ranks):
    odd, usual, text = CASES[name]

    def program():
        group = Mesh(timeout=100).group()
        if name != "no array":
            for _ in range(2):
                usual(group)  # what is known before does not go unlooked at
        with pytest.raises(UsageError, match=f"^rank 1 of 'data': .*{text}") as caught:
            (odd if group.rank == 1 else usual)(group)
        said = f"{caught.value}\n"
        assert group.all_gather(np.frombuffer(said.encode(), np.uint8)).tobytes().decode() == said * group.size

    if ranks is None:
        on_ranks(program, ranks)
    else:
        run_threads(program, ranks, nodes=[str(r % nodes) for r in range(ranks)])


def test_the_error_of_a_call_that_was_started_is_its_own():
    def program():
        group = Mesh(timeout=100).group()
        wrong = group.start_all_gather(ONES, group.rank)  # axis 0, and on rank 1 axis 1
        assert group.all_reduce(ONES)[0] == 2
        with pytest.raises(UsageError, match="axis 1"):
            wrong.wait()

    run_threads(program, 2)


def test_different_refusals_are_all_said():
    def program():
        Mesh(timeout=100).group().all_gather(ONES, 1 + Mesh().rank)

    with pytest.raises(UsageError, match="rank 0 of 'data': .*axis 1 .*; rank 1 of 'data': .*axis 2 "):
        run_threads(program, 2)


def test_without_checks_all_hear_of_it_as_well():
    def program():
        group = Mesh(timeout=20, check=False).group()
        with pytest.raises(UsageError, match="^rank 1 of 'data': all_reduce: unknown op"):
            group.all_reduce(LARGE, "average" if group.rank == 1 else "sum")
        assert group.all_reduce(LARGE)[0, 0] == 2

    run_threads(program, 2, nodes=["a", "b"])


@pytest.mark.parametrize("nodes", ["aa", "ab", "aabb", "aab"])
def test_an_out_of_the_wrong_shape_is_one_rank_s_loss(nodes):
    """It is known when all shapes are; the others get what is theirs, however far they are."""

    def program():
        group = Mesh(timeout=100).group()
        if group.rank == 0:
            with pytest.raises(UsageError, match=r"out has shape \(3,\)"):
                group.all_gather(LARGE[0] * 1, out=np.empty(3))
        else:
            assert group.all_gather(LARGE[0] * 1).shape == (3000 * group.size,)
        group.barrier()

    run_threads(program, len(nodes), nodes=list(nodes))


@pytest.mark.parametrize("dtype", ["i4,f8", "V2", "M8[s]"])
def test_what_has_no_sum_has_none_on_ranks_without_a_part(dtype):
    def program():
        group = Mesh(timeout=100).group()
        with pytest.raises(UsageError, match="there is no sum of"):
            group.reduce_scatter(np.zeros(4, dtype), sizes=[4, 0])

    run_threads(program, 2)


def test_a_text_may_be_cut_within_a_letter():
    assert text_of(bytes_of("a" + "é" * INLINE)).startswith("aééé")
