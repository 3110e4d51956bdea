"""`doctor`: nothing is wrong here, and each fault is named with what to do about it."""

import json
import os
import shutil
import subprocess
import sys
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import pytest

from mpi_harness.launch import clean_environment
from spmd_engine import Mesh, run_threads, world
from spmd_engine.observability.facts import OPERATIONS, TIMED, _gpu_sum, facts_of_rank
from spmd_engine.observability.findings import ERROR, GOOD, WARNING, diagnose, slowest
from spmd_engine.runtime.mpi_job import find_mpiexec, is_open_mpi
from support.fake_cupy import watch
from support.pairwise import in_turn

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """Facts of four ranks with a core each, as those of this process."""
    facts = json.loads(json.dumps(facts_of_rank(tmp_path_factory.mktemp("doctor"))))
    assert not [name for name, value in facts.items() if str(value).startswith("error")]
    facts |= {"quota": 4.0, "threads": 1, "thread_variables": {}, "launcher_size": 4, "allocation": ("", 1, 1)}
    facts |= {"launcher": "MPICH's mpiexec", "mpiexec": ["/usr/bin/mpiexec"], "launcher_cores": [0, 1, 2, 3]}
    facts |= {"limits": {"files": 1024, "address space": -1, "locked memory": 65536}, "fabrics": []}
    facts["compiled_loops"] = {"loaded": True, "cached": True}
    facts["folder"] |= {"write": 0.02, "locks": True, "free": 1 << 40}
    facts["mpi"] = {"library": "MPICH Version: 5.0", "size": 4, "threads": "multiple"}
    facts["shared_memory"] = {"bytes": 8 << 30, "free": 8 << 30}
    facts["memory"] = {"limit": 16 << 30, "installed": 16 << 30}
    ranks = [deepcopy(facts) | {"cores": [0, 1, 2, 3]} for _ in range(4)]
    links = {f"{a} {b}": (1e-5, 1e10) for a in range(4) for b in range(a + 1, 4)}
    together = {"nodes": ["a"] * 4, "links": links}
    seconds = {f"{operation} {size}": 1e-4 for operation in OPERATIONS for size in TIMED}
    rank = {"clock": 1e9, "speed": (5e10, 5e10), "right": {"all_reduce float32 1": True}, "seconds": seconds}
    rank |= {"memory": True, "reads": True, "crowded": False, "sees_folder": True, "network": "", "gpu": {}}
    together["ranks"] = [deepcopy(rank) for _ in range(4)]
    return ranks, together


def broken(healthy, change):
    ranks, together = deepcopy(healthy)
    change(ranks, together)
    return diagnose(ranks, together)


