"""How many cores a process may use, by trees of control groups as the system shows them."""

import os
import sys
from math import inf
from subprocess import run

import pytest

from spmd_engine.comm.shared_memory import cores
from spmd_engine.comm.shared_memory.arena import memory_here
from spmd_engine.comm.shared_memory.cores import cores_here, cores_of, quota_here
from spmd_engine.runtime.launchers import RANK_VARIABLES, SIZE_VARIABLES, THREAD_VARIABLES

OLD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Where groups are to be made, for a process that may run on eight cores."""
    monkeypatch.setattr(cores, "OWN", tmp_path / "own")
    monkeypatch.setattr(cores, "GROUPS", str(tmp_path / "groups"))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8))
    return tmp_path / "groups"


def is_in(groups, line):
    (groups.parent / "own").write_text(f"4:memory:/elsewhere\n{line}\n0::/\n")


def limit(group, *values, names=("cpu.max",)):
    group.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, values, strict=True):
        (group / name).write_text(f"{value}\n")


def test_the_least_quota_of_a_group_and_of_those_around_it_counts(groups):
    is_in(groups, "0::/pod/container")
    limit(groups / "pod", "250000 100000")
    assert cores_here() == 2.5
    limit(groups / "pod" / "container", "30000 20000")
    assert quota_here() == (str(groups / "pod" / "container"), 1.5)
    limit(groups / "pod" / "container", "max 100000")
    assert quota_here() == (str(groups / "pod"), 2.5)
    limit(groups / "pod", "max 100000")
    assert cores_here() == 8


def test_version_1_has_a_tree_of_its_own_for_cores(groups):
    is_in(groups, "2:cpu,cpuacct:/job")
    limit(groups / "cpu" / "job", -1, 100000, names=OLD)
    assert cores_here() == 8
    limit(groups / "cpu" / "job", 40000, 100000, names=OLD)
    assert cores_here() == 0.4


def test_the_least_limit_of_memory_counts(groups):
    is_in(groups, "0::/job/step")
    limit(groups / "job", 1 << 20, names=("memory.max",))
    limit(groups / "job" / "step", "max", names=("memory.max",))
    assert memory_here.__wrapped__() == 1 << 20
    limit(groups / "memory" / "elsewhere", 1 << 19, names=("memory.limit_in_bytes",))
    assert memory_here.__wrapped__() == 1 << 19


def test_what_a_container_does_not_see_is_its_root(groups):
    """Of version 1, without a namespace of its own: the path is the host's, its own group the root."""
    is_in(groups, "2:cpu,cpuacct:/docker/0123")
    limit(groups / "cpu", 200000, 100000, names=OLD)
    assert cores_here() == 2


def test_no_quota_is_larger_than_the_cores_there_are(groups):
    is_in(groups, "0::/")
    limit(groups, "6400000 100000")
    assert cores_here() == 8


def test_without_control_groups_there_is_no_quota(groups):
    assert quota_here() == ("", inf)
    assert cores_here() == 8


@pytest.mark.parametrize(
    ("quotas", "cores"),
    [
        ([("", inf), ("", inf)], 3),
        ([("one", 2.5), ("one", 2.5)], 2),  # of both together
        ([("one", 1.0), ("other", 1.9)], 2),
        ([("one", 0.4), ("other", 0.4)], 0),
        ([("one", 1.0), ("", inf)], 3),
        ([("one", 9.0), ("other", 9.0)], 3),
    ],
)
def test_ranks_of_a_group_share_its_quota(quotas, cores):
    assert cores_of([([0, 1], quotas[0]), ([1, 2], quotas[1])]) == cores


THREADS = """
import os, sys
from pathlib import Path
from spmd_engine.comm.shared_memory import cores
os.sched_getaffinity = lambda process: range(8)
cores.OWN, cores.GROUPS = Path(sys.argv[1]), sys.argv[2]
from threadpoolctl import threadpool_info
from spmd_engine.comm.world import world
world()
print({pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"})
"""


def test_a_process_has_no_more_threads_than_its_quota(groups):
    is_in(groups, "0::/")
    limit(groups, "370000 100000")
    where = [str(groups.parent / "own"), str(groups)]
    ours = {*RANK_VARIABLES, *SIZE_VARIABLES, *THREAD_VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    done = run([sys.executable, "-c", THREADS, *where], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "{3}\n"
