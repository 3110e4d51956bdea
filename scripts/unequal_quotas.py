"""Ranks with unequal CPU quotas: their joint speed as a fraction of the sum of the ranks' speeds alone.

    python scripts/unequal_quotas.py 0.8:0.4 --batch-size 96
    python scripts/unequal_quotas.py 0.4:0.4:0.4:0.2

Each rank has its own control group with its quota (Linux, root, cgroup v1 or v2 with the cpu controller) and a higher
priority than other work of the machine. Each is timed alone with the samples of an even split. Then all train together:
with an even split, and with shares by each rank's computing part of a step, which ``train`` reports in its metrics
(``shares``) for all ranks at once; the median of the rounds so far counts. Rounds alternate; a machine with other work
needs several.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from spmd_engine.planning.search.placement import shares

GROUPS = Path("/sys/fs/cgroup")
PERIOD = 20_000  #: period of a quota, in microseconds
FIRST = 100_000  #: CPU weight (others have 1,024), so that other work does not change the measurement
MODEL, WARM, STEPS = "gpt-nano", 2, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("quotas", help="parts of a core, one per rank: 0.8:0.4")
    parser.add_argument("--batch-size", type=int, default=56)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # runs as one of the ranks: first rank and shares
    options = parser.parse_args()
    quotas = [float(text) for text in options.quotas.split(":")]
    if options.rank:
        first, split = options.rank.split(",")
        measure(quotas, int(first), split or None, options.batch_size)
        return 0
    if options.batch_size % len(quotas):
        parser.error(f"--batch-size {options.batch_size}: an even split needs a multiple of {len(quotas)}, the ranks")
    try:
        for number, quota in enumerate(quotas):
            group_of(number, quota)
    except OSError as error:
        print(f"unequal_quotas: no control group can be made: {error}", file=sys.stderr)
        return 2
    try:
        compare(quotas, options)
    finally:
        for number in range(len(quotas)):
            group_of(number).rmdir()
    return 0


def group_of(number: int, quota: float | None = None) -> Path:
    """The control group of a rank; created if ``quota`` is given."""
    old = (GROUPS / "cpu" / "cpu.shares").exists()
    group = (GROUPS / "cpu" if old else GROUPS) / f"unequal-quotas-{number}"
    if quota is not None:
        group.mkdir(exist_ok=True)
        if old:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD * quota)))
            (group / "cpu.shares").write_text(str(FIRST))
        else:
            (group / "cpu.max").write_text(f"{round(PERIOD * quota)} {PERIOD}")
            (group / "cpu.weight").write_text("10000")
    return group


def compare(quotas: Sequence[float], options: argparse.Namespace) -> None:
    """Run rounds: each rank alone, an even split, shares by speed."""
    batch, count = options.batch_size, len(quotas)
    fractions: dict[str, list[float]] = {"an even split": [], "shares by speed": []}
    parts_by_round: list[list[float]] = []
    for _ in range(options.rounds):
        alone = [start(options.quotas, 1, batch // count, first=number)[0] for number in range(count)]
        speeds = [batch // count / seconds for seconds in alone]
        even, computing = start(options.quotas, count, batch)
        parts_by_round.append(computing)
        split = "data=" + ":".join(
            map(str, shares([1 / median(parts) for parts in zip(*parts_by_round, strict=True)], batch))
        )
        print(f"alone {', '.join(f'{speed:.1f}' for speed in speeds)} samples/s; {split}", flush=True)
        suited, _ = start(options.quotas, count, batch, split=split)
        for label, seconds in (("an even split", even), ("shares by speed", suited)):
            fractions[label].append(batch / seconds / sum(speeds))
    for label, parts in fractions.items():
        percents = ", ".join(f"{part:.0%}" for part in parts)
        print(f"{label}: {median(parts):.0%} of the sum of speeds ({percents})")


def start(quotas: str, ranks: int, batch: int, *, first: int = 0, split: str = "") -> tuple[float, list[float]]:
    """Seconds of a step of these ranks, and each rank's computing part of it."""
    command = [sys.executable, __file__, quotas, "--batch-size", str(batch), "--rank", f"{first},{split}"]
    done = subprocess.run(["mpiexec", "-n", str(ranks), *command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"unequal_quotas: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(quotas: Sequence[float], first: int, split: str | None, batch_size: int) -> None:
    """Time steps on this rank under its quota; the first rank prints."""
    from mpi4py import MPI

    (group_of(first + MPI.COMM_WORLD.rank) / "cgroup.procs").write_text(str(os.getpid()))
    from threadpoolctl import threadpool_limits

    from spmd_engine import Mesh
    from spmd_engine.engine import AdamW
    from spmd_engine.engine.build import build_engine
    from spmd_engine.engine.model_config import ModelConfig
    from spmd_engine.engine.parallel_config import ParallelConfig
    from spmd_engine.planning.dry_run.analyze import synthetic_batch
    from spmd_engine.training import Trainer

    with threadpool_limits(1, "blas"), Mesh(data=MPI.COMM_WORLD.size) as mesh:
        engine = build_engine(ModelConfig(MODEL), mesh, ParallelConfig(shares=split))
        batch = synthetic_batch(engine.model, engine, batch_size, 1, None, engine.dtype, real=True)
        with_metrics = not split  # the computing parts of ranks, at the cost of one more collective
        trainer = Trainer(engine, AdamW(), lambda step: batch, lambda step: 1e-3, step_metrics=with_metrics)
        for _ in range(WARM):
            trainer.step()
        mesh.barrier()
        began = perf_counter()
        steps = [trainer.step().shares or [[1.0]] for _ in range(STEPS)]
        mesh.barrier()
        if mesh.rank == 0:
            computing = [median(part[0] for part in parts) for parts in zip(*steps, strict=True)]
            print(json.dumps([(perf_counter() - began) / STEPS, computing]))


if __name__ == "__main__":
    raise SystemExit(main())
