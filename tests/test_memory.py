"""What a rank holds under each stage of ZeRO: as much as ``show memory`` says, measured by the kernel."""

import numpy as np
import pytest

from spmd_engine import Mesh
from spmd_engine.cli.bench.steps import held_bytes
from spmd_engine.cli.show.bytes_per_rank import bytes_per_rank
from spmd_engine.engine import AdamW, LayeredEngine, Storage
from spmd_engine.engine.batch import batch_of
from spmd_engine.models import deep_mlp
from spmd_engine.sharding.place import all_places
from spmd_engine.training import Trainer

WIDTH, LAYERS, SAMPLES = 1024, 16, 8  # parameters by the megabyte, and hardly any activations


@pytest.mark.mpi(ranks=4, timeout_s=180)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_of_a_rank(zero):
    """Parameters, gradients and optimizer state, in parts or not, and the largest gathered groups: within 5%.

    By PSS, which counts a page that several ranks share by their parts; freed memory is kept, so that it is a peak.
    """
    storage = Storage(zero)
    x = np.random.default_rng(0).standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    np.matmul(x, np.ones((WIDTH, WIDTH), np.float32))  # what BLAS allocates for itself
    with Mesh() as mesh:
        model = deep_mlp(LAYERS, WIDTH)
        mesh.barrier()
        before = held_bytes()
        mesh.barrier()
        engine = LayeredEngine(model, mesh, storage=storage)
        batch = batch_of(x, x, engine)
        trainer = Trainer(engine, AdamW(), lambda step: batch, lambda step: 1e-3)
        for _ in range(3):
            trainer.step()
        mesh.barrier()
        held = mesh.all_gather(np.array([held_bytes() - before]))
        expected = bytes_per_rank(model, all_places(dict(mesh.axes)), storage, 4, 2)
    together = [sum(count for _, count in rank) for rank in expected]
    assert held.mean() == pytest.approx(np.mean(together), rel=0.05), (held.tolist(), together)
