"""Ranks that do not call the same thing get the same MismatchError, at once; who waits in vain, a timeout."""

import time

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.errors import CommunicationTimeout, MismatchError
from support.on_ranks import everywhere, on_ranks

THREE = np.ones(3)
LARGE = np.ones((3, 1000))

# What rank 1 calls, what the others call, and what the error says of either.
CASES = {
    "operation": (
        lambda g: g.barrier(),
        lambda g: g.all_reduce(THREE),
        ["{odd} called barrier() as its call", "{others} called all_reduce(sum, float64[3]) as its call"],
    ),
    "operation-large": (
        lambda g: g.all_gather(LARGE),
        lambda g: g.all_reduce(LARGE),
        ["{odd} called all_gather(float64[3, 1000], axis=0)", "{others} called all_reduce(sum, float64[3"],
    ),
    "dtype": (
        lambda g: g.all_reduce(THREE.astype(np.float32)),
        lambda g: g.all_reduce(THREE),
        ["{odd} called all_reduce(sum, float32[3])", "{others} called all_reduce(sum, float64[3])"],
    ),
    "shape": (
        lambda g: g.all_reduce(np.ones(4)),
        lambda g: g.all_reduce(THREE),
        ["{odd} called all_reduce(sum, float64[4])", "{others} called all_reduce(sum, float64[3])"],
    ),
    "inline-and-large": (
        lambda g: g.all_reduce(LARGE),
        lambda g: g.all_reduce(THREE),
        ["{odd} called all_reduce(sum, float64[3, 1000])", "{others} called all_reduce(sum, float64[3])"],
    ),
    "shape-beside-the-gathered-axis": (
        lambda g: g.all_gather(np.ones((2, 4)), 0),
        lambda g: g.all_gather(np.ones((2, 3)), 0),
        ["{odd} called all_gather(float64[2, 4], axis=0)", "{others} called all_gather(float64[2, 3], axis="],
    ),
    "dimensions": (
        lambda g: g.all_gather(np.ones((3, 1))),
        lambda g: g.all_gather(THREE),
        ["{odd} called all_gather(float64[3, 1], axis=0)", "{others} called all_gather(float64[3], axis=0)"],
    ),
    "axis": (
        lambda g: g.all_gather(LARGE[:1], 1),
        lambda g: g.all_gather(LARGE[:1], 0),
        ["{odd} called all_gather(float64[1, 1000], axis=1)", "all_gather(float64[1, 1000], axis=0)"],
    ),
    "concat-axis": (
        lambda g: g.all_to_all(LARGE, 0, 1),
        lambda g: g.all_to_all(LARGE, 0),
        ["{odd} called all_to_all(float64[3, 1000], axis=0, concat_axis=1)", "axis=0, concat_axis=0)"],
    ),
    "root": (
        lambda g: g.broadcast(THREE, root=1),
        lambda g: g.broadcast(THREE, root=0),
        ["{odd} called broadcast(float64[3], root=1)", "rank 0 called broadcast(float64[3], root=0)"],
    ),
    "reduction": (
        lambda g: g.all_reduce(THREE, "max"),
        lambda g: g.all_reduce(THREE, "sum"),
        ["{odd} called all_reduce(max, float64[3])", "{others} called all_reduce(sum, float64[3])"],
    ),
    "sizes": (
        lambda g: g.reduce_scatter(THREE, sizes=[0] * (g.size - 1) + [3]),
        lambda g: g.reduce_scatter(THREE, sizes=[3] + [0] * (g.size - 1)),
        ["{odd} called reduce_scatter(sum, float64[3], axis=0, sizes=[0,", "axis=0, sizes=[3, 0"],
    ),
    "sizes-or-none": (
        lambda g: g.reduce_scatter(THREE, sizes=[0] * (g.size - 1) + [3]),
        lambda g: g.reduce_scatter(THREE),
        ["{odd} called reduce_scatter(sum, float64[3], axis=0, sizes=[0,", "float64[3], axis=0) as its call"],
    ),
    "splits-that-cannot-be-joined": (
        lambda g: g.all_to_all(LARGE, 0, 1, splits=[0] * (g.size - 1) + [3]),
        lambda g: g.all_to_all(LARGE, 0, 1, splits=[3] + [0] * (g.size - 1)),
        ["concat_axis=1, sizes=[0,", "concat_axis=1, sizes=[3, 0"],
    ),
}


@everywhere(2, 3, 8)
@pytest.mark.parametrize("name", CASES)
def test_mismatch(name, ranks):
    on_ranks(disagree, ranks, *CASES[name])


@pytest.mark.parametrize("ranks", [2, 3, 8])  # under MPI, where other tests follow, a rank ends once and for good
def test_a_program_that_ended(ranks):
    texts = ["{odd} called nothing more: its program ended", "{others} called all_gather(float64[3], axis=0)"]
    run_threads(lambda: disagree(lambda g: g.leave(), lambda g: g.all_gather(THREE), texts), ranks)


