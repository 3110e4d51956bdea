"""A small GPT, its batches, and training on virtual ranks, for the tests of engines."""

from dataclasses import replace

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.axes import checked_axes, count_ranks
from spmd_engine.comm.communicators.threads import solo
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.batch import make_batch
from spmd_engine.engine.state.assignment import WORK, ZeroConfig
from spmd_engine.models import GPTSize, gpt
from spmd_engine.sharding import Layout
from spmd_engine.sharding.groups import THRESHOLD
from spmd_engine.training import Trainer
from support import parts

SIZE = GPTSize(layers=2, width=12, heads=6, context=10, vocabulary=13)  # uneven on 4 ranks and on 8
BATCH, STEPS = 9, 2
MESHES = [
    {"data": 1},
    {"data": 2},
    {"data": 3},
    {"data": 8},
    {"model": 2},
    {"model": 3},
    {"model": 8},
    {"data": 2, "model": 2},
    {"model": 2, "data": 4},
    {"data": 2, "model": 4},
]


def mesh_id(axes):
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def drawn_shares(axes, rng, samples=True):
    """Shares along half of the axes that may have some, often 0; those of ``samples`` need large micro-batches."""
    shares = {}
    for axis, least in WORK.items():
        if axis in axes and (samples or not least) and rng.random() < 0.5:
            numbers = rng.choice([least, 1, 2, 5], axes[axis])
            numbers[rng.integers(axes[axis])] = 3  # one at least has a share
            shares[axis] = tuple(numbers.tolist())
    return shares


def mesh_of_one(axes=("data",)):
    """A mesh of this rank alone."""
    return Mesh(solo(), **dict.fromkeys(axes, 1))


def ranks_of(axes):
    return count_ranks(checked_axes(axes))


def tokens(step):
    rows = np.random.default_rng(step).integers(0, SIZE.vocabulary, (BATCH, SIZE.context + 1))
    return rows[:, :-1], rows[:, 1:]


def batch(engine, step, micro_batches=2):
    inputs, targets = tokens(step)
    return make_batch(lambda samples: (inputs[samples], targets[samples]), BATCH, micro_batches, engine, step=step)


def make_engine(
    mesh,
    *,
    dropout=0.0,
    tied=True,
    layers=SIZE.layers,
    sequence_parallel=False,
    zigzag=False,
    dtype=np.float64,
    group_threshold=THRESHOLD,
    zero=None,
    compress="none",
    model_options=(),
    shares=(),
    overlap=0,
    **options,
):
    size = GPTSize(**{**SIZE.__dict__, "tied": tied, "layers": layers})
    layout = Layout.for_mesh(mesh, sequence_parallel=sequence_parallel, zigzag=zigzag)
    layout = replace(layout, shares=dict(shares))
    storage = ZeroConfig(zero, threshold=group_threshold, compress=compress, overlap=overlap)
    model = gpt(size, dropout=dropout, **dict(model_options))
    return LayeredEngine(model, mesh, layout, dtype=dtype, seed=5, storage=storage, **options)


def train(axes, *, optimizer=AdamW, micro_batches=2, **options):
    """For each rank: losses and norms of a few clipped steps; its parts of the last gradients and parameters."""

    def program():
        with Mesh(**axes) as mesh:
            engine = make_engine(mesh, **options)
            trainer = Trainer(
                engine,
                optimizer(),
                lambda step: batch(engine, step, micro_batches),
                lambda step: 0.05,
                grad_clip=0.3,
            )
            reports = list(trainer.run(STEPS))
            numbers = [[report.loss, report.grad_norm] for report in reports]
            return numbers, parts.updated(engine, engine.gradients), parts.stored(engine)

    return run_threads(program, ranks_of(axes))


def assert_same_training(found, expected, tolerance=1e-10):
    """Assert that the results of ``train`` on all ranks equal those of one device."""
    for numbers, *_ in found:
        np.testing.assert_allclose(numbers, expected[0], rtol=tolerance)
    for kind in (1, 2):
        parts.assert_parts([rank[kind] for rank in found], expected[kind], atol=tolerance)
