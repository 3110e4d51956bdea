"""A rank that fails, ends early or is killed ends the whole job, and says so once."""

import subprocess
import sys

import pytest

from mpi_harness.launch import mpiexec

LIMIT = 200  # seconds of a job
pytestmark = pytest.mark.skipif(mpiexec() is None, reason="needs an MPI library and its mpiexec")

HEAD = """
import os, signal, sys, time
import numpy as np
from spmd_engine import Mesh, world

mesh = Mesh()
mesh.barrier()
"""


@pytest.fixture
def job(mpi_run, tmp_path):
    """Run a program on 3 ranks. A rank that waits gives up after 1800 s: a job that ends before its limit, which is
    long for a busy machine, ends because a rank failed."""

    def run(text, ranks=3):
        script = tmp_path / "program.py"
        script.write_text(HEAD + text)
        return mpi_run(ranks, script, timeout=LIMIT, cwd=tmp_path)

    return run


def in_time(cases, now):
    """Parameters: each starts ranks of its own, so those that end much as others do are in ``soak``."""
    given = {name: case if isinstance(case, tuple) else (case,) for name, case in cases.items()}
    later = {name: [] if name in now else [pytest.mark.soak] for name in cases}
    return [pytest.param(*case, id=name, marks=later[name]) for name, case in given.items()]


def tracebacks(text):
    return text.count("Traceback (most recent call last)")


WAITS = {
    "in-a-collective": (3, "mesh.all_gather(np.ones(3))"),
    "in-a-large-collective": (3, "mesh.all_reduce(np.ones(1_000_000))"),
    "in-a-group": (4, "Mesh(data=2, model=2).all_reduce(np.ones(3), over='model')"),
    "for-a-message": (3, "mesh.receive(1)"),
    "to-send": (3, "mesh.send(1, np.ones(1_000_000))"),
    "to-make-a-mesh": (3, "Mesh()"),
}


@pytest.mark.parametrize("ranks, wait", in_time(WAITS, {"in-a-group"}))
def test_a_rank_that_raises_while_others_wait(ranks, wait, job):
    ended = job(
        f"""
if world().rank == 1:
    time.sleep(0.2)
    raise ValueError("of one rank")
{wait}
""",
        ranks,
    )
    assert ended.returncode != 0
    assert tracebacks(ended.stderr) == 1, ended.stderr
    assert f"rank 1 of {ranks} failed and ends the job" in ended.stderr
    assert 'raise ValueError("of one rank")' in ended.stderr


ALIKE = {
    "on-all": (3, 'mesh.barrier(); raise ValueError("of every rank")', 0, "of every rank"),
    "on-some": (3, "mesh.barrier(); 1 / (mesh.rank < 1); mesh.barrier()", 1, "ZeroDivisionError"),
    "mismatch": (3, "mesh.all_reduce(np.ones(3 + (mesh.rank == 1)))", 0, "rank 1 called all_reduce(sum, float64[4])"),
    "mismatch-in-a-group": (
        4,
        "m = Mesh(data=2, model=2); m.all_reduce(np.ones(3 + (m.rank == 3)), over='model'); m.barrier()",
        2,
        "rank 1 called all_reduce(sum, float64[4])",
    ),
}


@pytest.mark.parametrize("ranks, text, speaker, message", in_time(ALIKE, {"on-some"}))
def test_the_same_error_on_several_ranks_is_told_once(ranks, text, speaker, message, job):
    ended = job(text, ranks)
    assert ended.returncode != 0
    assert tracebacks(ended.stderr) == 1, ended.stderr
    assert f"rank {speaker} of {ranks} failed and ends the job" in ended.stderr
    assert message in ended.stderr
    assert "spmd_engine doctor' examines" not in ended.stderr  # the program is wrong, not a node


ENDS = {"well": "sys.exit(0)", "badly": "sys.exit(3)"}
KILLS = {"itself": "os._exit(1)", "by the system": "os.kill(os.getpid(), signal.SIGKILL)"}


@pytest.mark.parametrize("end", in_time(ENDS, {"well"}))
def test_a_rank_that_ends_early(end, job):
    ended = job(f"""
if mesh.rank == 1:
    {end}
mesh.all_gather(np.ones(3))
""")
    assert ended.returncode != 0
    assert tracebacks(ended.stderr) == 1, ended.stderr
    assert "ranks 0, 2 called all_gather" in ended.stderr
    assert "rank 1 called nothing more: its program ended" in ended.stderr


@pytest.mark.soak
def test_an_early_end_of_rank_0_shows_where_another_rank_waits(job):
    ended = job(
        """
if mesh.rank == 0:
    sys.exit(0)
mesh.all_gather(np.ones(3))
""",
        2,
    )
    assert ended.returncode != 0 and tracebacks(ended.stderr) == 1
    assert "rank 1 of 2 failed" in ended.stderr and "mesh.all_gather(np.ones(3))" in ended.stderr


@pytest.mark.parametrize("end", in_time(KILLS, {"by the system"}))
def test_a_rank_that_is_killed(end, job):
    ended = job(
        f"""
if mesh.rank == 1:
    {end}
mesh.all_gather(np.ones(3))
""",
        ranks=2,
    )
    assert ended.returncode != 0


@pytest.mark.soak
def test_a_program_that_ends_well(job):
    ended = job("mesh.all_reduce(np.ones(1_000_000))")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_one_rank_needs_nobody(job):
    ended = job("print(float(mesh.all_reduce(np.ones(1))[0]), file=sys.stderr)", ranks=1)
    assert (ended.returncode, ended.stderr) == (0, "1.0\n")


EARLY_END = """
import numpy as np
from spmd_engine import Mesh
mesh = Mesh(rows=2, columns=2)
mesh.barrier(over="columns")
if mesh.rank == 2:
    mesh.all_reduce(np.ones(3), over="columns")
"""


