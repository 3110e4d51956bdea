"""``analyze``: the dry run of one training step, rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.backend import BATCH_MEMORY, DeviceShapes, Shapes, on_shapes
from spmd_engine.arrays.meta.meter import Meter, metered
from spmd_engine.arrays.numba.functions import loops_are_there
from spmd_engine.arrays.precision import dtype_of
from spmd_engine.axes import MeshPosition, checked_axes, count_ranks, position_of, rank_grid, uneven_axes
from spmd_engine.comm.blocks import span
from spmd_engine.engine import Batch, LayeredEngine, ModelConfig, ParallelConfig, ShardedEngine, make_batch
from spmd_engine.engine.build import composed_assignment, composed_layout
from spmd_engine.engine.distributed import DistributedEngine, make_engine
from spmd_engine.engine.helpers import AssignedLayers
from spmd_engine.engine.optimizers import AdamW, Optimizer
from spmd_engine.engine.state.array_table import USED
from spmd_engine.engine.state.assignment import BATCH, PIPE
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import Documents, Layer, documents_of
from spmd_engine.models import Model, layout_for
from spmd_engine.models.user_code import name_of
from spmd_engine.planning.dry_run.engine import DryRunEngine, PassCache, RecordedLayer, StepPasses
from spmd_engine.planning.dry_run.rank_classes import (
    UnevenParts,
    find_rank_classes,
    ranks_by_class,
    slot_table_bytes,
    uneven_parts,
)
from spmd_engine.planning.dry_run.recorder import Phase, Recorder, count_as, watch_storage
from spmd_engine.planning.dry_run.shaped_mesh import DryRunRanks, Mailbox, ShapedMesh
from spmd_engine.planning.dry_run.step_analysis import ParameterShard, Phases, RankClass, RankStep, StepAnalysis
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
    device: str = "cpu",
    documents: str = "joined",
    on_work: Callable[[], None] = lambda: None,
) -> StepAnalysis:
    """The dry run of one step of the model, on a mesh with these ``axes``.

    Without a ``composition`` the layout of a Model is that of ``LayeredEngine(model, mesh)``. With one, and for a
    ModelConfig, it is that of ``build_engine``, which shards the sequence of attention in a zigzag.

    ``batch_size`` is global. ``sequence`` is the length of samples (None: the model's context). ``optimizer`` is AdamW
    by default. ``choose`` decides choices that depend on values: "balanced" or "worst". ``nodes`` names the host
    of each rank (None: one host). ``every``: run every rank, not one of each class of equal ranks. ``layout`` overrides
    the layout of the composition, for example after experts have moved. On the ``device`` "cuda", launches are counted,
    waits and copies. A ``cache`` of layer passes speeds up further analyses of the same layers. ``documents``: how they
    share a sample, as ``--documents``; if not "joined", helper ranks are sent them, and a mask of the targets.
    ``on_work`` is called with each computation; what it raises ends the dry run.

    Raises UsageError for an invalid composition, and for a step that depends on values.
    """
    cache, axes = cache if cache is not None else PassCache(), checked_axes(axes)
    built = model.build(composition or ParallelConfig()) if isinstance(model, ModelConfig) else model
    dtype = dtype_of(dtype or (model.dtype if isinstance(model, ModelConfig) else np.float32))
    position = MeshPosition(dict(axes), dict.fromkeys(axes, 0))
    if layout is None and composition is None and built is model:
        layout = layout_for(built, position)
    composition = composition if composition is not None else ParallelConfig()
    layout = layout if layout is not None else composed_layout(built, position, composition)
    others = len(composition.ranks_outside)
    parts = [span(batch_size, micro_batches, m) for m in range(micro_batches)]
    samples = [part.stop - part.start for part in parts]
    # The first owner sends the weights to a helper rank; classes of ranks on uneven stages are not found.
    every = every or bool(others or uneven_axes(axes))
    uneven = [] if every else _uneven_summed_parts(built, layout, composition, axes, dtype.itemsize)
    uneven += [((axis,), shares) for axis, shares in composition.storage.shares.items()]
    # a class for every rank, or for those that are equal
    classes = rank_grid(axes) if every else find_rank_classes(built, layout, axes, set(samples), uneven, sequence)
    ranks = DryRunRanks(axes, classes, Mailbox(), nodes or ["here"] * count_ranks(axes), others)
    members = ranks_by_class(classes)
    uniform = not every and _layers_are_uniform(built, layout, axes, set(samples), sequence, len(members))
    scope = cache.number((choose, device, loops_are_there(), _sharding_key(layout, axes), documents))
    kinds = {name: (cache.kind(layer), _mesh_key(layer, axes)) for name, layer in built.layers}
    with on_shapes(DeviceShapes() if device == "cuda" else None) as backend:
        sizes = batch_size, micro_batches, sequence, documents
        numbered = composition.numbered_from(ranks.size)
        dry_run = DryRun(built, ranks, numbered, layout, dtype, backend, choose, optimizer or AdamW(), sizes, on_work)
        if uniform:
            samples = []
        programs = [
            partial(dry_run.step, numbers[0], cache if uniform else PassCache(), scope, kinds, samples)
            for numbers in members.values()
        ]
        programs += [partial(dry_run.step_outside, ranks.size + n, kinds) for n in range(others)]
        steps = ranks.mailbox.run(programs)
    numbers = [*members.values(), *([ranks.size + n] for n in range(others))]
    notes = dict.fromkeys(note for _, notes in steps for note in notes)
    analysis = StepAnalysis(
        built.name,
        dict(axes),
        [RankClass(step, of_class) for (step, _), of_class in zip(steps, numbers, strict=True)],
        micro_batches,
        built.parameter_count,
        composition.changed(mesh=dict(axes)).as_json(),
        list(notes),
    )
    return replace(analysis, tables=slot_table_bytes(analysis, ranks.nodes))


def _layers_are_uniform(
    model: Model, layout: Layout, axes: Mapping[str, int], samples: set[int], sequence: int | None, classes: int
) -> bool:
    """Whether all ranks that communicate inside layers are equal, although they may store different shards."""
    stages = axes.get(PIPE, 1)
    if classes == stages:
        return True
    if any(layer.buffers or layer.side_outputs for _, layer in model.layers):  # these communicate over the batch
        return False
    return len(ranks_by_class(find_rank_classes(model, layout, axes, samples, (), sequence))) == stages


def _sharding_key(layout: Layout, axes: Mapping[str, int]) -> Hashable:
    """The axes that shard letters inside layers, with their sizes, without the batch."""
    letters = {**layout.inside, **layout.residual}
    shards = sorted((x, layout.inside.get(x, ()), layout.residual.get(x, ())) for x in letters if x != "b")
    sizes = {axis: axes[axis] for _, inside, residual in shards for axis in (*inside, *residual)}
    return tuple(shards), tuple(sizes.items()), layout.zigzag


def _mesh_key(layer: Layer, axes: Mapping[str, int]) -> Hashable:
    """The whole mesh, for a layer that communicates over the batch."""
    return tuple(axes.items()) if layer.buffers or layer.side_outputs else ()


@dataclass
class DryRun:
    """What the dry runs of all ranks have in common."""

    model: Model
    ranks: DryRunRanks
    composition: ParallelConfig
    layout: Layout
    dtype: np.dtype
    backend: Shapes
    choose: str
    optimizer: Optimizer
    #: the global batch size, the micro-batches, the sequence length, and how documents share a sample
    sizes: tuple[int, int, int | None, str]
    on_work: Callable[[], None]

    def step(
        self, number: int, cache: PassCache, scope: Hashable, kinds: Mapping[str, Hashable], samples: Sequence[int]
    ) -> tuple[RankStep, list[str]]:
        """The step of one rank, and the assumptions about values.

        ``samples`` are the samples of each micro-batch, or () if passes through layers are the same on all ranks.
        """
        meter, axes = Meter(self.choose, on_device=self.backend.on_device), self.ranks.axes
        recorder = Recorder(meter, self.on_work)
        with metered(recorder.meter):
            mesh = ShapedMesh(self.ranks, position_of(number, axes).coordinates, recorder)
            with recorder.meter.taking("parameters"):
                options = self.composition.how_on(axes)
                engine = DryRunEngine(self.model, mesh, self.layout, dtype=self.dtype, backend=self.backend, **options)
            watch_storage(engine, recorder)

            def compute() -> None:
                passes = StepPasses(recorder, cache, scope, self.choose, kinds, samples)
                names, assignment = [name for name, _ in self.model.layers], engine.assignment
                chunks = {names[layer]: number for number in assignment.mine for layer in assignment.chunks[number]}

                def loss(outputs, targets, **options):
                    with recorder.phase(Phase("loss", phase=Phases.LOSS)):
                        return engine.loss(outputs, targets, **options)

                with engine.wrapped(partial(RecordedLayer, passes, chunks)):
                    engine.step(batch, loss)

            optimizer = _prepare_optimizer(self.optimizer, engine, recorder)
            with recorder.meter.taking("activations", BATCH_MEMORY):
                batch = synthetic_batch(self.model, engine, *self.sizes, dtype=engine.dtype)
            engine.placed.positions(("s" in self.model.inputs and batch.micro_batches[0].length) or 1)  # are kept
            step = _record_step(engine, optimizer, recorder, compute)
            shards = shards_of(engine, len(optimizer.kinds))
            return replace(step, shards=shards, groups=mesh.group_keys(step.communications)), list(recorder.meter.notes)

    def step_outside(self, number: int, kinds: Mapping[str, Hashable]) -> tuple[RankStep, list[str]]:
        """As ``step``, of the rank with this number, which is not on the mesh."""
        recorder = Recorder(meter := Meter(self.choose, on_device=self.backend.on_device))
        others, one = self.ranks.size + self.ranks.others - 1, np.array([number])
        alone = replace(self.ranks, axes={"data": 1}, classes=one, nodes=["helper"], others=others)
        with metered(meter), ExitStack() as stack:
            mesh = ShapedMesh(alone, {"data": 0}, recorder)
            composition = self.composition.changed(mesh=dict(self.ranks.axes))
            on_mesh = range(self.ranks.size)
            assigned = AssignedLayers(self.model, composition, on_mesh, mesh, self.dtype, self.backend)
            assigned.weights.arrived = count_as(meter, assigned.weights.arrived, "parameters")
            assigned.weights.new_sums = count_as(meter, assigned.weights.new_sums, "gradients")
            recorded = StepPasses(recorder, PassCache(), (), self.choose, kinds, ())
            for chunk in assigned.chunks.values():
                stack.enter_context(chunk.wrapped(partial(RecordedLayer, recorded, {})))
            recorder.restart()
            assigned.follow(mesh.others.take())
            return recorder.finish({}), list(meter.notes)


def _prepare_optimizer(optimizer: Optimizer, engine: ShardedEngine, recorder: Recorder) -> Optimizer:
    """A copy of the optimizer with its state allocated, as between two steps of a training."""
    optimizer = copy(optimizer)
    optimizer.state = {}
    with recorder.meter.taking("optimizer state", "optimizer"):
        optimizer.prepare(engine)
    return optimizer


def _record_step(
    engine: ShardedEngine, optimizer: Optimizer, recorder: Recorder, compute: Callable[[], None]
) -> RankStep:
    """Record a step: ``compute`` (forward and backward), the gradient norm, and the update."""
    before = {kind: size for kind, size in recorder.meter.held.items() if size}
    recorder.restart()
    compute()
    with recorder.phase(Phase("gradient norm", phase=Phases.NORM)):
        engine.gradient_norm()
    with recorder.phase(Phase("update", phase=Phases.UPDATE)):
        optimizer.update(engine, engine.gradients, step=1, rate=1.0)
    return replace(recorder.finish(engine.mesh.coordinates), before=before)


def _uneven_summed_parts(
    model: Model, layout: Layout, composition: ParallelConfig, axes: Mapping[str, int], itemsize: int
) -> list[UnevenParts]:
    """Uneven shards that several stages, or several replicas of a shard, sum shard by shard."""
    holds_others, tied = bool(composition.storage.overlap), any(layer.tied for _, layer in model.layers)
    if not (axes.get(PIPE, 1) > 1 and (tied or holds_others)) and not (
        composition.storage.stage(axes) and sum(size > 1 for size in axes.values()) > 1
    ):
        return []
    first = MeshPosition(dict(axes), dict.fromkeys(axes, 0))
    differing = [axis for axis in layout.shares if axis not in BATCH]  # their groups differ in size
    places = first.peers([*differing, *([PIPE] if holds_others else [])])
    assignments = (composed_assignment(model, place, layout, itemsize, composition) for place in places)
    return [part for assignment in assignments for part in uneven_parts(assignment.groups, axes)]


# --- Batches of shapes. Token ids and classes are values: they decide which rows of a table are used


_PRIME = 2_147_483_647


def sample_shapes(model: Model, length: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of one sample's input and target. ``length`` is that of a sequence (None: the model's context).

    Raises UsageError if the size of a dim is unknown.
    """
    lengths = {"s": length or model.context}
    shapes = []
    for dims, (_, layer) in (model.inputs, model.layers[0]), (model.targets, model.layers[-1]):
        letters, sizes = dims.split()[1:], layer.sizes
        if dims == model.inputs and model.sample is not None:
            shapes.append(tuple(model.sample))
            continue
        missing = [letter for letter in letters if letter not in lengths and letter not in sizes]
        if missing:
            raise UsageError(f"{model.name}: the size of {missing[0]} in [{dims}] is unknown; give Model a sample")
        shapes.append(tuple(lengths.get(letter) or sizes[letter] for letter in letters))
    return shapes[0], shapes[1]


def synthetic_batch(
    model: Model,
    engine: ShardedEngine,
    size: int,
    micro_batches: int,
    length: int | None,
    documents: str = "joined",
    *,
    dtype: Any,
    real: bool = False,
) -> Batch:
    """This rank's shard of a batch of ``size`` samples: arrays without values or, if ``real``, zeros.

    Token ids and classes are always real, and spread evenly. Unless ``documents`` are "joined", each sample is one.
    """
    inputs, targets = sample_shapes(model, length)
    samples = Samples(inputs, targets, size, micro_batches, dtype, _class_count(model), model.vocabulary, documents)
    return _make_batch(engine, samples, np.zeros if real else ShapedArray.new)


def _make_batch(engine: ShardedEngine, samples: Samples, floats: Callable[..., Array]) -> Batch:
    """This rank's shard of a batch; ``floats`` makes arrays of floats; integers are spread evenly."""

    def load(rows: np.ndarray) -> Sequence[Array]:
        shapes = (len(rows), *samples.inputs), (len(rows), *samples.targets)
        mask = [] if samples.documents == "joined" else [floats(shapes[1], np.float32)]
        parts = zip(shapes, (samples.tokens, samples.classes), strict=True)
        return [_spread(shape, below) if below else floats(shape, samples.dtype) for shape, below in parts] + mask

    def documents(rows: np.ndarray) -> Documents | None:
        if samples.documents == "joined":
            return None
        return documents_of(np.zeros((len(rows), *samples.inputs), np.int64), samples.documents == "restarted")

    count = samples.batch_size * prod(samples.targets)
    return make_batch(load, samples.batch_size, samples.micro_batches, engine, count=count, documents=documents)


def _class_count(model: Model) -> int:
    """The number of classes of integer targets; 0 if targets are floats like the outputs."""
    if len(model.targets.split()) == len(model.outputs.split()):
        return 0
    letter = model.outputs.split()[-1]
    return next(layer.sizes[letter] for _, layer in reversed(model.layers) if letter in layer.sizes)


def _spread(shape: tuple[int, ...], below: int) -> np.ndarray:
    """Integers in [0, below), spread evenly: int64[shape]."""
    return (np.arange(prod(shape), dtype=np.int64) * _PRIME % below).reshape(shape)


# --- Records of a rank's parameters


def shards_of(engine: LayeredEngine, states: int) -> list[ParameterShard]:
    """A record for each parameter of this rank; the optimizer keeps ``states`` arrays for each.

    Bytes are those in memory between steps.
    """
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
            rows, summed = owned_rows[member.name], member.summed
            elements = (rows.stop - rows.start) * member.row if member.shape else int(rows.stop > rows.start)
            owned = elements * itemsize
            held = storage.table.bytes_by_class(prod(member.shape), elements, states)
            is_gathered = not storage.table[USED].lasts and member.name in users
            records.append(
                ParameterShard(
                    member.name,
                    str(engine.sharding(member.name)),
                    member.shape,
                    engine.global_shape(member.name),
                    str(engine.dtype),
                    bytes=size,
                    stored_bytes=held["parameters"],
                    owned_bytes=owned,
                    group=storage.group.name,
                    layers=tuple(users.get(member.name, ())),
                    requires={
                        "gradient": held["gradients"],
                        "optimizer_state": held["optimizer state"],
                        "gathered": size if is_gathered else 0,
                    },
                    depends_on=tuple(dict.fromkeys((*summed.over, *(("pipe",) if len(summed.stages) > 1 else ())))),
                )
            )
    return records


# --- A user's engines, and those of ``strategies``


@dataclass(frozen=True)
class Samples:
    """The batch of a step: shapes of one sample's input and target (global), and the number of samples."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    batch_size: int
    micro_batches: int = 1
    dtype: Any = np.float32
    classes: int = 0  #: targets are integers below it; 0: floats like the outputs
    tokens: int = 0  #: inputs are integers below it; 0: floats, or tokens of the engine's Model
    documents: str = "joined"  #: how they share a sample, as ``--documents``


def analyze_engine(
    make: Callable[..., Any],
    axes: Mapping[str, int],
    samples: Samples,
    *,
    optimizer: Optimizer | None = None,
    checks: bool = True,
) -> StepAnalysis:
    """The dry run of the first step of an engine, on every rank.

    ``make`` is the engine's class, or a function that returns the engine and may take the mesh. ``checks``:
    whether replicas of gradients are compared, as in a first step.

    Raises UsageError if the engine reads values, which shapes do not have.
    """
    mailbox = Mailbox()
    ranks = DryRunRanks(axes, rank_grid(axes), mailbox, ["here"] * count_ranks(axes))
    sizes: dict[str, int] = {}
    notes: dict[str, None] = {}

    def step(rank: int) -> RankStep:
        recorder = Recorder(Meter(lenient=True))
        with metered(recorder.meter):
            mesh = ShapedMesh(ranks, position_of(rank, axes).coordinates, recorder, checks=checks)
            engine = make_engine(make, mesh, dtype=dtype_of(samples.dtype))
            with recorder.meter.taking("parameters", "parameters"):
                if isinstance(engine, LayeredEngine):
                    watch_storage(engine, recorder)
                else:
                    _drop_values(engine.engine if isinstance(engine, DistributedEngine) else engine)
            shapes = {name: engine.global_shape(name) for name in engine.names}
            sizes.update({name: prod(shape) for name, shape in shapes.items()})

            def compute() -> None:
                with recorder.phase(Phase("step", phase="forward and backward")):
                    engine.step(batch)

            prepared = _prepare_optimizer(optimizer or AdamW(), engine, recorder)
            with recorder.meter.taking("activations", BATCH_MEMORY):
                vocabulary = engine.model.vocabulary if isinstance(engine, LayeredEngine) else 0
                integers = replace(samples, classes=samples.classes or vocabulary, tokens=samples.tokens or vocabulary)
                batch = _make_batch(engine, integers, ShapedArray.new)
            recorded = _record_step(engine, prepared, recorder, compute)
            notes.update(recorder.meter.notes)
            return replace(recorded, shards=_shards_of_engine(engine, shapes, len(prepared.kinds)))

    with on_shapes():
        steps = mailbox.run([partial(step, rank) for rank in range(count_ranks(axes))])
    classes = [RankClass(step, [rank]) for rank, step in enumerate(steps)]
    return StepAnalysis(name_of(make), dict(axes), classes, samples.micro_batches, sum(sizes.values()), {}, list(notes))


def _shards_of_engine(
    engine: ShardedEngine, shapes: Mapping[str, tuple[int, ...]], states: int
) -> list[ParameterShard]:
    """As ``shards_of``; of an engine that is no list of layers, it is not known which layers use a parameter."""
    if isinstance(engine, LayeredEngine):
        return shards_of(engine, states)
    owned, records = engine.named(engine.owned), []
    for name, array in engine.parameters.items():
        updated = owned[name].nbytes if name in owned else 0
        requires = {"gradient": updated, "optimizer_state": states * updated, "gathered": 0}
        about = name, str(engine.sharding(name)), tuple(array.shape), shapes[name], str(array.dtype), array.nbytes
        records.append(ParameterShard(*about, array.nbytes, updated, "", (), requires, ()))
    return records


def _drop_values(engine: ShardedEngine) -> None:
    """Replace the engine's parameters by shapes."""
    if "parameters" not in engine.__dict__:
        if any(not isinstance(array, ShapedArray) for array in engine.parameters.values()):
            raise UsageError(
                f"{type(engine).__name__}: its property 'parameters' makes new arrays on each access, so a dry run "
                "cannot replace them by shapes: keep them in an attribute"
            )
        return
    engine.parameters = {
        name: array if isinstance(array, ShapedArray) else ShapedArray.new(np.shape(array), np.asarray(array).dtype)
        for name, array in engine.parameters.items()
    }
