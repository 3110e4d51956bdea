"""Jobs that cannot start say why in one line: no room, no size of files, processes that MPI does not join."""

import os
import shutil
import subprocess
import sys

import pytest

from mpi_harness.launch import clean_environment
from spmd_engine.runtime.mpi_job import find_mpiexec


def test_a_limit_of_file_sizes_is_named(tmp_path):
    """MPICH ends in a stack of internal errors. Bytecode is not written: Python would leave it cut short."""
    program = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); from spmd_engine.cli import main;"
    program += "main(['train', '--run', 'new'])"
    result = subprocess.run(
        [sys.executable, "-B", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    said = "spmd_engine: files may have 0 bytes here (ulimit -f), too few for MPI and for checkpoints: raise it to "
    assert (result.returncode, result.stderr) == (2, f"{said}{4 << 20} at least\n") and not list(tmp_path.iterdir())


def test_one_of_several_processes_that_mpi_does_not_join_is_refused(tmp_path):
    """As under ``srun --mpi=none``: four processes, each of which would train alone, into the same folder."""
    environment = {**clean_environment(), "PYTHONPATH": os.getcwd(), "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    command = [sys.executable, "-m", "spmd_engine", "train", "--model", "mlp", "--steps", "1", "--run", "r"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=100)
    assert ended.returncode == 2 and not (tmp_path / "runs").exists()
    assert ended.stderr.startswith("spmd_engine: started as one of 4 processes by srun, but MPI sees only this one")


@pytest.mark.soak
@pytest.mark.skipif(
    find_mpiexec() is None or os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, MPI"
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_job_without_room_ends_in_one_line(ranks, tmp_path):
    train = [*find_mpiexec(), "-n", str(ranks), sys.executable, "-m", "spmd_engine", "train", "--model", "mlp"]
    small = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", small, "sh", *train]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("spmd_engine: /dev/shm has 0.06 MiB free") and ended.stderr.count("\n") == 1
