"""The jobs for batch systems, with a batch system that only notes what it is asked for: a signal, a save, the queue."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpi_harness.launch import clean_environment
from spmd_engine.checkpoints import CheckpointFolder
from spmd_engine.runtime.mpi_job import find_mpiexec

pytestmark = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec")

SCRIPTS = Path(__file__).parents[2] / "scripts"
JOB = ["--run", "r", "--model", "two-layers", "--data", "data", "--steps", "100000", "--batch-size", "4"]
JOB += ["--eval-every", "0", "--eval-samples", "2"]
SLURM, PBS = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "17"}, {"ARGUMENTS": " ".join(JOB)}


@pytest.mark.parametrize(
    ("script", "told", "queued"),
    [
        pytest.param("slurm.sh", SLURM, "scontrol requeue 17", id="Slurm"),
        pytest.param("pbs.sh", PBS, "qsub -v ARGUMENTS=--run r", id="PBS", marks=pytest.mark.soak),
    ],
)
def test_a_job_that_gets_a_signal_saves_and_is_queued_again(tmp_path, script, told, queued):
    (tmp_path / "data").write_text("something to learn from, again and again\n" * 300)
    (tmp_path / "bin").mkdir()
    for name in ("scontrol", "qsub"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho "{name} $*" >> queue\n')
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**clean_environment(), "PATH": path, "PYTHONPATH": os.getcwd(), "VENV": str(Path(sys.prefix))}
    environment |= {"PBS_NODEFILE": str(tmp_path / "nodes")} | told
    command = [shutil.which("bash"), str(SCRIPTS / script), *(JOB if script == "slurm.sh" else ())]
    job = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "r" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and job.poll() is None:
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=100)
    assert job.returncode == 0 and "SIGTERM: saved after step" in errors, errors
    assert (tmp_path / "queue").read_text().startswith(queued)
    assert CheckpointFolder(tmp_path / "runs" / "r").newest() is not None