def test_nothing_is_wrong_with_healthy_ranks(healthy):
    assert {finding.state for finding in diagnose(*healthy)} == {GOOD}
    alone = healthy[0][0] | {"launcher_size": 1, "launcher": ""}
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
    "one node of two": (
        lambda ranks, _: [facts.update(allocation=("Slurm", 8, 2)) for facts in ranks],
        (WARNING, "ranks", "4 on 1 node(s), but Slurm has allocated 8 tasks on 2 node(s)", "-n 8"),
    ),
    "thread level": (
        lambda ranks, _: ranks[0]["mpi"].update(threads="funneled"),
        (WARNING, "MPI library", "its thread level is funneled", "MPI_THREAD_MULTIPLE"),
    ),
    "no /dev/shm": (
        lambda ranks, _: ranks[0].update(shared_memory={"bytes": 1 << 20, "free": 1 << 20}),
        (ERROR, "shared memory", "1.00 MiB free for 4 rank(s)", "--shm-size"),
    ),
    "small /dev/shm on a node": (
        lambda ranks, _: (
            ranks[3]["environment"].update(host="other"),
            ranks[3].update(shared_memory={"bytes": 8 << 20, "free": 8 << 20}),
        ),
        (WARNING, "shared memory", "/dev/shm on other has 8.00 MiB free for 1 rank(s)", "--shm-size"),
    ),
    "read-only folder": (
        lambda ranks, _: ranks[2].update(folder="error: Read-only file system"),
        (ERROR, "run folder", "rank 2 cannot write there: Read-only file system", "--folder"),
    ),
    "slow disk": (
        lambda ranks, _: [facts["folder"].update(write=7.0) for facts in ranks],
        (WARNING, "run folder", "in 7.00 s on ", "less often"),
    ),
    "a disk slower than the others": (
        lambda ranks, _: [
            (facts["environment"].update(host=f"node{n}"), facts["folder"].update(write=0.2 if n == 1 else 0.02))
            for n, facts in enumerate(ranks)
        ],
        (WARNING, "run folder", "in 0.20 s on node1; the median of nodes is 0.02 s", "less often"),
    ),
    "a full disk": (
        lambda ranks, _: ranks[1]["folder"].update(free=1 << 20),
        (WARNING, "run folder", "1.00 MiB are free", "free space"),
    ),
    "no locks": (
        lambda ranks, _: ranks[1]["folder"].update(locks=False),
        (WARNING, "run folder", "cannot be locked", "with locks"),
    ),
    "a folder of each node": (
        lambda _, together: together["ranks"][3].update(sees_folder=False),
        (ERROR, "run folder", "what rank 0 writes there is not there on rank 3", "that all nodes share"),
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
        (ERROR, "cores", "ranks 0, 1 are bound to core 0; 4 are there", "-bind-to core"),
    ),
    "shared cores": (
        lambda ranks, _: [facts.update(cores=[1, 2] if n else [0]) for n, facts in enumerate(ranks)],
        (ERROR, "cores", "ranks 1, 2, 3 are bound to core 1, 2; 4 are there", "-bind-to core"),
    ),
    "more ranks than cores": (
        lambda ranks, _: [facts.update(cores=[0, 1], launcher_cores=[0, 1]) for facts in ranks],
        (WARNING, "cores", "4 ranks on 2 cores", "at most one rank a core"),
    ),
    "a quota of cores": (
        lambda ranks, _: [facts.update(quota=1.5) for facts in ranks],
        (WARNING, "cores", "4 ranks on 1.5 cores (a quota)", "at most one rank a core"),
    ),
    "a slow link": (
        lambda _, together: together["links"].update({"1 3": (1e-2, 1e8)}),
        (WARNING, "links within nodes", "rank 1 (a) to rank 3 (a): 10000 us, 0.1 GB/s; others: 10 us", "this link"),
    ),
    "a rank with slow links": (
        lambda _, together: together["links"].update({pair: (1e-5, 1e9) for pair in ("0 2", "1 2", "2 3")}),
        (WARNING, "links within nodes", "rank 0 (a) to rank 2 (a): 10 us, 1 GB/s", "the core of rank 2, which all"),
    ),
    "a node with slow links": (
        lambda _, together: together.update(
            nodes=["a", "b", "c", "d"],
            links={f"{a} {b}": (1e-5, 1e8 if b == 3 else 1e10) for a in range(4) for b in range(a + 1, 4)},
        ),
        (WARNING, "links between nodes", "(d): 10 us, 0.1 GB/s; others", "the network device of d, which all"),
    ),
    "a slow network": (
        lambda _, together: together.update(nodes=["a", "b"] * 2, links={"0 1": (1e-4, 1e7)}),
        (
            WARNING,
            "links between nodes",
            "100 us, 0.01 GB/s (quickest quarter of 1 pairs): slower than",
            "UCX_NET_DEVICES",
        ),
    ),
    "TCP instead of the fabric": (
        lambda ranks, together: (
            [facts.update(fabrics=["mlx5_0"]) or facts["limits"].update({"locked memory": -1}) for facts in ranks],
            together.update(nodes=["a", "b"] * 2),
            together["ranks"][0].update(network="eth0"),
        ),
        (WARNING, "transport", "TCP over eth0, although there is a fabric: mlx5_0", "MPI module"),
    ),
    "a slow core": (
        lambda _, together: together["ranks"][2].update(speed=(1e10, 1e10)),
        (WARNING, "speed", "rank 2 on", "the clock of cores 0, 1, 2, 3 is lower"),
    ),
    "another program": (
        lambda _, together: together["ranks"][2].update(speed=(1e10, 5e10)),
        (WARNING, "speed", "rank 2 on", "end the other program on cores 0, 1, 2, 3"),
    ),
    "two kinds of processors": (
        lambda ranks, _: ranks[3].update(simd=["of another kind"]),
        (WARNING, "processor", "on rank 3", "--check-replicas-every 0"),
    ),
    "clocks": (
        lambda _, together: together["ranks"][1].update(clock=1e9 - 60),
        (WARNING, "clocks", "rank 1 (a) differs by -60 s", "NTP"),
    ),
    "a memory quota": (
        lambda ranks, _: [facts["memory"].update(limit=4 << 30) for facts in ranks],
        (WARNING, "memory", "may use 4.00 GiB for all its ranks", "plan --memory 1.00 GiB"),
    ),
    "no numba on a rank": (
        lambda ranks, _: ranks[1]["extras"].remove("numba"),
        (ERROR, "numba", "absent on rank 1, present on the others", "on every node"),
    ),
    "numba cannot be used on a rank": (
        lambda ranks, _: ranks[1].update(compiled_loops={"loaded": False, "cached": True}),
        (ERROR, "compiled loops", "rank 1 cannot use them", "the same numba"),
    ),
    "no compiled loops": (
        lambda ranks, _: [facts.update(compiled_loops={"loaded": False, "cached": True}) for facts in ranks],
        (WARNING, "compiled loops", "switched off", "unset SPMD_FAST"),
    ),
    "no cache": (
        lambda ranks, _: ranks[0].update(compiled_loops={"loaded": True, "cached": False}),
        (WARNING, "compiled loops", "rank 0 cannot write them to a cache", "NUMBA_CACHE_DIR"),
    ),
    "no memory of others": (
        lambda _, together: together["ranks"][1].update(memory=False, reads=False),
        (WARNING, "transport", "cannot map each other's memory", "in one container"),
    ),
    "no reads of others": (
        lambda _, together: together["ranks"][1].update(reads=False),
        (WARNING, "transport", "copied once more", "SYS_PTRACE"),
    ),
    "a wrong result": (
        lambda _, together: together["ranks"][1]["right"].update({"all_reduce float32 1": False}),
        (ERROR, "collectives", "wrong results: all_reduce float32 1", "--json"),
    ),
    "few open files": (
        lambda ranks, _: ranks[1]["limits"].update(files=64),
        (WARNING, "files", "at most 64 open files a process, on rank 1", "ulimit -n"),
    ),
    "a small address space": (
        lambda ranks, _: ranks[1]["limits"].update({"address space": 1 << 30}),
        (WARNING, "address space", "at most 1073741824 bytes of memory a process, on rank 1", "ulimit -v"),
    ),
    "little locked memory": (
        lambda ranks, _: [facts.update(fabrics=["mlx5_0"]) for facts in ranks],
        (WARNING, "locked memory", "at most 65536 locked bytes", "ulimit -l"),
    ),
    "a rank without GPU": (
        lambda ranks, _: [facts.update(gpus=[] if n == 2 else ["H100"]) for n, facts in enumerate(ranks)],
        (ERROR, "GPUs", "1 on rank 0: H100; none that CuPy can use on rank 2", "CUDA_VISIBLE_DEVICES"),
    ),
    "a wrong sum of GPUs": (
        lambda ranks, together: (
            [facts.update(gpus=["H100"]) for facts in ranks],
            [rank.update(gpu={"right": False, "seconds": 1e-3, "path": ""}) for rank in together["ranks"]],
        ),
        (ERROR, "GPUs", "a sum of their arrays is wrong", "--transport staged"),
    ),
    "what cannot be examined": (
        lambda ranks, _: ranks[2].update(blas="error: no such file"),
        (WARNING, "blas", "could not be examined on rank 2: no such file", "by hand"),
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
        together["ranks"][0]["crowded"] = True

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


ALLOCATIONS = {
    "Slurm": {"SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"},
    "PBS": {"PBS_NODEFILE": "nodes"},
    "LSF": {"LSB_DJOB_NUMPROC": "8"},
}


@pytest.mark.parametrize("system", ALLOCATIONS)
def test_plain_python_in_an_allocation(here, tmp_path, monkeypatch, system):
    (tmp_path / "nodes").write_text("a\nb\n" * 4)
    for name, value in ALLOCATIONS[system].items():
        monkeypatch.setenv(name, value)
    code, out, _ = here("doctor")
    assert code == 1 and f"plain python in an allocation of 8 tasks by {system}" in out and "-n 8 python" in out


LAUNCHERS = {
    "srun --mpi=none": {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
    "PMIx": {"PMI_RANK": "0", "PMI_SIZE": "4", "PMIX_NAMESPACE": "x"},  # MPICH would end the process
}


@in_turn(2, told=LAUNCHERS)
def test_the_launcher_of_another_mpi_library(tmp_path, told):
    if "PMIX_NAMESPACE" in told and is_open_mpi((find_mpiexec() or ("",))[0]):
        pytest.skip("Open MPI's library asks PMIx, and ends the process itself")
    environment = {**clean_environment(), "PYTHONPATH": os.getcwd(), **told}
    command = [sys.executable, "-m", "spmd_engine", "doctor"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=100)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "the launcher belongs to another MPI library\n" in ended.stdout and "start it with" in ended.stdout


#: Both ranks are bound to one core; rank 1 has no numba, and other files of the package.
BROKEN = """
import os, sys
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["PYTHONPATH"] = "other" if rank == 1 else os.environ["PYTHONPATH"]
code = "import sys; {}; from spmd_engine.cli import main; main(['doctor', '--json'])"
os.execv(sys.executable, [sys.executable, "-c", code.format("sys.modules['numba'] = None" if rank == 1 else "pass")])
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_with_faults(mpi_run, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    package = Path(facts_of_rank.__code__.co_filename).parents[1]
    shutil.copytree(package, tmp_path / "other" / "spmd_engine")
    (tmp_path / "other" / "spmd_engine" / "axes.py").open("a").write("# of another version\n")
    result = mpi_run(2, "broken.py", env=ONE_THREAD | {"SLURM_NTASKS": "4"}, cwd=tmp_path)
    found = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "2 on 1 node(s), but Slurm has allocated 4 tasks" in found["ranks"]["text"]
    assert "rank 1 of 2 run other files" in found["package"]["text"]
    assert "ranks 0, 1 are bound to core" in found["cores"]["text"]
    if find_spec("numba"):
        assert "absent on rank 1, present on the others" in found["numba"]["text"]


def test_ranks_that_stop_communicating(mpi_run, tmp_path):
    """Each rank still says what it knows of itself, in lines."""
    (tmp_path / "broken.py").write_text(
        """
from spmd_engine.cli import main
from spmd_engine.observability import facts
from spmd_engine.comm import world

def fails(*arguments):
    raise OSError(5, "a device fails")

if world().rank == 1:
    facts._sees = fails
main(["doctor"])
"""
    )
    result = mpi_run(2, "broken.py", env=ONE_THREAD, cwd=tmp_path)
    assert result.returncode == 2 and "rank 1 of 2: spmd_engine: doctor: a device fails" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_slowest_of_cores_links_and_disks(healthy):
    ranks, together = deepcopy(healthy)
    together["ranks"][2]["speed"] = (1e9, 5e10)
    together["links"]["1 3"] = (1e-5, 1e8)
    ranks[1]["environment"]["host"], ranks[1]["folder"]["write"] = "slow", 4.2
    cores, links, disks = (finding.text.split("; ") for finding in slowest(ranks, together))
    assert cores[0].startswith("rank 2 (") and cores[0].endswith(" 1") and cores[1].endswith(" 50")
    assert links[0] == "ranks 1, 3 0.1" and len(links) == 6
    assert disks[0] == "slow 1" and len(disks) == 2


def test_sums_of_devices(device):
    """GPUs that MPI reads, and GPUs whose arrays are copied through the host."""

    def program(aware):
        return _gpu_sum(Mesh(watch(world(), aware=aware)), device)

    for aware in (True, False):
        for found in run_threads(program, 2, args=[aware]):
            assert found["right"] and ("MPI, which reads" if aware else "pinned host memory, as") in found["path"]


def test_virtual_ranks(virtual):
    out = virtual(3, "doctor", "--json").out
    together = json.loads(out)["together"]
    assert len(together["ranks"][1]["right"]) == 50 and all(all(rank["right"].values()) for rank in together["ranks"])
    assert set(together["links"]) == {"0 1", "0 2", "1 2"} and len(together["ranks"]) == 3


@pytest.mark.soak  # with faults, ranks are examined in the same way
def test_doctor_finds_no_fault_of_sound_mpi_ranks(mpi_run, tmp_path):
    result = mpi_run(2, "-m", "spmd_engine", "doctor", "--json", env=ONE_THREAD, cwd=tmp_path)
    report = json.loads(result.stdout)
    assert result.returncode == 0, result.stdout
    assert all(all(rank["right"].values()) for rank in report["together"]["ranks"]) and len(report["ranks"]) == 2
    assert report["ranks"][1]["mpi"]["size"] == 2
