"""``user_engine``: one step of an engine of a user's own, or of a page of ``strategies``, run on shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.backend import on_shapes
from spmd_engine.arrays.meta.meter import Meter, metered
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, make_batch
from spmd_engine.engine.distributed import DistributedEngine
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.optimizers import AdamW, Optimizer
from spmd_engine.engine.user_engine import make_engine, name_of
from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.engine import watch_storage
from spmd_engine.planning.dry_run.rank_classes import every_rank
from spmd_engine.planning.dry_run.recorder import Phase, Recorder
from spmd_engine.planning.dry_run.shaped_mesh import ForetoldRanks, MeetingPoint, ShapedMesh
from spmd_engine.planning.dry_run.step_analysis import NORM, UPDATE, RankClass, RankStep, StepAnalysis


@dataclass(frozen=True)
class Samples:
    """What an engine is given in a step: sizes of one sample's input and target, whole, and how many there are."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    batch_size: int
    micro_batches: int = 1
    dtype: Any = np.float32
    classes: int = 0  #: targets are whole numbers below it; 0: numbers like the outputs

    def batch(self, engine: ShardedEngine) -> Batch:
        """A rank's block of them."""

        tokens = isinstance(engine, LayeredEngine) and engine.model.vocabulary

        def make(shape: tuple[int, ...], whole_numbers: int) -> Any:
            return np.zeros(shape, np.int64) if whole_numbers else ShapedArray.new(shape, self.dtype)

        def load(rows: np.ndarray) -> Sequence[Any]:
            x = make((len(rows), *self.inputs), tokens)
            return x, make((len(rows), *self.targets), tokens or self.classes)

        return make_batch(load, self.batch_size, self.micro_batches, engine, count=self.batch_size * prod(self.targets))


def analyze_engine(
    make: Callable[..., Any],
    axes: Mapping[str, int],
    samples: Samples,
    *,
    optimizer: Optimizer | None = None,
    parameters: Mapping[str, Sequence[int]] | None = None,
    checks: bool = True,
    nodes: Sequence[str] | None = None,
) -> StepAnalysis:
    """The first step of the engine that ``make`` makes, a class or a function that may take the mesh, foretold.

    Its parameters are those it has when made, or, with ``parameters``, whole shapes by name, those it has when it has
    loaded such a checkpoint. ``checks``: whether replicas of gradients are compared, as in a first step. Every rank
    is looked at. Raises UsageError where the engine's own code looks at values, which shapes have not.
    """
    meeting = MeetingPoint()
    ranks = ForetoldRanks(axes, every_rank(axes), meeting, nodes or ["here"] * prod(axes.values()))
    sizes: dict[str, int] = {}
    notes: dict[str, None] = {}

    def step(rank: int) -> RankStep:
        recorder = Recorder(Meter(lenient=True))
        with metered(recorder.meter):
            where = map(int, np.unravel_index(rank, tuple(axes.values())))
            mesh = ShapedMesh(ranks, dict(zip(axes, where, strict=True)), recorder, checks=checks)
            engine = make_engine(make, mesh)
            with recorder.meter.taking("parameters", "parameters"):
                if parameters is not None:
                    engine.load_checkpoint({name: _Whole(shape, samples.dtype) for name, shape in parameters.items()})
                if isinstance(engine, LayeredEngine):
                    watch_storage(engine, recorder)
                else:
                    _forget_values(engine.engine if isinstance(engine, DistributedEngine) else engine)
            sizes.update({name: prod(engine.global_shape(name)) for name in engine.names})
            found = _step_of(engine, copy(optimizer or AdamW()), recorder, samples)
            notes.update(recorder.meter.notes)
            return found

    with on_shapes():
        steps = meeting.run([lambda rank=rank: step(rank) for rank in range(prod(axes.values()))])
    classes = [RankClass(each, [rank]) for rank, each in enumerate(steps)]
    return StepAnalysis(name_of(make), dict(axes), classes, samples.micro_batches, sum(sizes.values()), {}, list(notes))


def _forget_values(engine: ShardedEngine) -> None:
    """Shapes in the place of its parameters."""
    if "parameters" not in engine.__dict__:
        if any(not isinstance(each, ShapedArray) for each in engine.parameters.values()):
            raise UsageError(f"{type(engine).__name__}: parameters are made anew each time they are asked for")
        return
    engine.parameters = {
        name: each if isinstance(each, ShapedArray) else ShapedArray.new(np.shape(each), np.asarray(each).dtype)
        for name, each in engine.parameters.items()
    }


class _Whole:
    """A whole parameter of a checkpoint, of which parts are read."""

    slices_are_copies = True

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.shape, self.dtype, self.ndim = tuple(shape), np.dtype(dtype), len(shape)

    def __getitem__(self, index: Any) -> ShapedArray:
        return ShapedArray.new(ShapedArray(self.shape, self.dtype)[index].shape, self.dtype)


def _step_of(engine: ShardedEngine, optimizer: Optimizer, recorder: Recorder, samples: Samples) -> RankStep:
    meter = recorder.meter
    optimizer.state = {}
    with meter.taking("optimizer state", "optimizer"):
        optimizer.prepare(engine)
    with meter.taking("activations", "the batch"):
        batch = samples.batch(engine)
    before = {kind: size for kind, size in meter.held.items() if size}
    recorder.restart()
    with recorder.phase(Phase("step", phase="forward and backward")):
        engine.step(batch)
    with recorder.phase(Phase("gradient norm", phase=NORM)):
        engine.gradient_norm()
    with recorder.phase(Phase("update", phase=UPDATE)):
        optimizer.update(engine, engine.gradients, step=1, rate=1.0)
    sent, peak = recorder.finish()
    return RankStep(engine.mesh.coordinates, recorder.computations, sent, recorder.timeline, peak, (), before)