def test_an_end_while_another_waits_in_a_smaller_group_ends_the_job(mpi_run, tmp_path):
    (tmp_path / "early.py").write_text(EARLY_END)
    result = mpi_run(4, tmp_path / "early.py", timeout=LIMIT)
    assert result.returncode != 0
    assert result.stderr.count("Traceback") == 1
    assert "rank 2 of 4 failed" in result.stderr and "whose program has ended ([1])" in result.stderr


def test_a_rank_that_never_comes_out_of_the_end_of_mpi_is_ended(job):
    """Here one is stopped when both have met at the end; the other would wait for it in MPI_Finalize."""
    ended = job(
        """
ending, Group = sys.modules["spmd_engine.runtime.ending"], sys.modules["spmd_engine.comm.group"].Group
ending.FINALIZE = 3
if mesh.rank == 1:
    leave = Group.leave
    Group.leave = lambda *args: (leave(*args), os.kill(os.getpid(), signal.SIGSTOP))
""",
        ranks=2,
    )
    assert ended.returncode != 0


NODES = """
import os, random, sys, time
from mpi4py import MPI
MPI.Get_processor_name = lambda: f"host {MPI.COMM_WORLD.rank}"
import numpy as np
from spmd_engine import Mesh, world
from spmd_engine.comm import pending
"""
SLEEPS = (
    NODES
    + """
pending.MESSAGES_AFTER = 0.1  # seconds after which a rank asks those it waits for whether they have ended
with Mesh() as mesh:
    if mesh.rank == 1:
        time.sleep(0.4)
    mesh.all_reduce(np.ones(4))
"""
)
#: Rank 0 starts a sum and ends; rank 3 begins it when rank 2 has checked five times whether rank 0 has ended.
UNDER_WAY = (
    NODES
    + """
from pathlib import Path
from spmd_engine.comm.communicators.mpi import MPICommunicator
pending.MESSAGES_AFTER = pending.CHECK_AFTER = 0.01
mesh, checks, ended = Mesh(), [], MPICommunicator.ended
if mesh.rank == 2:
    count = lambda: checks.append(1) or len(checks) > 4 and Path("waited").touch()
    MPICommunicator.ended = lambda *args: count() or ended(*args)
if mesh.rank == 3:
    while not Path("waited").exists():
        time.sleep(0.01)
sum = mesh.start_all_reduce(np.ones(1))
if mesh.rank:
    assert sum.wait()[0] == 4
    assert mesh.rank != 2 or len(checks) >= 5
"""
)
SENDS_LAST = (
    NODES
    + """
mesh = Mesh()
others = [rank for rank in range(mesh.size) if rank != mesh.rank]
world().side_messages.send(bytes(1_000_000), others, 1)  # too large to be sent before it is received
"""
)
#: Ranks that ask late ones whether they have ended, watchdogs that report, ranks that reach the end at different times.
LATE = (
    NODES
    + """
seconds, chance = float(sys.argv[2]), random.Random(os.getpid())
with Mesh(timeout=2 * seconds - 1) as mesh:  # the watchdogs report after half of it
    for i in range(3):
        mesh.all_reduce(np.ones(4))
        if sys.argv[1] == "sleep" and mesh.rank == i + 1:
            time.sleep(seconds if i == 0 else 2.2)
        end = time.monotonic() + (sys.argv[1] == "compute") * chance.random() * seconds
        while time.monotonic() < end:
            np.ones(1000).sum()
    mesh.all_reduce(np.ones(4))
time.sleep(chance.random() * seconds)
"""
)


def test_questions_between_nodes_that_nobody_answers_do_not_spoil_the_end(mpi_run, tmp_path):
    (tmp_path / "program.py").write_text(SLEEPS)
    ended = mpi_run(2, tmp_path / "program.py", timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.soak
def test_a_rank_that_ends_while_a_call_of_it_is_under_way_has_not_ended_yet(mpi_run, tmp_path):
    (tmp_path / "program.py").write_text(UNDER_WAY)
    ended = mpi_run(4, tmp_path / "program.py", timeout=LIMIT, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")


FAIL = "from spmd_engine.comm.world import fail; fail('no'); sys.exit(2)"
ENDINGS = {"well": ("", 0, ""), "of a mistake": (FAIL, 2, "no\n")}


@pytest.mark.parametrize("end, code, said", in_time(ENDINGS, {"of a mistake"}))
def test_what_was_sent_beside_calls_is_received_before_mpi_ends(end, code, said, mpi_run, tmp_path):
    (tmp_path / "program.py").write_text(SENDS_LAST + end)
    ended = mpi_run(2, tmp_path / "program.py", timeout=LIMIT)
    assert (ended.returncode, ended.stderr) == (code, said)


@pytest.mark.soak
@pytest.mark.parametrize("launch", [False, True], ids=["mpiexec", "launch"])
@pytest.mark.parametrize("ranks, seconds, how", [(6, 4, "sleep"), (6, 4, "compute"), (16, 5, "sleep"), (64, 8, "ends")])
def test_ranks_on_many_nodes_that_come_late_end_well(ranks, seconds, how, launch, mpi_run, tmp_path):
    (tmp_path / "program.py").write_text(LATE)
    arguments = [tmp_path / "program.py", how, seconds]
    if launch:
        start = "import sys; from spmd_engine.runtime.supervisor import Supervisor; "
        start += "sys.exit(Supervisor(int(sys.argv[1]), sys.argv[2:], max_restarts=0).run())"
        command = [sys.executable, "-c", start, *map(str, (ranks, *arguments))]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    else:
        ended = mpi_run(ranks, *map(str, arguments), timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
