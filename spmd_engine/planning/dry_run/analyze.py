"""``analyze``: one step of a composition of a model, run on shapes, rank by rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.backend import Shapes, on_shapes
from spmd_engine.arrays.meta.meter import Meter, metered
from spmd_engine.arrays.numba.functions import loops_are_there
from spmd_engine.axes import MeshPosition
from spmd_engine.comm.spans import span
from spmd_engine.engine.batch import Batch, CutsBatches, make_batch
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.optimizers import AdamW, Optimizer
from spmd_engine.engine.parallel_config import ModelConfig, ParallelConfig, composed_assignment, composed_layout
from spmd_engine.engine.state.assignment import PIPE
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import Layer
from spmd_engine.models.layouts import layout_for
from spmd_engine.models.model import Model
from spmd_engine.planning.dry_run.engine import ForetoldEngine, Passes, RecordedLayer, watch_storage
from spmd_engine.planning.dry_run.layer_cache import PassCache
from spmd_engine.planning.dry_run.rank_classes import Shared, classes_of, every_rank, members, shared_parts
from spmd_engine.planning.dry_run.recorder import Phase, Recorder
from spmd_engine.planning.dry_run.shaped_mesh import ForetoldRanks, MeetingPoint, ShapedMesh
from spmd_engine.planning.dry_run.slot_table_memory import tables_of
from spmd_engine.planning.dry_run.step_analysis import LOSS, NORM, UPDATE, ModelShard, RankClass, RankStep, StepAnalysis
from spmd_engine.sharding.layout import Layout


def analyze(
    model: ModelConfig | Model,
    axes: Mapping[str, int],
    composition: ParallelConfig | None = None,
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
    built = model.build(composition or ParallelConfig()) if isinstance(model, ModelConfig) else model
    dtype = np.dtype(dtype or (model.dtype if isinstance(model, ModelConfig) else np.float32))
    place = MeshPosition(dict(axes), dict.fromkeys(axes, 0))
    if layout is None and composition is None and built is model:
        layout = layout_for(built, place)
    composition = composition if composition is not None else ParallelConfig()
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
    composition: ParallelConfig
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
    model: Model, layout: Layout, composition: ParallelConfig, axes: Mapping[str, int], itemsize: int
) -> list[Shared]:
    """Parts, of different sizes, of parameters whose parts are summed: by several stages, or by replicas of them."""
    tied = axes.get(PIPE, 1) > 1 and any(layer.tied for _, layer in model.layers)
    if not tied and not (composition.storage.stage(axes) and sum(size > 1 for size in axes.values()) > 1):
        return []
    first = MeshPosition(dict(axes), dict.fromkeys(axes, 0))
    return shared_parts(composed_assignment(model, first, layout, itemsize, composition).groups, axes)


# --- Batches of a model that are only shapes; what says which rows of a table are used, tokens and classes, is spread


_PRIME = 2_147_483_647


def sample_shapes(model: Model, length: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of one sample's input and target, whole; ``length`` is that of a sequence, None: the model's own."""
    sizes = [model.layers[0][1].sizes, model.layers[-1][1].sizes]
    whole = {"s": length or model.context}
    shapes = []
    for dims, of_layer in zip((model.inputs, model.targets), sizes, strict=True):
        letters = dims.split()[1:]
        if dims == model.inputs and model.sample is not None:
            shapes.append(tuple(model.sample))
            continue
        missing = [letter for letter in letters if letter not in whole and letter not in of_layer]
        if missing:
            raise UsageError(f"{model.name}: how long {missing[0]} of [{dims}] is, is not known; give Model a sample")
        shapes.append(tuple(whole.get(letter) or of_layer[letter] for letter in letters))
    return shapes[0], shapes[1]


def foretold_batch(
    model: Model,
    engine: CutsBatches,
    size: int,
    micro_batches: int,
    length: int | None,
    dtype: Any,
    *,
    real: bool = False,
) -> Batch:
    """The batch of a step as a rank has it; with ``real`` numbers, zeros, to be computed with."""
    inputs, targets = sample_shapes(model, length)
    classes = _classes(model)

    floats = np.zeros if real else ShapedArray.new

    def load(samples: np.ndarray) -> Sequence[Array]:
        sizes = (len(samples), *inputs), (len(samples), *targets)
        return [
            _spread(shape, below) if below else floats(shape, dtype)
            for shape, below in zip(sizes, (model.vocabulary, classes), strict=True)
        ]

    return make_batch(load, size, micro_batches, engine, count=size * prod(targets))


def _classes(model: Model) -> int:
    """How many classes targets are numbers of; 0: they are no such numbers."""
    if len(model.targets.split()) == len(model.outputs.split()):
        return 0
    letter = model.outputs.split()[-1]
    return next(layer.sizes[letter] for _, layer in reversed(model.layers) if letter in layer.sizes)


def _spread(shape: tuple[int, ...], below: int) -> np.ndarray:
    """Whole numbers that are spread evenly below a limit."""
    return (np.arange(prod(shape), dtype=np.int64) * _PRIME % below).reshape(shape)


# --- What a rank has of a model, parameter by parameter, as records


def shards_of(engine: LayeredEngine, states: int) -> list[ModelShard]:
    """The records of a rank's parameters; an optimizer keeps so many arrays of state for each."""
    names = [name for name, _ in engine.model.layers]
    users: dict[str, list[str]] = {}
    for layer, uses in engine.assignment.uses.items():
        for full in uses.values():
            users.setdefault(full, []).append(names[layer])
    records, itemsize = [], engine.dtype.itemsize
    for storage in engine.storages:
        owned_rows = storage.group.rows(storage.interval)
        for member in storage.group.members:
            size = prod(member.shape) * itemsize
            rows = _rows(owned_rows[member.name], member)
            owned, stored = rows * itemsize, (rows * itemsize if storage.zero == 3 else size)
            summed = member.summed
            records.append(
                ModelShard(
                    member.name,
                    str(engine.sharding(member.name)),
                    member.shape,
                    engine.global_shape(member.name),
                    str(engine.dtype),
                    size,
                    stored,
                    owned,
                    storage.group.name,
                    tuple(users.get(member.name, ())),
                    {
                        "gradient": owned if storage.zero >= 2 else size,
                        "optimizer_state": states * (owned if storage.zero else size),
                        "gathered": size if storage.zero == 3 else 0,
                    },
                    tuple(dict.fromkeys((*summed.over, *(("pipe",) if len(summed.stages) > 1 else ())))),
                )
            )
    return records


def _rows(rows: slice, member) -> int:
    """Elements of some rows of a parameter."""
    return (rows.stop - rows.start) * member.row if member.shape else int(rows.stop > rows.start)
