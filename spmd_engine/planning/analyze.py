"""``analyze``: one step of a composition of a model, run on shapes, rank by rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.meta.backend import Shapes, on_shapes
from spmd_engine.arrays.meta.meter import Meter, metered
from spmd_engine.arrays.numba.functions import loops_are_there
from spmd_engine.axes import MeshPosition
from spmd_engine.comm.spans import span
from spmd_engine.engine.optimizers import AdamW, Optimizer
from spmd_engine.engine.parallel_config import Composition, ModelConfig, composed_assignment, composed_layout
from spmd_engine.engine.state.assignment import PIPE
from spmd_engine.layers.layer import Layer
from spmd_engine.models.layouts import layout_for
from spmd_engine.models.model import Model
from spmd_engine.planning.foretold_engine import ForetoldEngine, Passes, RecordedLayer, watch_storage
from spmd_engine.planning.meeting_point import MeetingPoint
from spmd_engine.planning.passes import PassCache
from spmd_engine.planning.rank_classes import Shared, classes_of, every_rank, members, shared_parts
from spmd_engine.planning.recorder import Phase, Recorder
from spmd_engine.planning.samples import foretold_batch
from spmd_engine.planning.shaped_mesh import ForetoldRanks, ShapedMesh
from spmd_engine.planning.shard_records import shards_of
from spmd_engine.planning.step_analysis import LOSS, NORM, UPDATE, RankClass, RankStep, StepAnalysis
from spmd_engine.planning.tables import tables_of
from spmd_engine.sharding.layout import Layout


def analyze(
    model: ModelConfig | Model,
    axes: Mapping[str, int],
    composition: Composition | None = None,
    *,
    batch_size: int,
    micro_batches: int = 1,
    sequence: int | None = None,
    optimizer: Optimizer | None = None,
    dtype: Any = None,
    choose: str = "balanced",
    nodes: Sequence[str] | None = None,
    every: bool = False,
    cache: PassCache | None = None,
    layout: Layout | None = None,
) -> StepAnalysis:
    """One step of the model, spread by the composition over ranks on these ``axes``, predicted.

    Without a ``composition`` the layout of a Model is that of ``LayeredEngine(model, mesh)``; of a ModelConfig, and
    with one, that of ``build_engine``, in which a sequence that is cut for attention is cut in a zigzag.
    ``batch_size`` is global; ``sequence`` the length of samples, None: the model's context. ``optimizer`` by default
    is AdamW. ``choose``: how choices fall that only data decide, "balanced" or "worst". ``nodes`` names each rank's
    host; None: all are on one. ``every``: look at every rank, not at one of each class of ranks that do the same.
    ``layout``: what the axes cut, where that is not what the composition says, as after experts have moved.
    A ``cache`` of passes through layers makes further analyses of the same layers quick.
    Raises UsageError for what makes no sense, and for what cannot be foretold from shapes.
    """
    cache = cache if cache is not None else PassCache()
    built = model.build(composition or Composition()) if isinstance(model, ModelConfig) else model
    dtype = np.dtype(dtype or (model.dtype if isinstance(model, ModelConfig) else np.float32))
    place = MeshPosition(dict(axes), dict.fromkeys(axes, 0))
    if layout is None and composition is None and built is model:
        layout = layout_for(built, place)
    composition = composition if composition is not None else Composition()
    layout = layout if layout is not None else composed_layout(built, place, composition)
    samples = [part.stop - part.start for part in (span(batch_size, micro_batches, m) for m in range(micro_batches))]
    shared = [] if every else _summed_in_parts(built, layout, composition, axes, dtype.itemsize)
    shared += [((axis,), shares) for axis, shares in composition.storage.shares.items()]
    classes = every_rank(axes) if every else classes_of(built, layout, axes, set(samples), shared, sequence)
    ranks = ForetoldRanks(axes, classes, MeetingPoint(), nodes or ["here"] * prod(axes.values()))
    found = members(classes)
    uniform = not every and _alike_inside(built, layout, axes, set(samples), sequence, len(found))
    scope = cache.number((choose, loops_are_there(), _cuts(layout, axes)))
    kinds = {name: (cache.kind(layer), _told(layer, axes)) for name, layer in built.layers}
    with on_shapes() as backend:
        rank = Foretold(built, ranks, composition, layout, dtype, backend, choose, optimizer or AdamW())
        sizes = batch_size, micro_batches, sequence
        programs = [
            partial(rank.step, numbers[0], sizes, cache, scope, kinds, ())
            if uniform
            else partial(rank.step, numbers[0], sizes, PassCache(), scope, kinds, samples)
            for numbers in found.values()
        ]
        steps = ranks.meeting.run(programs)
    notes = dict.fromkeys(note for _, notes in steps for note in notes)
    each = [RankClass(step, numbers) for (step, _), numbers in zip(steps, found.values(), strict=True)]
    analysis = StepAnalysis(
        built.name,
        dict(axes),
        each,
        micro_batches,
        built.parameter_count,
        composition.changed(mesh=dict(axes)).as_json(),
        list(notes),
    )
    return replace(analysis, tables=tables_of(analysis, ranks.nodes))


def _alike_inside(
    model: Model, layout: Layout, axes: Mapping[str, int], samples: set[int], sequence: int | None, classes: int
) -> bool:
    """Whether the ranks that meet inside of layers are all alike, though some may differ in what they store."""
    stages = axes.get(PIPE, 1)
    if classes == stages:
        return True
    if any(layer.buffers or layer.side_outputs for _, layer in model.layers):  # which meet over the batch, too
        return False
    return len(members(classes_of(model, layout, axes, samples, (), sequence))) == stages


def _cuts(layout: Layout, axes: Mapping[str, int]) -> Hashable:
    """Which axes cut what inside of layers, but for the samples, and how long they are."""
    cuts = [(x, layout.inside.get(x, ()), layout.residual.get(x, ())) for x in {**layout.inside, **layout.residual}]
    cuts = [each for each in sorted(cuts) if each[0] != "b"]
    sizes = {axis: axes[axis] for each in cuts for axis in (*each[1], *each[2])}
    return tuple(cuts), tuple(sizes.items()), layout.zigzag


def _told(layer: Layer, axes: Mapping[str, int]) -> Hashable:
    """What a layer that tells others of its samples depends on, beside what cuts it."""
    return tuple(axes.items()) if layer.buffers or layer.side_outputs else ()


@dataclass
class Foretold:
    """What the steps of all ranks have in common."""

    model: Model
    ranks: ForetoldRanks
    composition: Composition
    layout: Layout
    dtype: np.dtype
    backend: Shapes
    choose: str
    optimizer: Optimizer

    def step(
        self, number: int, sizes: tuple, cache: PassCache, scope: Hashable, kinds: Mapping, samples: Sequence[int]
    ) -> tuple:
        """The step of one rank, and what was assumed about values."""
        recorder, axes = Recorder(Meter(self.choose)), self.ranks.axes
        with metered(recorder.meter):
            where = map(int, np.unravel_index(number, tuple(axes.values())))
            mesh = ShapedMesh(self.ranks, dict(zip(axes, where, strict=True)), recorder)
            with recorder.meter.taking("parameters"):
                how = self.composition.how_on(axes)
                engine = ForetoldEngine(self.model, mesh, self.layout, dtype=self.dtype, backend=self.backend, **how)
            watch_storage(engine, recorder)
            optimizer = copy(self.optimizer)
            optimizer.state = {}
            passes = Passes(recorder, cache, scope, self.choose, kinds, samples)
            step = run_step(engine, optimizer, passes, sizes)
            return replace(step, groups=mesh.group_keys(step.communications)), list(recorder.meter.notes)


def run_step(engine: ForetoldEngine, optimizer: Optimizer, passes: Passes, sizes: tuple) -> RankStep:
    """A step in the middle of a training: the optimizer has its state."""
    recorder, model = passes.recorder, engine.model
    meter = recorder.meter
    with meter.taking("optimizer state", "optimizer"):
        optimizer.prepare(engine)
    with meter.taking("activations", "the batch"):
        batch = foretold_batch(model, engine, *sizes, engine.dtype)
    before = {kind: size for kind, size in meter.held.items() if size}
    recorder.restart()
    names = [name for name, _ in model.layers]
    chunks = {names[layer]: number for number in engine.assignment.mine for layer in engine.assignment.chunks[number]}
    with engine.wrapped(partial(RecordedLayer, passes, chunks)):

        def loss(outputs, targets, **options):
            with recorder.phase(Phase("loss", phase=LOSS)):
                return engine.loss(outputs, targets, **options)

        engine.step(batch, loss)
    with recorder.phase(Phase("gradient norm", phase=NORM)):
        engine.gradient_norm()
    with recorder.phase(Phase("update", phase=UPDATE)):
        optimizer.update(engine, engine.gradients, step=1, rate=1.0)
    communications, peak = recorder.finish()
    shards = shards_of(engine, len(optimizer.kinds))
    return RankStep(
        engine.mesh.coordinates,
        recorder.computations,
        communications,
        recorder.timeline,
        peak,
        shards,
        before,
        recorder.saved,
        recorder.temporaries,
        constants=sum(meter.constants.values()),
    )


def _summed_in_parts(
    model: Model, layout: Layout, composition: Composition, axes: Mapping[str, int], itemsize: int
) -> list[Shared]:
    """Parts, of different sizes, of parameters whose parts are summed: by several stages, or by replicas of them."""
    tied = axes.get(PIPE, 1) > 1 and any(layer.tied for _, layer in model.layers)
    if not tied and not (composition.storage.stage(axes) and sum(size > 1 for size in axes.values()) > 1):
        return []
    first = MeshPosition(dict(axes), dict.fromkeys(axes, 0))
    return shared_parts(composed_assignment(model, first, layout, itemsize, composition).groups, axes)