def disagree(odd, usual, texts):
    """Rank 1 calls ``odd``, the others ``usual``: all get the same error, which says the ``texts``."""
    group = Mesh(timeout=100).group()
    with pytest.raises(MismatchError) as caught:
        (odd if group.rank == 1 else usual)(group)
    text = str(caught.value)
    others = [str(r) for r in range(group.size) if r != 1]
    names = {"odd": "rank 1", "others": ("ranks " if len(others) > 1 else "rank ") + ", ".join(others)}
    assert text.startswith("collective over 'data' does not match")
    for each in texts:
        assert each.format(**names) in text
    everyones = group.all_gather(np.frombuffer(f"{text}\n".encode(), np.uint8)).tobytes().decode()
    assert everyones == f"{text}\n" * group.size


@everywhere(2, 4)
def test_another_order_shows_at_the_first_call(ranks):
    def program():
        group = Mesh(timeout=100).group()
        calls = [lambda: group.start_all_reduce(THREE), lambda: group.start_all_gather(LARGE)]
        first, second = [call() for call in (calls if group.rank else reversed(calls))]
        with pytest.raises(MismatchError, match="rank 0 called all_gather"):
            first.wait()
        with pytest.raises(MismatchError, match="rank 0 called all_reduce"):
            second.wait()

    on_ranks(program, ranks)


@everywhere(2, 4)
def test_an_error_belongs_to_its_call(ranks):
    """However early it shows: in start_..., or while another call is waited for."""

    def program():
        group = Mesh(timeout=100).group()
        wrong = group.start_all_reduce(np.ones(group.rank))
        right = group.start_all_reduce(THREE)
        assert right.wait()[0] == group.size
        for _ in range(2):
            with pytest.raises(MismatchError, match=r"rank 1 called all_reduce\(sum, float64\[1\]\)"):
                wrong.wait()

    on_ranks(program, ranks)


def test_a_call_too_many_shows_at_the_next():
    def program():
        group = Mesh(timeout=100).group()
        if group.rank == 0:
            group.start_barrier()
        group.all_reduce(THREE)

    with pytest.raises(MismatchError, match="rank 0 called barrier.* number 1; rank 1 called all_reduce"):
        run_threads(program, 2)


def test_a_program_that_ends_early():
    def program():
        mesh = Mesh(timeout=100)
        if mesh.rank != 1:
            mesh.all_gather(THREE)

    text = "ranks 0, 2 called all_gather.* as its call number 1; rank 1 called nothing more: its program"
    with pytest.raises(MismatchError, match=text):
        run_threads(program, 3)


def test_a_mesh_needs_no_communication():
    """Nor a group of all ranks: so one that not all ranks make is no mismatch."""

    def program():
        mesh = Mesh(timeout=100)
        if mesh.rank == 0:
            Mesh().group()
        mesh.barrier()

    run_threads(program, 2)


def test_a_mismatch_in_a_group_names_its_axes():
    def program():
        with Mesh(data=2, model=2, timeout=100) as mesh:
            if mesh.coordinates["data"] == 1:  # only the other group is at odds
                mesh.all_reduce(THREE, over="model")
            else:
                with pytest.raises(MismatchError, match="over 'model'.*: rank 0 called .*; rank 1 called"):
                    mesh.all_reduce(np.ones(mesh.rank), over="model")

    run_threads(program, 4)


# --- timeouts


@everywhere(2, 3)
@pytest.mark.parametrize("operation", ["barrier", "all_reduce", "receive"])
def test_timeout(operation, ranks):
    """It says what was waited for; the call is then still under way, and may be waited for again."""

    def program():
        group = Mesh(timeout=0.2).group()
        last = group.size - 1
        if group.rank == 0:
            calls = {
                "barrier": (lambda: group.start_barrier(), "barrier() as its call number "),
                "all_reduce": (lambda: group.start_all_reduce(THREE, label="loss"), "all_reduce(sum, float"),
                "receive": (lambda: group.start_receive(last), "receive over 'data'"),
            }
            start, text = calls[operation]
            pending, began = start(), time.monotonic()
            with pytest.raises(CommunicationTimeout) as caught:
                pending.wait()
            assert time.monotonic() - began >= 0.2
            assert str(caught.value).startswith(f"waited 0.2 s: {text}")
            assert f"over 'data'{' (loss)' * (operation == 'all_reduce')}, group rank 0" in str(caught.value)
            group.timeout = pending._timeout = 60
            for r in range(1, group.size):
                group.send(r, THREE)
            pending.wait()
        else:
            group.timeout = 60
            group.receive(0)
            if operation == "barrier":
                group.barrier()
            elif operation == "all_reduce":
                group.all_reduce(THREE, label="loss")
            elif group.rank == last:
                group.send(0, THREE)

    on_ranks(program, ranks)


def ends_early(how):
    """Rank 3 ends while rank 2 waits for it in a group of the two, or for a message."""
    mesh = Mesh(rows=2, columns=2)
    mesh.barrier(over="columns")
    if mesh.rank == 2:
        if how == "collective":
            mesh.all_reduce(np.ones(3), over="columns")
        else:
            mesh.receive(1, over="columns")


@pytest.mark.parametrize("how", ["collective", "message"])
def test_an_end_while_another_waits_in_a_smaller_group_is_an_error(how):
    text = r"waits for ranks whose program has ended \(\[1\]\): .* over 'columns'"
    with pytest.raises(MismatchError, match=text):
        run_threads(ends_early, 4, args=(how,))
