"""``show collective --mesh``: what moves data, as in docs/collectives.md."""

from spmd_engine.comm.connections import Tuning
from spmd_engine.observability.collective import transports_by_size, transports_on_mesh


def test_transports_on_a_mesh_by_axis():
    nodes = "hierarchical: within nodes, then between them"
    lines = transports_on_mesh("all_gather", {"data": 4, "model": 2}, nodes=2)
    assert lines == [
        "over data (4 ranks on 2 nodes):",
        f"  up to 2.00 KiB inline with the agreement; else {nodes}",
        "over model (2 ranks on 1 node):",
        "  up to 256.00 KiB inline with the agreement; else shared memory",
        "over data,model (8 ranks on 2 nodes):",
        f"  up to 512 B inline with the agreement; else {nodes}",
        "on GPUs: NCCL, if each rank has its own; else see --transport of train",
    ]


def test_thresholds_are_those_of_the_tuning():
    words = transports_by_size("broadcast", [0, 1, 2, 3], Tuning(with_agreement=1 << 10, at_once=1 << 12))
    assert words == [
        "up to 341 B inline with the agreement",
        "below 16.00 KiB messages in log2(n) rounds",
        "else messages",
    ]


def test_the_command_prints_them(here):
    code, output, _ = here("show", "collective", "all_reduce", "--mesh", "data=2", "--nodes", "2")
    assert code == 0 and output.startswith("over data (2 ranks on 2 nodes):\n")
