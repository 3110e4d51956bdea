"""Collectives of MPI ranks that believe to be on several nodes, by every transport between them."""

import re

import pytest

from mpi_harness.launch import mpiexec

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="needs an MPI library and its mpiexec")

HEAD = """
import sys
from mpi4py import MPI

rank, (per_node, *options) = MPI.COMM_WORLD.rank, sys.argv[1:]
MPI.Get_processor_name = lambda: f"host {rank // int(per_node)}"

import numpy as np
from spmd_engine import Mesh
from spmd_engine.comm.connections import Connections, Tuning

Connections.tuning = Tuning(**{key: int(value) for key, value in (each.split("=") for each in options)})
mesh = Mesh(timeout=60)
group, n = mesh.group(), mesh.size
"""

ALL = """
dtypes, sizes = ("f4", "f2", ">f4", "i8", "c8"), (0, 3, 1001, 50_003 if every else 20_011)
pairs = [(i, j) for i in range(5) for j in range(4) if every or i == 0 or j == 2 + i % 2]
for dtype, size in [(dtypes[i], sizes[j]) for i, j in pairs]:
    each = [((np.arange(size) + 3 * r) % 17 / 16).astype(dtype) for r in range(n)]
    total = sum(x.astype("c16" if dtype == "c8" else "f8" if dtype != "i8" else "i8") for x in each).astype(dtype)
    mine, parts = each[rank], np.array_split(total, n)
    out = np.empty_like(mine)
    assert (group.all_reduce(mine) == total).all() and group.all_reduce(mine, out=out) is out and (out == total).all()
    assert (group.reduce_scatter(mine) == parts[rank]).all()
    if dtype != "c8":
        assert (group.all_reduce(mine, "max") == np.max(each, axis=0, initial=0)).all()
    assert (group.all_gather(parts[rank]) == total).all()
    assert (group.all_gather(parts[rank], sizes=[len(part) for part in parts]) == total).all()
    assert (group.broadcast(mine if rank == 1 else None, 1) == each[1]).all()
    splits = [(size // n + rank + r) % 7 * (size > 3) for r in range(n)]
    came, received = group.all_to_all(np.full((sum(splits), 2), rank, dtype), splits=splits)
    assert (came[:, 0] == np.repeat(np.arange(n), [(size // n + rank + r) % 7 * (size > 3) for r in range(n)])).all()
    assert received == [(size // n + rank + r) % 7 * (size > 3) for r in range(n)]
    back, again = group.all_to_all(came, splits=received, received=splits, out=np.empty((sum(splits), 2), dtype))
    assert (back == rank).all() and again == splits
    square = np.full((n, 5, 2 * n), rank, dtype)
    assert group.all_to_all(square, 2, 0)[:, 0, 0].tolist() == np.repeat(np.arange(n), n).tolist()
    assert group.all_gather(square[:, :rank], 1)[0, :, 0].tolist() == np.repeat(np.arange(n), np.arange(n)).tolist()
under_way = [group.start_all_reduce(np.full(1000 * i + 1, float(i))) for i in range(12)]
under_way += [group.start_all_gather(np.full(700 * i, i)) for i in range(12)]
for i in np.random.default_rng(rank).permutation(24):
    assert (under_way[i].wait() == (i * n if i < 12 else i - 12)).all()
has_lanes = group.connections.lanes is not None
print("fine\\n" if has_lanes == (int(per_node) == 2) else "no lanes\\n", end="", flush=True)
"""

MANY_MESHES = """
made = []
for i in range(8):
    with Mesh(rows=2, columns=2) as other:
        for axis in ("rows", "columns"):
            assert (other.all_reduce(np.ones(20_000), over=axis) == 2).all()
        made.append({id(other.group(axis).comm) for axis in ("rows", "columns")})
print(f"{len(set.union(*made))} communicators\\n", end="", flush=True)
"""

WAYS = {
    "as it is": [],
    "rounds": ["at_once=1000000000", "with_agreement=0", "hierarchical=500"],
    "at once": ["at_once=0", "with_agreement=0", "hierarchical=500"],
    "pieces": ["piece=8192", "at_once=0", "with_agreement=0"],
}
FIRST = [("rounds", 2)]  # as it is, ranks of two nodes do without threads in MPI, below


CASES = [
    pytest.param(way, per_node, marks=() if (way, per_node) in FIRST else pytest.mark.soak)
    for way in WAYS
    for per_node in (1, 2, 3)
]


@pytest.mark.parametrize("way, per_node", CASES)
def test_every_collective_gives_its_value_by_every_transport(way, per_node, mpi_run, tmp_path):
    """Of all operations, by each transport; with many calls under way at once.

    And meshes of two ranks a node, made again and again, share their communicators.

    First, float32 of all sizes, and of the other dtypes a size each; in ``soak`` every dtype of every size, and
    more bytes.
    """
    program = HEAD + f"every = {(way, per_node) not in FIRST}\n" + ALL + (MANY_MESHES if per_node == 2 else "")
    (tmp_path / "program.py").write_text(program)
    ended = mpi_run(4, tmp_path / "program.py", str(per_node), *WAYS[way], timeout=120)
    told = ["2 communicators"] * 4 * (per_node == 2) + ["fine"] * 4
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, told), ended.stderr


ABSENT = """
from spmd_engine.errors import MismatchError
other = Mesh(rows=2, columns=2)
rows = other.group("rows")
other.barrier()
if rank != 3:
    try:
        (rows if rank == 1 else group).all_reduce(np.ones(10_000))
    except MismatchError as error:
        print(f"{error}\\n", end="", flush=True)
        raise SystemExit
"""


@pytest.mark.parametrize("per_node", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_an_absent_rank(per_node, mpi_run, tmp_path):
    """Rank 3 ends while another waits for it in a smaller group: the job ends, soon, and says why."""
    (tmp_path / "program.py").write_text(HEAD + ABSENT)
    ended = mpi_run(4, tmp_path / "program.py", str(per_node), timeout=200)
    assert ended.returncode != 0
    assert re.search(r"whose program has ended \(\[1\]\): .* over 'rows'", ended.stdout + ended.stderr)


THREADS = """
x = np.arange(70_000.0)
started = [mesh.start_all_reduce(x * i) for i in range(4)]
assert all((each.wait() == i * n * x).all() for i, each in enumerate(started))
assert mesh.comm.progress.on_begin is None
"""


def test_without_threads_in_mpi(mpi_run, tmp_path):
    """Then there is no progress thread; a notice says what that means."""
    level = "import mpi4py\n\nmpi4py.rc.thread_level = 'funneled'\n"
    (tmp_path / "program.py").write_text(level + HEAD + THREADS)
    ended = mpi_run(2, tmp_path / "program.py", "1", timeout=60)
    assert ended.returncode == 0 and ended.stderr.count("data between nodes move only while ranks wait") == 1
