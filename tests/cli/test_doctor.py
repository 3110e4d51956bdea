"""`doctor`: nothing is wrong here, and each fault is named with what to do about it."""

import json
import os
from copy import deepcopy

import pytest

from spmd_engine.cli.doctor.facts import facts_of_rank
from spmd_engine.cli.doctor.findings import ERROR, GOOD, WARNING, diagnose

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """Facts of four ranks with a core each, as those of this process."""
    facts = json.loads(json.dumps(facts_of_rank(tmp_path_factory.mktemp("doctor"))))
    assert not [name for name, value in facts.items() if str(value).startswith("error")]
    facts |= {"quota": 4.0, "threads": 1, "thread_variables": {}, "launcher_size": 4, "allocation": 1}
    facts["mpi"] = {"library": "MPICH Version: 5.0", "size": 4, "threads": "multiple"}
    facts["shared_memory"] = {"bytes": 8 << 30, "free": 8 << 30}
    facts["memory"] = {"limit": 16 << 30, "installed": 16 << 30}
    ranks = [deepcopy(facts) | {"cores": [0, 1, 2, 3]} for _ in range(4)]
    links = {f"{a} {b}": (1e-5, 1e10) for a in range(4) for b in range(a + 1, 4)}
    together = {
        "nodes": ["a"] * 4,
        "speeds": [5e10] * 4,
        "collectives": {"all_reduce float32 1": True},
        "all_reduce": {"8": 1e-5, "1048576": 1e-3},
        "links": links,
        "shares_memory": True,
        "crowded": False,
    }
    return ranks, together


def broken(healthy, change):
    ranks, together = deepcopy(healthy)
    change(ranks, together)
    return diagnose(ranks, together)


def test_nothing_is_wrong_with_healthy_ranks(healthy):
    assert {finding.state for finding in diagnose(*healthy)} == {GOOD}
    alone = healthy[0][0] | {"launcher_size": 1}
    assert {finding.state for finding in diagnose([alone], {})} == {GOOD}


