"""What a process learns from its launcher's environment, and that it refuses to be one of many worlds of one."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest

from mpi_harness.launch import clean_environment
from spmd_engine.errors import UsageError
from spmd_engine.runtime.launchers import (
    RANK_VARIABLES,
    SIZE_VARIABLES,
    check_started_by_launcher,
    is_launched,
    launcher_rank,
    launcher_size,
)
from spmd_engine.runtime.mpi_job import find_mpiexec, is_open_mpi

BY = {
    "nobody": ({}, (False, 0, 1)),
    "MPICH's mpiexec": ({"PMI_RANK": "2", "PMI_SIZE": "4"}, (True, 2, 4)),
    "Open MPI's mpiexec": ({"PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, (True, 1, 3)),
    "no number": ({"PMI_RANK": "\N{SUPERSCRIPT TWO}"}, (True, 0, 1)),
    "MVAPICH2's": ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, (True, 0, 2)),
    "srun --mpi=pmix": ({"PMIX_RANK": "5", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, (True, 5, 8)),
    "srun --mpi=none": ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}, (False, 3, 4)),
    "a batch script of Slurm's": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (False, 0, 1)),
    "mpiexec, on nodes by srun": (  # whose daemons, a task a node, hand on what srun told them
        {"PMI_RANK": "6", "PMI_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        (True, 6, 8),
    ),
}


@pytest.mark.parametrize("told, expected", BY.values(), ids=BY)
def test_launcher_is_recognized(monkeypatch, told, expected):
    for name in {*RANK_VARIABLES, *SIZE_VARIABLES, *(name for name in os.environ if name.startswith("SLURM_"))}:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert (is_launched(), launcher_rank(), launcher_size()) == expected


@pytest.mark.parametrize(
    "told, refused",
    [
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, True),  # a batch script
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "PMI_RANK": "0", "PMI_SIZE": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, False),  # srun -n 1
    ],
)
def test_training_by_one_process_of_an_allocation_is_refused(monkeypatch, told, refused):
    for name in {*RANK_VARIABLES, *(name for name in os.environ if name.startswith("SLURM_"))}:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="Slurm has allocated 4 tasks.*mpiexec -n 1") if refused else nullcontext():
        check_started_by_launcher()


def test_a_signal_ends_a_process_that_cannot_join_in_one_line():
    told = {"PMI_RANK": "0", "PMI_SIZE": "4", "PMIX_NAMESPACE": "x"}  # MPICH is not asked to join by PMIx
    if is_open_mpi((find_mpiexec() or ("",))[0]):
        pytest.skip("Open MPI's library asks PMIx, and ends the process itself")
    program = "from spmd_engine.runtime.ending import end_at_once; end_at_once('interrupted', 143)"
    environment = {**clean_environment(), "PYTHONPATH": os.getcwd(), **told}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert (ended.returncode, ended.stderr) == (143, "interrupted\n")
