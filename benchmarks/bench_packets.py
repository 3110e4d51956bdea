"""Packets and bytes of collectives between nodes, as the system counts them, and those of the MPI library's own calls.

    python benchmarks/bench_packets.py --ranks 12 --sizes 8,2048,65536 --only all_reduce

Each rank is a node. All are processes of this machine in a network namespace of their own: their messages travel by TCP
over its loopback device, in packets of at most 1,500 bytes, of which some only acknowledge others. Sizes are bytes of
whole arrays. It needs Linux, root, iproute2 (ip), util-linux (unshare, mount) and MPICH's mpiexec.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import click
import numpy as np

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
WORKER = "SPMD_BENCH_PACKETS"  # the variable by which a rank knows that it is one
# Without a mount of its own, /sys shows the devices of the machine; UCX ignores a device until it is up.
SETUP = """
mount -t sysfs sysfs /sys
ip link set lo up mtu 1500 gso_max_segs 1
ip link add wire type veth peer name end
ip address add 10.9.0.1/24 dev wire
ip link set wire up
ip link set end up
sleep 1.5
exec mpiexec "$@"
"""
PAUSE = 0.15  # seconds until the last acknowledgements are counted


@click.command()
@click.option("--ranks", default=4, show_default=True)
@click.option("--sizes", default="8,2048,65536,1048576", show_default=True)
@click.option("--only", default=",".join(OPERATIONS), show_default=True, help="Operations.")
def packets(ranks: int, sizes: str, only: str) -> None:
    """Count packets and bytes of a call, all ranks together: the engine's, the library's, and their ratios."""
    if WORKER in os.environ:
        return count(list(map(int, sizes.split(","))), only.split(","))
    options = ["--sizes", sizes, "--only", only]
    variables = {WORKER: "1", "MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "wire"}
    command = ["unshare", "--net", "--mount", "sh", "-c", SETUP, "sh", "-n", str(ranks), sys.executable, __file__]
    sys.exit(subprocess.run([*command, *options], env={**os.environ, **variables}).returncode)


def count(sizes: list[int], operations: list[str]) -> None:
    """What each rank does: print what calls of these sizes send."""
    from mpi4py import MPI

    world: Any = MPI.COMM_WORLD
    MPI.Get_processor_name = lambda: f"host {world.rank}"
    from spmd_engine import Mesh

    group, comm, n = Mesh(data=world.size).group(), world.Dup(), world.size

    def settle() -> tuple[int, int]:
        """Packets and bytes so far, when all ranks are here."""
        request = comm.Ibarrier()
        while not request.Test():
            sleep(0.001)
        sleep(PAUSE)
        (line,) = [x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:")]
        nbytes, number = map(int, line.split(":")[1].split()[:2])
        return number, nbytes

    def sent(call: Callable[[], Any], calls: int) -> np.ndarray:
        """Packets and bytes of a call, without those of ``settle``."""
        call()
        settle()
        first, second = np.array(settle()), np.array(settle())
        for _ in range(calls):
            call()
        return (np.array(settle()) - second - (second - first)) / calls

    def calls_of(operation: str, size: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        x = np.ones(max(1, size // 8 // n) * n)
        part, whole = np.empty(x.size // n), np.empty(x.size)
        return {
            "all_reduce": (lambda: group.all_reduce(x), lambda: comm.Iallreduce(x, whole).Wait()),
            "reduce_scatter": (lambda: group.reduce_scatter(x), lambda: comm.Ireduce_scatter_block(x, part).Wait()),
            "all_gather": (lambda: group.all_gather(part), lambda: comm.Iallgather(part, whole).Wait()),
            "broadcast": (lambda: group.broadcast(x if group.rank == 0 else None), lambda: comm.Ibcast(x).Wait()),
            "all_to_all": (lambda: group.all_to_all(x), lambda: comm.Ialltoall(x, whole).Wait()),
        }[operation]

    for operation in operations:
        for size in sizes:
            ours, library = (sent(call, 20 if size < 1 << 20 else 3) for call in calls_of(operation, size))
            figures = [f"{a:,.0f} {what} against {b:,.0f}" for a, b, what in zip(ours, library, ("packets", "bytes"))]
            ratios = " and ".join(f"{ratio:.2f}x" for ratio in ours / np.maximum(library, 1))
            if world.rank == 0:
                print(f"{n} nodes, {operation} of {size:,} bytes: {', '.join(figures)}: {ratios}", flush=True)


if __name__ == "__main__":
    packets()
