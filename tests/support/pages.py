"""The pages of strategies/ on the meshes they allow, and one rank's training to compare them with."""

from functools import cache, partial
from math import prod

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine.batch import make_batch
from spmd_engine.strategies import (
    STRATEGIES,
    AttentionHeads,
    ChannelSplit,
    ExpertParallel,
    Pipeline,
    SingleDevice,
    VerticalCNN,
)
from spmd_engine.strategies.layer_stack import LayerStack
from spmd_engine.strategies.one_attention import OneAttention
from spmd_engine.strategies.two_convolutions import IMAGE, TwoConvolutions
from spmd_engine.strategies.two_layers import TwoLayers
from spmd_engine.training import Trainer

D, F, B, S, HEADS, LAYERS = 6, 7, 9, 5, 3, 5  # uneven on nearly every mesh, and too few for some
SHAPES = {  # by the number of axes
    1: [(ranks,) for ranks in (1, 2, 3, 4, 6, 8)],
    2: [(1, 1), (1, 2), (3, 1), (2, 2), (2, 3), (4, 2)],
    3: [(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 2, 2), (3, 1, 2), (2, 2, 2)],
}


def meshes(strategy):
    """Sizes of the strategy's axes on 1, 2, 3, 4, 6 and 8 ranks."""
    names = strategy.axes or ("data",)
    return [dict(zip(names, shape, strict=True)) for shape in SHAPES[len(names)]]


def case_id(value):
    return ",".join(f"{axis}={size}" for axis, size in value.items()) if isinstance(value, dict) else value


def in_time(axes):
    """A mesh's marks: those of 2 and of 6 ranks, of 4 on one axis, and of 8 on fewer than three show little that others
    do not: ``soak``."""
    ranks = prod(axes.values())
    return [pytest.mark.soak] if ranks in (2, 6) or len(axes) < {4: 2, 8: 3}.get(ranks, 0) else []


CASES = [(name, axes) for name, strategy in STRATEGIES.items() for axes in meshes(strategy)]


def build(strategy, mesh, dtype=np.float64):
    if issubclass(strategy, LayerStack):
        engine = strategy(D, F, mesh, dtype, layers=LAYERS)
    else:
        engine = strategy(D, HEADS if issubclass(strategy, OneAttention) else F, mesh, dtype)
    engine.initialize(seed=3)
    return engine


def data(strategy, step, dtype=np.float64, samples=B):
    rng = np.random.default_rng(step)
    sizes = {"b": samples, "s": S, "d": D, "h": IMAGE[0], "w": IMAGE[1], "c": D}
    shape = tuple(sizes[letter] for letter in strategy.sample.split())
    return rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape).astype(dtype)


def single(strategy):
    """What computes the same on one rank: the strategy's model in its plainest form, and how samples go into that."""
    if issubclass(strategy, TwoLayers):
        return SingleDevice, lambda x: x.reshape(-1, D)  # to which a position is a sample
    plainest = {VerticalCNN: VerticalCNN, LayerStack: Pipeline, OneAttention: AttentionHeads}
    plainest |= {TwoConvolutions: ChannelSplit, ExpertParallel: ExpertParallel}
    return next(plain for kind, plain in plainest.items() if issubclass(strategy, kind)), lambda x: x


def one_rank(strategy):
    """A mesh of the axes that it asks for, on one rank."""
    return Mesh(**dict.fromkeys(strategy.axes or ("data",), 1))


def train(name, axes, optimizer, micro_batches, *, steps=2, dtype=np.float64, of=data, rate=0.05, alone=False):
    """Losses; on rank 0 the last gradients and the parameters, whole. ``alone``: of the single rank to compare with."""
    strategy = STRATEGIES[name]
    plain, samples_of = single(strategy) if alone else (strategy, lambda x: x)
    with one_rank(plain) if alone else Mesh(**axes) as mesh:
        engine = build(plain, mesh, dtype)

        def batch(step):
            inputs, targets = (samples_of(each) for each in of(strategy, step, dtype))
            load = lambda samples: (inputs[samples], targets[samples])
            return make_batch(load, len(inputs), micro_batches, engine, step=step, count=targets.size)

        trainer = Trainer(engine, optimizer(), batch, lambda step: rate, grad_clip=0.5)
        losses = [report.loss for report in trainer.run(steps)]
        gradients = {name: engine.gather_owned(name, engine.gradients, root=0) for name in engine.names}
        return losses, gradients, {name: engine.gather(name, root=0) for name in engine.names}


@cache
def trained_alone(name, *args, **options):
    """The training of the single rank, made once for all meshes; not to be written to."""
    return run_threads(partial(train, name, {}, *args, alone=True, **options), 1)[0]


def assert_trained_alike(result, expected, tolerance=1e-10):
    """What ``train`` gives, of a rank and of the single one."""
    np.testing.assert_allclose(result[0], expected[0], rtol=tolerance)
    for arrays, expected_arrays in zip(result[1:], expected[1:], strict=True):
        for name, array in arrays.items():
            if array is not None:  # on rank 0
                np.testing.assert_allclose(array, expected_arrays[name], atol=tolerance, err_msg=name)
