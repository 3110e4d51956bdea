"""A model of 60M parameters whose training state exceeds the memory of two ranks: offloaded, recomputed, without limit.

    python benchmarks/bench_offload.py --machine machine.toml --folder /data     # with a file that `calibrate` wrote

Each rank has a control group with its memory limit (Linux, root, cgroup v1 or v2 with the memory and cpu controllers),
which counts its page cache too; the process itself, measured first, is part of the limit. ``plan`` chooses how to train
under the limit, with the recomputation of blocks in place of offloaded activations, and without limit. The plans run in
turn, and the median of a plan's steps counts. The losses of all plans must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

GROUPS = Path("/sys/fs/cgroup")
RANKS, BATCH, STEPS = 2, 8, 4
ROOM = 12 << 20  #: bytes per rank for what no plan counts: the heap's gaps, buffers of the MPI library


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--machine", required=True, help="machine file, as calibrate writes it")
    parser.add_argument("--folder", default=".", help="folder of offloaded arrays")
    parser.add_argument("--memory", default="480MB", help="memory of a rank, its process included")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # runs as one of the ranks: a case as JSON
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker))
        return 0
    from spmd_engine.runtime.environment import processor
    from spmd_engine.units import bytes_of

    limit = bytes_of(options.memory)
    tiny = {"composition": {}, "micro_batches": 1, "steps": 2, "size": {"layers": 1, "width": 16, "heads": 2}}
    process = max(rank["peak"] for rank in run(tiny, None))
    room = limit - process - ROOM
    print(f"a rank may hold {limit / 1e6:.0f} MB, of which its process is {process / 1e6:.0f} MB", flush=True)
    cases = {"without limit": planned(options, None, {}), "offloaded": planned(options, room, {})}
    cases["recomputed"] = planned(options, room, {"recompute": "block"}, "optimizer")
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    ranks: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for name, case in cases.items():
            ranks[name] = run(case, limit if name != "without limit" else None)
            seconds[name] += ranks[name][0]["seconds"]
    fastest = median(seconds["without limit"])
    for name, case in cases.items():
        took, peaks = median(seconds[name]), [rank["peak"] / 1e6 for rank in ranks[name]]
        print(f"{name}: {case['plan']}")
        print(
            f"  a step {took:.2f} s, {took / fastest:.2f} of that without limit; predicted {case['seconds']:.2f} s "
            f"({case['seconds'] / took - 1:+.0%}); peaks of ranks {', '.join(f'{peak:.0f} MB' for peak in peaks)}; "
            f"losses {', '.join(f'{loss:.6f}' for loss in ranks[name][0]['losses'])}"
        )
    print(f"processor: {processor()}")
    return 0


def model_of(layers: int = 12, width: int = 640, heads: int = 10) -> Any:
    """59.4M parameters: with gradients and two states, 950 MB in float32."""
    from spmd_engine.models import GPTSize, gpt

    return gpt(GPTSize(layers, width, heads, context=256, vocabulary=256))


def planned(options: argparse.Namespace, memory: int | None, fixed: dict[str, Any], offload: str | None = None) -> dict:
    """The plan as a case to run, with its predicted seconds."""
    from spmd_engine.engine.parallel_config import ParallelConfig
    from spmd_engine.planning import plan

    base = ParallelConfig(offload_dir=options.folder, offload=offload)
    result = plan(
        model_of(), ranks=RANKS, machine=options.machine, batch_size=BATCH, memory=memory, axes=["data"], fixed=fixed,
        base=base,
    )  # fmt: skip
    if result.plan is None or result.composition is None:
        raise SystemExit(f"nothing fits: {result.why_not}")
    return {
        "plan": str(result.plan.candidate),
        "seconds": result.plan.seconds if result.evaluation is None else result.evaluation.seconds,
        "composition": result.composition.as_json(),
        "micro_batches": result.micro_batches,
        "steps": STEPS,
    }


def run(case: dict[str, Any], limit: int | None) -> list[dict[str, Any]]:
    """What each rank reports of a case."""
    groups = [groups_of(rank, limit) for rank in range(RANKS)]
    case = case | {"groups": [list(map(str, of_rank)) for of_rank in groups]}
    command = ["mpiexec", "-n", str(RANKS), sys.executable, __file__, "--machine", "", "--worker", json.dumps(case)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    finally:
        peaks = [peak_of(of_rank[0]) for of_rank in groups]
        for group in [group for of_rank in groups for group in of_rank]:
            group.rmdir()
    if done.returncode:
        raise SystemExit(f"{case.get('plan')}: it ended with exit code {done.returncode}, at peaks of {peaks} bytes")
    reports = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda report: report["rank"])
    return [report | {"peak": peak} for report, peak in zip(reports, peaks, strict=True)]


def groups_of(rank: int, limit: int | None) -> list[Path]:
    """New control groups of a rank, the first of memory; other work of the machine has less of the cores."""
    old, name = (GROUPS / "memory").exists(), f"bench-offload-{os.getpid()}-{rank}"
    groups = [GROUPS / "memory" / name, GROUPS / "cpu" / name] if old else [GROUPS / name]
    for group in groups:
        group.mkdir()
    (groups[-1] / ("cpu.shares" if old else "cpu.weight")).write_text("100000" if old else "10000")
    if limit is not None:
        (groups[0] / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
    return groups


def peak_of(group: Path) -> int:
    old = group / "memory.max_usage_in_bytes"
    return int((old if old.exists() else group / "memory.peak").read_text())


def work(case: dict[str, Any]) -> None:
    """Train as one of the ranks, in its control group."""
    rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
    for group in case["groups"][rank]:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    import numpy as np

    from spmd_engine import Mesh
    from spmd_engine.engine import AdamW, LayeredEngine
    from spmd_engine.engine.batch import make_batch
    from spmd_engine.engine.parallel_config import ParallelConfig
    from spmd_engine.planning.machine.product_choice import choose_products
    from spmd_engine.training import Trainer

    report: dict[str, Any] = {"rank": rank, "seconds": [], "losses": []}
    with Mesh(data=RANKS) as mesh:
        choose_products(mesh.group())  # as the machine file and a job do
        composition = ParallelConfig.from_json(case["composition"])
        engine = LayeredEngine(model_of(**case.get("size", {})), mesh, **composition.how_on(mesh.axes))

        def batch(step: int):
            rows = np.random.default_rng(step).integers(0, 256, (BATCH, 257))
            samples = lambda at: (rows[at, :-1], rows[at, 1:])
            return make_batch(samples, BATCH, case["micro_batches"], engine, step=step)

        steps = list(Trainer(engine, AdamW(), batch, lambda step: 1e-3, grad_clip=1.0).run(case["steps"]))
        report |= {"seconds": [step.seconds for step in steps[1:]], "losses": [step.loss for step in steps]}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    sys.exit(main())
