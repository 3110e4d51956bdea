"""How arrays on devices travel between ranks: by NCCL, directly by MPI, or staged through the host's memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from spmd_engine.arrays.backend import Backend, CudaBackend, get_backend
from spmd_engine.comm.agreement.rank_zero import gather_json
from spmd_engine.comm.group import Group
from spmd_engine.comm.mesh import Mesh
from spmd_engine.errors import UsageError

logger = logging.getLogger(__name__)

DEVICE_TRANSPORTS = ("auto", "nccl", "mpi", "staged")
TEXTS = {"nccl": "NCCL", "mpi": "MPI, which reads device memory", "staged": "copies in pinned host memory"}


class RankFacts(NamedTuple):
    """What a rank tells the others before they choose. ``lacks``: why it has no NCCL, as text; empty: it has."""

    wanted: str
    host: str
    device: str  # the address of its device on the host's bus; empty: none
    lacks: str
    aware: bool  # whether its MPI library reads device memory


def open_device(mesh: Mesh, device: str) -> Backend:
    """The backend of ``device`` for this rank of ``mesh``. Collective; raises UsageError as ``get_backend``.

    Unless ``choose_transport`` has been called, ranks also choose how arrays travel between devices.
    """
    backend, group = get_backend(device, *mesh.process_on_node), mesh.group()
    if isinstance(backend, CudaBackend) and not group.connections.transport_is_chosen:
        for notice in choose_transport(group, backend):
            logger.info(notice)
    return backend


def choose_transport(group: Group, backend: Backend, wanted: str = "auto") -> list[str]:
    """Let the device arrays of all ranks of ``group``, and of groups opened later among them, travel as ``wanted``.

    Ranks that are on one device divide its memory. ``backend``: of all ranks' arrays. Collective. Returns notices, of
    how they travel, or that none do. Raises UsageError on all ranks if they cannot travel so.
    """
    if group.size == 1 or not isinstance(backend, CudaBackend):
        why = "there is one rank" if group.size == 1 else "arrays are on the host (--device)"
        return [f"--transport {wanted} has no effect: {why}"] if wanted != "auto" else []
    comm = group.comm
    facts = RankFacts(wanted, comm.node, backend.address, backend.lacks_nccl, comm.is_device_aware)
    ranks = [RankFacts(*rank) for rank in gather_json(group, facts, "transport")]
    chosen, reason = choose(ranks)
    group.connections.set_transport(chosen == "mpi", backend if chosen == "nccl" else None)
    group.connections.transport_is_chosen = True
    comm.start_progress_thread()
    notices = [f"arrays on GPUs travel by {TEXTS[chosen]}{f', as {reason}' if reason else ''}"]
    if not comm.in_one_process:
        on_device = Counter((rank.host, rank.device) for rank in ranks)
        backend.share(on_device[facts.host, facts.device])
        if (most := max(on_device.values())) > 1:
            notices.append(
                f"{most} ranks share a GPU and its memory (--device-memory): start a rank for each GPU, or NVIDIA's MPS"
            )
    return notices


def choose(ranks: Sequence[RankFacts]) -> tuple[str, str]:
    """The transport of these ranks, and why it is none that moves more bytes a second, if it is so.

    Raises UsageError if it is not the one that they want.
    """
    wanted = ranks[0].wanted
    if {rank.wanted for rank in ranks} != {wanted}:
        raise UsageError(f"ranks want different transports: {', '.join(sorted({rank.wanted for rank in ranks}))}")
    no_nccl, no_mpi = _lack_of_nccl(ranks), "" if all(rank.aware for rank in ranks) else "this MPI is not CUDA-aware"
    if wanted == "nccl" and no_nccl:
        raise UsageError(f"--transport nccl: {no_nccl}")
    if wanted == "mpi" and no_mpi:
        raise UsageError(f"--transport mpi: {no_mpi}; SPMD_CUDA_AWARE=1 says that it is, --transport staged copies")
    if wanted != "auto":
        return wanted, ""
    if not no_nccl:
        return "nccl", ""
    return ("staged", f"{no_nccl}; {no_mpi}") if no_mpi else ("mpi", no_nccl)


def _lack_of_nccl(ranks: Sequence[RankFacts]) -> str:
    """Why NCCL cannot connect these ranks; empty: it can."""
    seen: dict[tuple[str, str], int] = {}
    for number, rank in enumerate(ranks):
        if rank.lacks:
            return f"rank {number}: {rank.lacks}"
        first = seen.setdefault((rank.host, rank.device), number)
        if first != number:
            return f"ranks {first} and {number} are on one GPU, {rank.device} of {rank.host}: NCCL needs one a rank"
    return ""
