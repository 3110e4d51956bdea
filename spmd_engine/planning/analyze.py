"""``analyze``: one step of a composition of a model, run on shapes, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.meter import Meter, metered
from spmd_engine.arrays.shapes import Shapes, on_shapes
from spmd_engine.comm.place import Place
from spmd_engine.comm.spans import span
from spmd_engine.engine.composition import Composition, ModelConfig, composed_layout
from spmd_engine.engine.optimizers import AdamW, Optimizer
from spmd_engine.models.model import Model
from spmd_engine.planning.foretold_engine import ForetoldEngine, RecordedLayer, watch_storage
from spmd_engine.planning.meeting_point import MeetingPoint
from spmd_engine.planning.rank_classes import classes_of, every_rank, members
from spmd_engine.planning.recorder import Phase, Recorder
from spmd_engine.planning.samples import foretold_batch
from spmd_engine.planning.shaped_mesh import Ranks, ShapedMesh
from spmd_engine.planning.step_analysis import LOSS, NORM, UPDATE, RankClass, RankStep, StepAnalysis


def analyze(
    model: ModelConfig | Model,
    axes: Mapping[str, int],
    composition: Composition = Composition(),  # noqa: B008 (immutable)
    *,
    batch_size: int,
    micro_batches: int = 1,
    sequence: int | None = None,
    optimizer: Optimizer | None = None,
    dtype: Any = None,
    clips: bool = True,
    choose: str = "balanced",
    nodes: Sequence[str] | None = None,
    every: bool = False,
) -> StepAnalysis:
    """One step of the model, spread by the composition over ranks on these ``axes``, foretold.

    ``batch_size`` is global; ``sequence`` the length of samples, None: the model's context. ``optimizer`` by default
    is AdamW. ``choose``: how choices fall that only data decide, "balanced" or "worst". ``nodes`` names each rank's
    host; None: all are on one. ``every``: look at every rank, not at one of each class of ranks that do the same.
    Raises UsageError for what makes no sense, and for what cannot be foretold from shapes.
    """
    built = model.build(composition) if isinstance(model, ModelConfig) else model
    dtype = np.dtype(dtype or (model.dtype if isinstance(model, ModelConfig) else np.float32))
    place = Place(dict(axes), dict.fromkeys(axes, 0))
    layout = composed_layout(built, place, composition)
    sizes = {part.stop - part.start for part in (span(batch_size, micro_batches, m) for m in range(micro_batches))}
    classes = every_rank(axes) if every else classes_of(built, layout, axes, sizes)
    ranks = Ranks(axes, classes, MeetingPoint(), nodes or ["here"] * prod(axes.values()))
    found = members(classes)
    with on_shapes() as backend:
        programs = [
            partial(
                _step_of_rank,
                built,
                ranks,
                numbers[0],
                composition,
                layout,
                dtype,
                backend,
                (batch_size, micro_batches, sequence),
                optimizer or AdamW(),
                choose,
            )
            for numbers in found.values()
        ]
        steps = ranks.meeting.run(programs)
    notes = dict.fromkeys(note for _, notes in steps for note in notes)
    each = [RankClass(step, numbers) for (step, _), numbers in zip(steps, found.values(), strict=True)]
    return StepAnalysis(
        built.name,
        dict(axes),
        each,
        micro_batches,
        built.parameter_count,
        composition.changed(mesh=dict(axes)).as_json(),
        list(notes),
    )


def _step_of_rank(model, ranks, number, composition, layout, dtype, backend: Shapes, sizes, optimizer, choose):
    """The step of one rank, and what was assumed about values."""
    meter = Meter(choose)
    recorder = Recorder(meter)
    with metered(meter):
        coordinates = dict(zip(ranks.axes, map(int, np.unravel_index(number, tuple(ranks.axes.values()))), strict=True))
        mesh = ShapedMesh(ranks, coordinates, recorder)
        with meter.taking("parameters"):
            engine = ForetoldEngine(model, mesh, layout, dtype=dtype, backend=backend, **composition.how_on(ranks.axes))
        watch_storage(engine, recorder)
        optimizer = copy(optimizer)
        optimizer.state = {}
        return run_step(engine, optimizer, recorder, model, sizes), list(meter.notes)


def run_step(engine, optimizer, recorder: Recorder, model: Model, sizes) -> RankStep:
    """A step in the middle of a training: the optimizer has its state."""
    meter = recorder.meter
    with meter.taking("optimizer state", "optimizer"):
        optimizer.prepare(engine)
    batch_size, micro_batches, sequence = sizes
    with meter.taking("activations", "the batch"):
        batch = foretold_batch(model, engine, batch_size, micro_batches, sequence, engine.dtype)
    before = {kind: size for kind, size in meter.held.items() if size}
    recorder.restart()
    with engine.wrapped(partial(RecordedLayer, recorder)):

        def loss(outputs, targets, **options):
            with recorder.phase(Phase("loss", phase=LOSS)):
                return engine.loss(outputs, targets, **options)

        engine.step(batch, loss)
    with recorder.phase(Phase("gradient norm", phase=NORM)):
        engine.gradient_norm()
    with recorder.phase(Phase("update", phase=UPDATE)):
        optimizer.update(engine, engine.gradients, step=1, rate=1.0)
    communications, peak = recorder.finish()
    return RankStep(engine.mesh.coordinates, recorder.computations, communications, recorder.timeline, peak, (), before)
