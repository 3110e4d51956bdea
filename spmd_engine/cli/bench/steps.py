"""The worker of ``bench train`` and ``bench strategies``: times training steps as ``train`` makes them.

``argv[1]`` is a JSON object: ``options`` of ``train`` as on its command line, and the numbers of steps to ``warm`` up
and to ``time``. Rank 0 prints a JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from time import perf_counter

import numpy as np

from spmd_engine.arrays.fused import kernels_for
from spmd_engine.cli.train import job_of, train
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.training.workload import Workload, make_trainer, open_workload


def main() -> None:
    """Build, warm up, time."""
    config = json.loads(sys.argv[1])
    job = job_of(train.make_context("train", config["options"]))
    steps = config["time"]
    with Mesh(check=job.check, **(job.composition.mesh or {})) as mesh:
        mesh.barrier()
        before = held_bytes()
        workload = open_workload(job, mesh)
        trainer = make_trainer(workload)
        for _ in range(config["warm"]):
            trainer.step()
        mesh.ledger.clear()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds, tokens = [], 0
        for _ in range(steps):
            mesh.barrier()
            began = perf_counter()
            tokens = trainer.step().tokens
            mesh.barrier()
            seconds.append(perf_counter() - began)
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / steps
        total = mesh.ledger.total()
        facts = [total.sent, total.calls, total.seconds, faults, held_bytes() - before]
        by_rank = mesh.all_gather(np.array([facts], np.float64))
    if mesh.rank == 0:
        result = {
            "seconds": seconds,
            "tokens": tokens,
            "multiplications": tokens * multiplications(workload),
            "bytes_sent": by_rank[:, 0].sum() / steps,  # by all ranks, a step
            "calls": by_rank[:, 1].max() / steps,  # of one rank, a step
            "waiting": by_rank[:, 2].mean() / steps,  # seconds of a rank in collectives, a step
            "page_faults": by_rank[:, 3].max(),
            "memory": by_rank[:, 4].max(),  # bytes of one rank
            "compiled": kernels_for(next(iter(workload.engine.owned.values()))) is not None,
        }
        print(json.dumps(result))


def multiplications(workload: Workload) -> float:
    """Multiplications and additions of a training step for each token: three times those of a forward."""
    if not isinstance(workload.engine, LayeredEngine):
        return 0.0
    model = workload.engine.model
    return 3 * 2 * sum(layer.cost(model.context) for _, layer in model.layers)


def held_bytes() -> int:
    """This process's memory in bytes, without mapped files; a page that several ranks share counts by its part (PSS).

    Freed memory is kept, so this is a peak. The part of a mapped library depends on how many unrelated processes use it
    at the moment.
    """
    fields = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * sum(int(fields.get(name, 0)) for name in ("Pss_Anon:", "Pss_Shmem:"))


if __name__ == "__main__":
    main()
