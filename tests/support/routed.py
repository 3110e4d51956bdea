"""A small GPT with experts, trained on virtual ranks, for the tests of experts."""

from dataclasses import replace
from functools import cache

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import AdamW, LayeredEngine
from spmd_engine.engine.schedules import named
from spmd_engine.engine.state.assignment import ZeroConfig
from spmd_engine.layers import RouterOptions
from spmd_engine.models import Mixture, gpt
from spmd_engine.sharding import Layout
from spmd_engine.training import Trainer
from support import parts, tiny

ROUTERS = {
    "dropless": RouterOptions(balance_loss=0.3, z_loss=0.1),
    "all losses": RouterOptions(balance_loss=0.3, sequence_balance_loss=0.2, z_loss=0.1, bias_rate=0.1),
    "position": RouterOptions(capacity_factor=0.8, balance_loss=0.1),
    "probability": RouterOptions(capacity_factor=0.8, drop_by="probability", second_choice="random"),
    "sigmoid of three": RouterOptions(top_k=3, score="sigmoid", renormalise=False, scale=1.5, z_loss=0.01),
    "balanced": RouterOptions(routing="balanced"),
    "random": RouterOptions(routing="random", balance_loss=0.1),
}


def model(router="dropless", experts=5, shared=0, dense="", layers=2, context_method="gather"):
    mixture = Mixture(experts, shared, 10, dense, ROUTERS[router])
    size = replace(tiny.SIZE, layers=layers, mixture=mixture)
    return gpt(size, dropout=0.1, context_method=context_method)


def engine_on(mesh, built, *, zero=None, schedule=None, layout=(), **options):
    layout = Layout.for_mesh(mesh, **dict(layout))
    if schedule:
        options["schedule"] = named(schedule)
    return LayeredEngine(
        built, mesh, layout, dtype=np.float64, seed=5, storage=ZeroConfig(zero, threshold=2000), **options
    )


def facts(engine, optimizer, losses):
    """Numbers that are equal on all ranks, and this rank's part of every array."""
    numbers = {"losses": np.array(losses), **engine.side_outputs}
    numbers |= {name: engine.gather_buffer(name) for name in engine.buffer_names}
    arrays = parts.stored(engine)
    for kind, like in {"gradient": engine.gradients, **optimizer.state}.items():
        arrays |= {f"{kind} of {name}": part for name, part in parts.updated(engine, like).items()}
    return numbers, arrays


def train(axes, *, steps=2, micro_batches=2, between=lambda engine, optimizer: None, of=(), **options):
    """The ``facts`` after a few clipped steps and an evaluation; ``between`` is called after the first step."""

    def program():
        with Mesh(**axes) as mesh:
            engine = engine_on(mesh, model(**dict(of)), **options)
            optimizer = AdamW()
            trainer = Trainer(
                engine,
                optimizer,
                lambda step: tiny.batch(engine, step, micro_batches),
                lambda step: 0.05,
                grad_clip=0.3,
            )
            losses = []
            for report in trainer.run(steps):
                losses += [report.loss, report.grad_norm]
                if len(losses) == 2:
                    between(engine, optimizer)
            side = facts(engine, optimizer, [*losses, trainer.evaluate([tiny.batch(engine, 9, 1)])])
            mesh.barrier()
            return side

    return run_threads(program, tiny.ranks_of(axes))


@cache
def alone(of=(), **options):
    return train({"data": 1}, of=of, **options)[0]


def assert_as_alone(found, expected):
    """Losses, norms, counts and parts of arrays of every rank equal those of one device, and nothing is missing."""
    for numbers, _ in found:
        assert numbers.keys() == expected[0].keys()
        for name, number in expected[0].items():
            np.testing.assert_allclose(numbers[name], number, rtol=1e-9, err_msg=name)
    parts.assert_parts([arrays for _, arrays in found], expected[1], atol=1e-8)
