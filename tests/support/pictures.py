"""Small image networks, their batches, and training on virtual ranks, for the tests of convolutions."""

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import SGD, LayeredEngine, schedules
from spmd_engine.engine.batch import batch_of
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.models import ImageShape, convnet, layout_for, resnet
from spmd_engine.training import Trainer
from support import parts

SHAPE = ImageShape(8, 7, 2, 5)
BATCH, MICRO_BATCHES, STEPS = 7, 2, 2


def small_convnet(**how):
    """Numbers of channels that do not divide by 2 to 8 ranks; some ranks have none."""
    return convnet(SHAPE, channels=(5, 4, 6, 3), **how)


def small_resnet(bottleneck=False, large=True, **how):
    return resnet(SHAPE, "resnet-test", blocks=(1, 2), width=3, bottleneck=bottleneck, large=large, **how)


def pictures(step, shape=SHAPE, batch=BATCH):
    rng = np.random.default_rng(step)
    x = rng.standard_normal((batch, shape.height, shape.width, shape.channels))
    return x, rng.integers(0, shape.classes, batch)


def train(model, axes, *, layout=None, schedule=None, zero=None, steps=STEPS, micro_batches=MICRO_BATCHES, **how):
    """For each rank: losses, with that of an evaluation; its gradients of the last step, parameters and buffers, each
    with its place."""

    def program():
        with Mesh(**axes) as mesh:
            chosen = layout or layout_for(model, mesh)
            if schedule:
                how["schedule"] = schedules.named(schedule)
            engine = LayeredEngine(model, mesh, chosen, dtype=np.float64, seed=5, storage=ZeroConfig(zero), **how)
            batches = lambda step: batch_of(*pictures(step), engine, micro_batches, step)
            trainer = Trainer(engine, SGD(momentum=0.9), batches, lambda step: 0.05, grad_clip=None)
            losses = [report.loss for report in trainer.run(steps)]
            return (
                [*losses, trainer.evaluate([batches(99)])],
                parts.updated(engine, engine.gradients),
                parts.stored(engine),
                {name: (engine.buffer_index(name), array.copy()) for name, array in engine.buffers.items()},
            )

    return run_threads(program, ranks=int(np.prod(list(axes.values()))))


def assert_same(found, expected):
    """The parts of all ranks, replicas included, equal those of one device, and nothing is missing."""
    for rank in found:
        np.testing.assert_allclose(rank[0], expected[0], rtol=1e-9)
    for kind, most in ((1, 1e-8), (2, 1e-9), (3, 1e-9)):
        parts.assert_parts([rank[kind] for rank in found], expected[kind], atol=most)
