"""`run`: threads as ranks, for notebooks, debuggers and tests."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from spmd_engine import Mesh, run_threads, world
from spmd_engine.comm.shared_memory.cores import cores_here
from spmd_engine.errors import UsageError
from spmd_engine.runtime.launchers import RANK_VARIABLES, SIZE_VARIABLES, THREAD_VARIABLES
from support.pairwise import in_turn


def test_results_are_in_rank_order():
    def program():
        time.sleep(0.01 * (4 - world().rank))  # the last rank is the first to end
        return world().rank, world().size

    assert run_threads(program, 5) == [(r, 5) for r in range(5)]


def test_arguments():
    assert run_threads(lambda a, b: (a, b, world().rank), 2, args=["a", "b"]) == [("a", "b", 0), ("a", "b", 1)]


@pytest.mark.parametrize("ranks", [0, -1, "2"])
def test_at_least_one_rank(ranks):
    with pytest.raises(UsageError, match=f"ranks is {ranks!r}; (it must be from 1|give a whole number)"):
        run_threads(world, ranks)


def test_each_rank_has_a_node():
    assert run_threads(lambda: world().node, 3, nodes=["a", "b", "a"]) == ["a", "b", "a"]
    assert len(set(run_threads(lambda: world().node, 3))) == 1
    with pytest.raises(UsageError, match="names 2 hosts; one for each of 3 ranks"):
        run_threads(world, 3, nodes=["a", "b"])


def test_a_debugger_sees_which_rank_it_is_in():
    names = run_threads(lambda: threading.current_thread().name, 3)
    assert names == ["rank 0", "rank 1", "rank 2"]


def test_runs_may_be_nested():
    def program():
        outer = Mesh()
        inner = run_threads(lambda: (world().size, float(Mesh().all_reduce(np.ones(())))), 3)
        return inner, world().size, float(outer.all_reduce(np.ones(())))

    assert run_threads(program, 2) == [([(3, 3.0)] * 3, 2, 2.0)] * 2


# --- failures


def gather():
    Mesh().all_gather(np.ones(3))


def gather_much():
    Mesh().all_gather(np.ones(10_000))


def sum_over_an_axis():
    with Mesh(data=2, model=2) as mesh:
        mesh.all_reduce(np.ones(3), over="model")


def receive():
    Mesh().receive(1)


def make_a_mesh():
    Mesh()


@in_turn(
    3,
    wait=[gather, gather_much, sum_over_an_axis, receive, make_a_mesh],
    error=[ValueError, KeyboardInterrupt, SystemExit],
)
def test_one_rank_ends_all_that_wait(wait, error):
    def program():
        if world().rank != 1:
            return wait()
        if wait is not make_a_mesh:
            Mesh()
        time.sleep(0.05)
        raise error("of rank 1")

    with pytest.raises(error, match="of rank 1") as caught:
        run_threads(program, 4)
    assert caught.value.__notes__ == ["raised on rank 1 of 4"]
    assert caught.traceback[-1].name == "program"  # where it was raised, not where it was found
    assert ranks_that_run() == []


def ranks_that_run():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_the_first_error_is_the_one_raised():
    def program():
        while world().rank < 2 and world()._fabric.failure is None:
            time.sleep(0.001)
        raise ValueError(f"of rank {world().rank}")

    with pytest.raises(ValueError, match="of rank 2"):
        run_threads(program, 3)


def test_an_error_of_one_run_is_none_of_the_next():
    with pytest.raises(ZeroDivisionError):
        run_threads(lambda: 1 / world().rank, 2)
    assert run_threads(lambda: float(Mesh().all_reduce(np.ones(()))), 2) == [2.0, 2.0]


@pytest.mark.usefixtures("sigint_is_heard")
def test_an_interrupt_ends_ranks_that_wait():
    """Ctrl-C in a notebook, whose main thread waits for the ranks."""

    def program():
        mesh = Mesh()
        if mesh.rank == 0:
            time.sleep(0.1)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        mesh.receive(1 - mesh.rank)  # that never comes

    with pytest.raises(KeyboardInterrupt):
        run_threads(program, 2)
    while ranks_that_run():
        time.sleep(0.01)


# --- cores


def blas_threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.setattr("spmd_engine.comm.communicators.threads.cores_here", lambda: 8.0)
    assert blas_threads(), "NumPy's BLAS is not one that threadpoolctl knows"
    with threadpool_limits(3, user_api="blas"):
        assert run_threads(blas_threads, 8) == [{1}] * 8
        assert run_threads(blas_threads, 3) == [{2}] * 3
        assert run_threads(blas_threads, 99) == [{1}] * 99
        assert blas_threads() == {3}


def test_a_rank_has_no_more_threads_than_were_allowed_before(monkeypatch):
    """By the user's OMP_NUM_THREADS, or by the ranks among which this one runs others."""
    monkeypatch.setattr("spmd_engine.comm.communicators.threads.cores_here", lambda: 8.0)
    with threadpool_limits(2, user_api="blas"):
        assert run_threads(blas_threads, 1) == [{2}]
        assert run_threads(lambda: run_threads(blas_threads, 2), 5) == [[{1}] * 2] * 5


LOADS_NUMPY = """
import os
from spmd_engine.runtime.launchers import one_blas_thread
with one_blas_thread():
    import numpy
from threadpoolctl import threadpool_info, threadpool_limits
threads = lambda: [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
print(threads(), os.environ.get("OPENBLAS_NUM_THREADS"))
threadpool_limits(2, user_api="blas")
print(threads())
"""


@pytest.mark.parametrize("ranks, said, loaded", [(8, None, 1), (8, 2, 2), (1, None, None)])
def test_one_of_several_ranks_loads_numpy_with_one_thread_and_has_more_later(ranks, said, loaded):
    ours = {*RANK_VARIABLES, *SIZE_VARIABLES, *THREAD_VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in ours} | {"PMI_SIZE": str(ranks)}
    environment |= {"OPENBLAS_NUM_THREADS": str(said)} if said else {}
    command = [sys.executable, "-c", LOADS_NUMPY]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    first, then = done.stdout.splitlines()
    assert first == f"[{loaded or len(os.sched_getaffinity(0))}] {said}"
    assert then == "[2]"


@pytest.mark.mpi(ranks=2)
def test_mpi_ranks_share_the_cores():
    ranks = world().size
    if not any(name in os.environ for name in THREAD_VARIABLES):  # what the user says goes
        assert blas_threads() == {max(1, int(cores_here() // ranks))}
