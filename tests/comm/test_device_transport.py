"""Which transport device arrays take: agreed by all ranks, or refused by all in one line."""

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads, world
from spmd_engine.arrays.backend import CPU
from spmd_engine.comm.connections import connections_of
from spmd_engine.comm.device_transport import RankFacts, choose, choose_transport
from spmd_engine.errors import UsageError
from support import fake_cupy, fake_nccl

OWN = [
    RankFacts("auto", "a", "0", "", False),
    RankFacts("auto", "a", "1", "", True),
    RankFacts("auto", "b", "0", "", True),
]
SHARED, AWARE = [OWN[0], OWN[0], OWN[2]], [rank._replace(aware=True) for rank in OWN]
LACKS = [OWN[0], OWN[1]._replace(lacks="CuPy finds no NCCL")]


@pytest.mark.parametrize(
    "wanted, ranks, chosen, reason",
    [
        ("auto", OWN, "nccl", ""),
        ("nccl", OWN, "nccl", ""),
        ("staged", OWN, "staged", ""),
        ("mpi", AWARE, "mpi", ""),
        ("auto", SHARED, "staged", "ranks 0 and 1 are on one GPU, 0 of a: NCCL needs one a rank; this MPI is not"),
        ("auto", LACKS, "staged", "rank 1: CuPy finds no NCCL"),
        ("auto", [AWARE[0], AWARE[0]], "mpi", "ranks 0 and 1 are on one GPU"),
    ],
)
def test_a_choice(wanted, ranks, chosen, reason):
    found, why = choose([rank._replace(wanted=wanted) for rank in ranks])
    assert found == chosen and why.startswith(reason) and bool(why) == bool(reason)


@pytest.mark.parametrize(
    "wanted, ranks, message",
    [
        ("nccl", SHARED, "--transport nccl: ranks 0 and 1 are on one GPU, 0 of a"),
        ("nccl", LACKS, "--transport nccl: rank 1: CuPy finds no NCCL"),
        ("mpi", OWN, "--transport mpi: this MPI is not CUDA-aware; SPMD_CUDA_AWARE=1 says that it is"),
    ],
)
def test_what_cannot_be_is_refused(wanted, ranks, message):
    with pytest.raises(UsageError, match=message) as error:
        choose([rank._replace(wanted=wanted) for rank in ranks])
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="ranks want different transports: auto, nccl"):
        choose([ranks[0]._replace(wanted="auto"), ranks[1]._replace(wanted="nccl")])


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_of_one_device_fall_back_with_a_notice(ranks, device):
    def program(wanted):
        with Mesh() as mesh, fake_nccl.installed():
            return choose_transport(mesh.group(), device, wanted)

    if ranks == 1:
        assert run_threads(program, 1, args=["auto"]) == [[]]
        assert run_threads(program, 1, args=["nccl"]) == [["--transport nccl has no effect: there is one rank"]]
        return
    (notice,), *others = run_threads(program, ranks, args=["auto"])
    assert notice.startswith("arrays on GPUs travel by MPI, which reads device memory, as ranks 0 and 1 are on one GPU")
    assert others == [[notice]] * 2
    with pytest.raises(UsageError, match="--transport nccl: ranks 0 and 1 are on one GPU, 0000:00:00.0 of "):
        run_threads(program, ranks, args=["nccl"])


@pytest.mark.parametrize("shared", [True, False])
def test_processes_on_one_device_divide_its_memory_by_its_address(shared, device, monkeypatch):
    """Each sees one device, the same one or, under Slurm, another."""
    device.share(3)
    monkeypatch.setattr(fake_cupy.Device, "pci_bus_id", property(lambda _: "0" if shared else str(world().rank)))

    def program():
        with Mesh() as mesh:
            mesh.comm.in_one_process = False
            return choose_transport(mesh.group(), device, "staged")[1:], fake_cupy.cupy.memory_limit

    (notices, limit), other = run_threads(program, 2)
    assert other == (notices, limit) and limit == (0.475 if shared else None)
    assert [notice.partition(" and ")[0] for notice in notices] == ["2 ranks share a GPU"] * shared


def test_the_choice_is_that_of_groups_opened_later_until_another_one(device, monkeypatch):
    monkeypatch.setattr(fake_cupy.Device, "pci_bus_id", property(lambda _: str(world().rank)))

    def program():
        with Mesh(data=2) as mesh:
            assert choose_transport(mesh.group(), CPU) == []
            for wanted, used in ("auto", True), ("staged", False), ("nccl", True):
                text = choose_transport(mesh.group(), device, wanted)
                assert ("NCCL" in text[0]) == used == (mesh.group().connections.nccl is not None)
                part = mesh.comm.subset([mesh.rank ^ 1, mesh.rank] if mesh.rank else [0, 1])
                assert (connections_of(part).nccl is not None) == used
                assert device.to_host(Mesh(part).all_reduce(device.asarray(np.ones(2)))).tolist() == [2, 2]
                part.free()

    with fake_nccl.installed() as communicators:
        run_threads(program, 2)
    assert len(communicators.created) == 4
