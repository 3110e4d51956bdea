"""--jobs: several processes share the serial tests, parallel to the MPI tests, and report like one process."""

import re
import signal
import time

import pytest

from mpi_harness.parent import Crew
from support.alive import is_alive

SHARED = """
@pytest.fixture
def one():
    return 1
"""
FIRST = """
@pytest.fixture(scope="module")
def mine():
    yield os.getpid()
    print("torn down")

def test_passes(mine):
    assert mine == os.getpid() != int(os.environ["PARENT"] or 0)

def test_fails(one):
    print("said before")
    assert one == 2, "two is too many"

def test_ends_its_process():
    os._exit(7)

def test_goes_on_in_another(mine):
    assert mine == os.getpid()

def test_warns():
    import warnings
    warnings.warn("of what may come", FutureWarning)

@pytest.mark.mpi(min_size=2, timeout_s=60)
def test_on_two_ranks():
    assert world.allreduce(1) == 2
"""
SECOND = """
def test_skipped(one):
    pytest.skip("not today")

def test_hangs_where_no_signal_helps():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    time.sleep(1000)
"""


def test_every_end_is_reported_in_order_and_once(run_parent, sample):
    sample(SHARED, "conftest.py")
    files = sample(FIRST, "test_first.py"), sample(SECOND, "test_second.py")
    run = run_parent("--with-mpi", "--jobs", "2", "-v", *files, SPMD_TEST_TIMEOUT="0.5", PARENT="")
    told = re.findall(r"::test_(\w+) ([A-Z]+)", run.stdout.partition("= FAILURES =")[0])
    assert told == [
        ("passes", "PASSED"),
        ("fails", "FAILED"),
        ("ends_its_process", "FAILED"),
        ("goes_on_in_another", "PASSED"),
        ("warns", "PASSED"),
        ("skipped", "SKIPPED"),
        ("hangs_where_no_signal_helps", "FAILED"),
        ("on_two_ranks", "PASSED"),
    ], run.stdout
    assert run.returncode == 1
    assert re.search(r"= 3 failed, 4 passed, 1 skipped, 1 warning in .* =+\n$", run.stdout), run.stdout
    assert "two is too many" in run.stdout and "said before" in run.stdout
    assert "the process of this test ended with exit code 7 during the call" in run.stdout
    assert "No end of the call within 5 s" in run.stdout and "in test_hangs_where" in run.stdout
    assert "FutureWarning: of what may come" in run.stdout


def test_two_processes_share_the_files(run_parent, sample, tmp_path):
    """Each process keeps one test running until the other has started its own. And what they cost can be written."""
    text = """
import os, time
def test_meets_the_other():
    folder = os.path.dirname(__file__)
    open(f"{folder}/{os.getpid()}", "w").close()
    deadline = time.monotonic() + 120
    while sum(name.isdigit() for name in os.listdir(folder)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""
    files = [sample(f'"""What {name} covers."""\n{text}', f"test_{name}.py", head="") for name in "ab"]
    run = run_parent("--with-mpi", "--jobs", "2", "-q", "--cost", tmp_path / "costs", *files)
    assert "2 passed" in run.stdout.splitlines()[-1], run.stdout
    table = (tmp_path / "costs").read_text()
    for name in "ab":
        assert re.search(rf" 1 \S*test_{name}.py +What {name} covers.\n", table), table
    assert not any(is_alive(path.name) for path in tmp_path.iterdir() if path.name.isdigit())


LONG = """
def stay():
    open(os.path.join(os.path.dirname(__file__), str(os.getpid())), "w").close()
    time.sleep(1000)

def test_serial():
    stay()

@two_ranks
def test_mpi():
    stay()
"""


@pytest.mark.soak
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_jobs(start_parent, sample, tmp_path, end):
    with start_parent("--with-mpi", "--jobs", "2", sample(LONG)) as parent:
        try:
            deadline = time.monotonic() + 120
            while len(pids := [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]) < 3:
                assert time.monotonic() < deadline and parent.poll() is None
                time.sleep(0.05)
            parent.send_signal(end)
            output, _ = parent.communicate(timeout=120)
        finally:
            parent.kill()
    assert parent.returncode == pytest.ExitCode.INTERRUPTED and "KeyboardInterrupt" in output
    assert not any(map(is_alive, pids))


@pytest.mark.soak
def test_after_the_first_failure_nothing_more_runs(run_parent, sample, tmp_path):
    """The test that the other process runs is abandoned."""
    failing = sample("def test_fails(): assert False", "test_a.py")
    run = run_parent("--with-mpi", "--jobs", "2", "-x", failing, sample(LONG, "test_b.py"))
    assert "stopping after 1 failures" in run.stdout and "1 failed" in run.stdout.splitlines()[-1]
    assert not any(is_alive(path.name) for path in tmp_path.iterdir() if path.name.isdigit())


def test_all_jobs_are_ended_even_if_one_cannot_be():
    class Stuck:
        def stop(self):
            ended.append(self)
            raise OSError("directory not empty")

    ended, crew = [], Crew(None, [], 2)
    crew.at_work = [Stuck(), Stuck(), Stuck()]
    with pytest.raises(OSError, match="not empty"):
        crew.stop()
    assert len(ended) == 3
