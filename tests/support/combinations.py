"""Cases of training on meshes, and the reference on one device."""

from functools import cache
from math import prod

import numpy as np

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import AdamW
from spmd_engine.engine.pipeline import Recompute
from spmd_engine.engine.schedules import named
from spmd_engine.engine.state.assignment import WORK, parse_shares
from spmd_engine.training import Trainer
from support import parts, tiny

#: Options that change results; all others change only where and when something is computed.
COMPUTED = {"dropout", "tied", "micro_batches", "steps", "optimizer", "layers"}


class Case:
    """A mesh and the options with which the small GPT is trained on it."""

    def __init__(self, mesh, *, context_method=None, schedule=None, chunks=None, **options):
        self.axes = {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}
        if "shares" in options:
            options["shares"] = parse_shares(options["shares"], "shares", WORK)
        self.said = {"schedule": schedule, "chunks": chunks, "method": context_method, **options}
        self.options = {"dropout": 0.1, **options}
        if context_method:
            self.options["model_options"] = (("context_method", context_method),)
        if schedule:
            self.options["schedule"] = named(schedule, chunks)

    def __str__(self):
        said = {**self.said, "recompute": getattr(self.said.get("recompute"), "value", None)}
        if "optimizer" in said:
            said["optimizer"] = "SGD"
        words = (f"{key}={value}" for key, value in said.items() if value is not None)
        return " ".join((tiny.mesh_id(self.axes), *words)).replace("=True", "")


def train(engine, batches, *, optimizer=AdamW, steps=tiny.STEPS):
    """Losses and norms of clipped steps; this rank's final gradients and parameters, each with its place."""
    trainer = Trainer(engine, optimizer(), batches, lambda step: 0.05, grad_clip=0.3)
    reports = list(trainer.run(steps))
    numbers = [[report.loss, report.grad_norm] for report in reports]
    return numbers, parts.updated(engine, engine.gradients), parts.stored(engine)


def assert_same(results, expected):
    """The parts of all ranks, replicas included, equal those of one device, and nothing is missing."""
    for numbers, *_ in results:
        np.testing.assert_allclose(numbers, expected[0], rtol=1e-9)
    alone = len(results) == 1  # in an MPI job, each process sees its own part
    for kind in (1, 2):
        parts.assert_parts([result[kind] for result in results], expected[kind], atol=1e-8, missing=alone)


def train_gpt(axes, *, launch=run_threads, micro_batches=2, optimizer=AdamW, steps=tiny.STEPS, **options):
    def program():
        with Mesh(**axes) as mesh:
            engine = tiny.make_engine(mesh, **options)
            return train(engine, lambda step: tiny.batch(engine, step, micro_batches), optimizer=optimizer, steps=steps)

    return launch(program, prod(axes.values()))


@cache
def one_device(**options):
    return train_gpt({"data": 1}, **options)[0]


def assert_as_one_device(case, launch=run_threads):
    expected = one_device(**{key: value for key, value in case.options.items() if key in COMPUTED})
    assert_same(train_gpt(case.axes, launch=launch, **case.options), expected)


BLOCK, ATTENTION = Recompute.BLOCK, Recompute.ATTENTION
PARALLEL = {"sequence_parallel": True}
