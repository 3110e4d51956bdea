"""A rank that ends before it has joined MPI: the others tell of it, and the job ends."""

import resource

import pytest

from spmd_engine.errors import UsageError
from spmd_engine.runtime.join import check_limits
from spmd_engine.runtime.mpi_job import find_mpiexec

PROGRAM = """
import sys
from spmd_engine.runtime import join
from spmd_engine.comm.world import world
from spmd_engine.runtime.launchers import launcher_rank

join.NOTE_AFTER, join.MOST = 0.1, 0.6
if launcher_rank() == 2:
    join.MOST = 100.0  # it tells nothing, and may not end the job before those that do
if launcher_rank() != {missing}:
    world()
    print("joined")
"""


@pytest.mark.parametrize("missing", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_rank_that_never_joins_does_not_hang_the_others_in_silence(mpi_run, tmp_path, missing):
    (tmp_path / "program.py").write_text(PROGRAM.format(missing=missing))
    result = mpi_run(3, "program.py", cwd=tmp_path, timeout=60)
    assert result.returncode != 0 and "joined" not in result.stdout
    told = [line for line in result.stderr.splitlines() if "for all ranks to join MPI" in line]
    assert told or "--oversubscribe" in find_mpiexec()  # Open MPI's may find out by itself
    assert set(told) <= {
        f"rank {rank} has waited 0 s for all ranks to join MPI. At least one is missing or has ended: "
        "see its output. The job ends after 1 s"
        for rank in {0, 1} - {missing}
    }


@pytest.mark.parametrize(
    "limit, most, words",
    [
        (resource.RLIMIT_NOFILE, 32, r"open 32 files here \(ulimit -n\), too few .*: raise it to 40 at least"),
        (resource.RLIMIT_AS, 400 << 20, r"bytes of addresses here \(ulimit -v\), too few .*: raise it to 1073741824"),
    ],
)
def test_other_limits_are_named(monkeypatch, limit, most, words):
    endless = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (most if which == limit else endless, endless))
    with pytest.raises(UsageError, match=words):
        check_limits(ranks=2)


USUAL = """
from spmd_engine.comm.world import world
from mpi4py import MPI

assert MPI.Query_thread() == MPI.THREAD_MULTIPLE and world().size == 2
try:
    MPI.COMM_WORLD.Send(b"", dest=7)
except MPI.Exception:
    print("an exception\\n", end="", flush=True)  # at once: what two ranks print could be mixed
"""


def test_mpi_is_initialized_as_mpi4py_does_it(mpi_run, tmp_path):
    (tmp_path / "program.py").write_text(USUAL)
    result = mpi_run(2, "program.py", cwd=tmp_path, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, 2 * "an exception\n", "")


INTERRUPTED = """
from spmd_engine.runtime import join
from spmd_engine.runtime.ending import end_at_once


def interrupted(*_, **__):
    raise KeyboardInterrupt


thread, join.threading.Thread = join.threading.Thread, interrupted
try:
    join.join_mpi()
except KeyboardInterrupt:
    join.threading.Thread = thread
    end_at_once("interrupted", 130)
"""


def test_an_interrupted_join_ends_in_one_line(mpi_run, tmp_path):
    (tmp_path / "program.py").write_text(INTERRUPTED)
    result = mpi_run(2, "program.py", cwd=tmp_path, timeout=60)
    lines = [line for line in result.stderr.splitlines() if "interrupted" in line]
    assert result.returncode != 0 and lines == ["interrupted"] and "MPI_Comm" not in result.stderr