FAULTS = {
    "threads": (
        lambda ranks, _: [facts["thread_variables"].update(OMP_NUM_THREADS="64") for facts in ranks],
        (
            ERROR,
            "threads",
            "64 BLAS threads a rank, 4 rank(s) on 4 cores (OMP_NUM_THREADS=64)",
            "unset OMP_NUM_THREADS",
        ),
    ),
    "plain python under Slurm": (
        lambda ranks, _: ranks[0].update(launcher_size=1, allocation=8),
        (ERROR, "ranks", "plain python in a Slurm allocation of 8 tasks", "srun or mpiexec"),
    ),
    "rank 0 of 1 on every rank": (
        lambda ranks, _: ranks[0]["mpi"].update(size=1),
        (ERROR, "ranks", "the launcher started 4 processes, but MPI sees 1", "another MPI library"),
    ),
    "thread level": (
        lambda ranks, _: ranks[0]["mpi"].update(threads="funneled"),
        (WARNING, "MPI library", "its thread level is funneled", "MPI_THREAD_MULTIPLE"),
    ),
    "small /dev/shm": (
        lambda ranks, _: ranks[0].update(shared_memory={"bytes": 1 << 20, "free": 1 << 20}),
        (ERROR, "shared memory", "1.00 MiB free for 4 rank(s)", "--shm-size"),
    ),
    "read-only folder": (
        lambda ranks, _: ranks[2].update(folder="error: Read-only file system"),
        (ERROR, "run folder", "rank 2 cannot write there: Read-only file system", "--folder"),
    ),
    "slow disk": (
        lambda ranks, _: ranks[1]["folder"].update(write=7.0),
        (WARNING, "run folder", "in 7.00 s on rank 1", "less often"),
    ),
    "another version": (
        lambda ranks, _: ranks[3].update(package="other"),
        (ERROR, "package", "rank 3 of 4 run other files of spmd_engine", "the same version on every node"),
    ),
    "another numpy": (
        lambda ranks, _: ranks[3]["environment"].update(numpy="1.0"),
        (WARNING, "numpy", "1.0 on rank 3", "the same version"),
    ),
    "a shared core": (
        lambda ranks, _: [facts.update(cores=[n // 2]) for n, facts in enumerate(ranks)],
        (ERROR, "cores", "ranks 0, 1 are bound to core 0", "-bind-to core"),
    ),
    "more ranks than cores": (
        lambda ranks, _: [facts.update(cores=[0, 1]) for facts in ranks],
        (WARNING, "cores", "4 ranks on 2 cores", "at most one rank a core"),
    ),
    "a quota of cores": (
        lambda ranks, _: [facts.update(quota=1.5) for facts in ranks],
        (WARNING, "cores", "4 ranks on 1.5 by a quota cores", "at most one rank a core"),
    ),
    "a slow link": (
        lambda _, together: together["links"].update({"1 3": (1e-2, 1e8)}),
        (WARNING, "links within nodes", "rank 1 (a) to rank 3 (a): 10000 us and 0.10 GB/s", "the link"),
    ),
    "a rank with slow links": (
        lambda _, together: together["links"].update({pair: (1e-5, 1e9) for pair in ("0 2", "1 2", "2 3")}),
        (WARNING, "links within nodes", "rank 2 (a) to rank", "processor of rank 2"),
    ),
    "a slow core": (
        lambda _, together: together["speeds"].__setitem__(2, 1e10),
        (WARNING, "speed", "rank 2 on", "another program on cores [0, 1, 2, 3]"),
    ),
    "a memory quota": (
        lambda ranks, _: [facts["memory"].update(limit=4 << 30) for facts in ranks],
        (WARNING, "memory", "may use 4.00 GiB for all its ranks", "plan --memory 1.00 GiB"),
    ),
    "no numba on a rank": (
        lambda ranks, _: ranks[1]["extras"].remove("numba"),
        (ERROR, "numba", "absent on rank 1, present on the others", "on every node"),
    ),
    "no cache": (
        lambda ranks, _: ranks[0].update(compiled_loops=False),
        (WARNING, "compiled loops", "rank 0 cannot write them to a cache", "NUMBA_CACHE_DIR"),
    ),
    "no memory of others": (
        lambda _, together: together.update(shares_memory=False),
        (WARNING, "transport", "do not read each other's memory", "ptrace"),
    ),
    "a wrong result": (
        lambda _, together: together["collectives"].update({"all_reduce int64 1": False}),
        (ERROR, "collectives", "wrong results: all_reduce int64 1", "--json"),
    ),
    "few open files": (
        lambda ranks, _: ranks[0].update(files=64),
        (WARNING, "open files", "at most 64 a process", "ulimit -n"),
    ),
    "what cannot be examined": (
        lambda ranks, _: ranks[2].update(simd="error: no such file"),
        (WARNING, "simd", "could not be examined on rank 2: no such file", ""),
    ),
}


@pytest.mark.parametrize("change, expected", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_with_its_remedy(healthy, change, expected):
    found = [finding for finding in broken(healthy, change) if finding.state != GOOD]
    state, name, text, remedy = expected
    assert [(finding.state, finding.name) for finding in found] == [(state, name)]
    assert text in found[0].text and remedy in found[0].remedy


def test_links_of_ranks_that_take_turns_are_not_compared(healthy):
    def change(ranks, together):
        together["links"]["0 1"] = 1.0, 1e6
        together["crowded"] = True

    assert {finding.state for finding in broken(healthy, change)} == {GOOD}


def test_here(here, tmp_path):
    code, out, error = here("doctor")
    assert code == 0 and not error and "error" not in out
    assert "good     ranks" in out.replace("good    ranks", "good     ranks") and not os.listdir(tmp_path / "runs")
    code, out, _ = here("doctor", "--json")
    report = json.loads(out)
    assert (
        code == 0
        and report["ranks"][0]["environment"]["numpy"]
        and {f["state"] for f in report["findings"]} <= {GOOD, WARNING}
    )


def test_a_folder_that_cannot_be_written(here, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, _ = here("doctor", "--folder", "file/runs")
    assert code == 1 and "rank 0 cannot write there" in out


def test_virtual_ranks(virtual):
    out = virtual(3, "doctor", "--json").out
    together = json.loads(out)["together"]
    assert len(together["collectives"]) == 30 and all(together["collectives"].values())
    assert set(together["links"]) == {"0 1", "0 2", "1 2"} and len(together["speeds"]) == 3


def test_under_mpi(mpi_run, tmp_path):
    result = mpi_run(3, "-m", "spmd_engine", "doctor", "--json", env=ONE_THREAD, cwd=tmp_path)
    report = json.loads(result.stdout)
    assert result.returncode == 0, result.stdout
    assert all(report["together"]["collectives"].values()) and len(report["ranks"]) == 3
    assert report["ranks"][2]["mpi"]["size"] == 3
