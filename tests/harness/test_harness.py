"""The MPI harness itself: another pytest runs small test files, whose faults must be reported as failures."""

import re

import pytest

from support.alive import is_alive

SOME_ENDS = """
def test_serial():
    pass

@two_ranks
def test_passes():
    assert world.allreduce(1) == 2

@two_ranks
def test_fails_on_one_rank():
    assert world.rank == 0, "not what rank 1 wants"

@two_ranks
def test_skipped():
    pytest.skip("not today")
"""
CRASH_AT_EXIT = """
@two_ranks
def test_last():
    import atexit
    atexit.register(os._exit, 5)
"""
EVERY_WAY_TO_END = (
    SOME_ENDS
    + """
@two_ranks
def test_fails_while_others_wait():
    assert world.rank == 0
    world.Barrier()

@two_ranks
def test_killed():
    world.Barrier()  # once both are here, all is told of what came before
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.Barrier()

@pytest.mark.mpi(min_size=2, timeout_s=1)
def test_hangs():
    if world.rank == 1:
        time.sleep(1000)  # of two ranks that wait in MPI, each keeps a core busy
    world.recv(source=1)
"""
)


@pytest.mark.parametrize(
    "text, failing",
    [
        pytest.param(SOME_ENDS + CRASH_AT_EXIT, ["fails_on_one_rank"], id="some, and a crash after the last test"),
        pytest.param(
            EVERY_WAY_TO_END,
            ["fails_while_others_wait", "fails_on_one_rank", "killed", "hangs"],
            id="every",
            marks=pytest.mark.soak,  # a job for each end
        ),
    ],
)
def test_parent_reports_every_end_and_goes_on(run_parent, sample, text, failing):
    run = run_parent("--with-mpi", "-v", sample(text))
    told = dict(re.findall(r"::test_(\w+) ([A-Z]+)", run.stdout.partition("= FAILURES =")[0]))
    others = {"serial": "PASSED", "passes": "PASSED", "skipped": "SKIPPED"}
    crash = text.endswith(CRASH_AT_EXIT)
    others |= {"last": "ERROR"} if crash else {}  # passed, and then the job ended
    assert told == others | dict.fromkeys(failing, "FAILED"), run.stdout
    assert run.returncode == 1
    ends = f"{len(failing)} failed, {2 + crash} passed, 1 skipped" + ", 1 error" * crash
    assert re.search(rf"= {ends} in .* =+\n$", run.stdout), run.stdout
    assert run.stdout.count(f"{2 + crash} passed") == 1, "one summary, not one a rank"
    assert ("ended with exit code 5 after the teardown" in run.stdout) == crash
    assert "rank 1 of 2: AssertionError: not what rank 1 wants" in run.stdout
    if "hangs" in failing:
        assert "no outcome from ranks [0]" in run.stdout, "who waited for the rank that failed"
        assert "in test_hangs" in run.stdout, "where the ranks hang"
        assert "No end of the call within 1 s" in run.stdout, "and not only when the usual limit is over"


@pytest.mark.soak
def test_parent_reports_a_crash_before_rank_0_could_report_the_last_test(run_parent, sample):
    """Rank 1 exits while rank 0 still has to report the teardown that both have finished."""
    slow_rank_0 = """
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    if report.when == "teardown" and os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "0":
        time.sleep(5)
"""
    sample(slow_rank_0, name="conftest.py")
    run = run_parent("--with-mpi", "-q", sample(CRASH_AT_EXIT))
    assert "1 passed, 1 error" in run.stdout.splitlines()[-1]
    assert "ended with exit code 5 after the teardown" in run.stdout


def test_mpi_tests_are_skipped_without_the_option_and_without_pytest_mpi_which_defines_it(run_parent, sample):
    text = "def test_serial(): pass\n@two_ranks\ndef test_mpi(): pass"
    run = run_parent("-q", "-rs", "-p", "no:pytest_mpi", sample(text))
    assert "needs several ranks: python -m pytest --with-mpi" in run.stdout, run.stdout + run.stderr
    assert "1 passed, 1 skipped" in run.stdout.splitlines()[-1]


@pytest.mark.soak
def test_a_mark_selects_tests_of_other_processes(run_parent, sample):
    text = "@pytest.mark.soak\ndef test_long(): pass\n@pytest.mark.soak\n@two_ranks\ndef test_mpi(): pass"
    run = run_parent("--with-mpi", "--jobs", "2", "-q", "-m", "soak", sample(f"{text}\ndef test_short(): pass"))
    assert "2 passed, 1 deselected" in run.stdout.splitlines()[-1], run.stdout + run.stderr


def test_a_mistaken_mark_is_an_error(run_parent, sample):
    run = run_parent("--with-mpi", sample("@pytest.mark.mpi(min_ranks=2)\ndef test_mpi(): pass"))
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_mpi: mark mpi" in run.stderr and "min_ranks" in run.stderr


@pytest.mark.soak
def test_under_mpiexec_a_test_passes_if_it_passes_on_all_ranks(harness, sample, mpi_run):
    environment, command = harness
    text = """
def test_serial(): raise AssertionError("every rank would repeat this")

@two_ranks
def test_passes(): world.Barrier()

@two_ranks
def test_fails_on_last_rank(): assert world.rank < 2

@pytest.mark.mpi(min_size=4)
def test_more_ranks(): raise AssertionError("there are only three")
"""
    run = mpi_run(3, *command, "--with-mpi", sample(text), env=environment)
    assert run.returncode != 0
    assert run.stdout.count("1 failed, 1 passed, 2 deselected") == 1, run.stdout
    assert "rank 2 of 3: assert 2 < 2" in run.stdout


def test_under_mpiexec_a_failure_is_no_hang(harness, sample, mpi_run):
    environment, command = harness
    text = "@two_ranks\ndef test_fails(): assert world.rank != 1; world.Barrier()"
    run = mpi_run(2, *command, "--with-mpi", sample(text), env={**environment, "SPMD_TEST_TIMEOUT": "1000"})
    assert run.returncode != 0
    assert "call failed on rank 1 of 2: assert 1 != 1" in run.stderr


def test_mpi_run_ends_what_does_not_end(mpi_run, tmp_path):
    text = "import os, pathlib, time; pathlib.Path(str(os.getpid())).touch(); time.sleep(1000)"
    with pytest.raises(pytest.fail.Exception, match="no end after 3 s: 2 ranks"):
        mpi_run(2, "-c", text, timeout=3, cwd=tmp_path)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert len(ranks) == 2
    assert not any(map(is_alive, ranks))
