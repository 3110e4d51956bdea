"""The worker of ``bench_start.py``: the phases of a rank until its first step is saved, and their CPU time."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from time import process_time

_BEGAN = process_time()  # when Python itself had started


def main() -> None:
    """Print, on rank 0, ``{phase: [CPU seconds of each rank]}``."""
    ends = [("Python", _BEGAN)]  # of each phase

    def over(phase: str) -> None:
        ends.append((phase, process_time()))

    from spmd_engine.importing import many_imports
    from spmd_engine.runtime.launchers import one_blas_thread

    with one_blas_thread():
        import mpi4py.MPI  # noqa: F401
        import numpy as np

    over("NumPy and MPI")
    with many_imports():
        import spmd_engine.cli.train  # noqa: F401
        from spmd_engine.checkpoints import save_checkpoint
        from spmd_engine.comm.agreement.rank_zero import text_from_rank_zero
        from spmd_engine.comm.mesh import Mesh
        from spmd_engine.training.train_config import TrainConfig
        from spmd_engine.training.workload import make_trainer, open_workload
    over("this package")
    with Mesh() as mesh, ExitStack() as stack:
        over("ranks meet")
        job = TrainConfig.of(steps=1, batch_size=mesh.size, **json.loads(sys.argv[1]))
        trainer = make_trainer(open_workload(job, mesh))
        over("model and data")
        for _ in trainer.run(1):
            pass
        over("first step")

        def folder() -> str:
            return stack.enter_context(tempfile.TemporaryDirectory())

        save_checkpoint(text_from_rank_zero(mesh.group(), folder), trainer.engine, trainer.optimizer, step=1)
        over("save")
        mine = np.diff([0.0, *(at for _, at in ends)])
        by_rank = mesh.all_gather(mine).reshape(mesh.size, -1)
        if mesh.rank == 0:
            phases = [phase for phase, _ in ends]
            print(json.dumps(dict(zip(phases, by_rank.T.tolist(), strict=True))))


if __name__ == "__main__":
    main()
