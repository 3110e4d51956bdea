"""LayeredEngine: layers x mesh x layout x storage x schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from spmd_engine.arrays import random
from spmd_engine.arrays.backend import CPU, Array, Backend
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import Pending
from spmd_engine.engine import schedules
from spmd_engine.engine.base import Loss, ShardedEngine
from spmd_engine.engine.batch import Batch
from spmd_engine.engine.chunk import Chunk
from spmd_engine.engine.execution import Execution, Neighbours
from spmd_engine.engine.extras import Buffers, Extras, SideOutputs
from spmd_engine.engine.gathering import OpenParameters
from spmd_engine.engine.grouped import GroupedHoldings
from spmd_engine.engine.holdings import Index
from spmd_engine.engine.plan import PIPE, Plan, Storage, make_plan
from spmd_engine.engine.recompute import Recompute, check, segments
from spmd_engine.engine.reducer import Reducer
from spmd_engine.engine.stages import Division
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import ForwardContext, Layer
from spmd_engine.models import Model, layout_for
from spmd_engine.sharding.dealing import deal, undeal
from spmd_engine.sharding.layout import Layout
from spmd_engine.sharding.shards import Shards


class LayeredEngine(GroupedHoldings, ShardedEngine):
    """A model, a list of layers, run on a mesh.

    The layers' text is that of one device. What makes it any strategy, and any of them together, is said here:

    ``layout``      which letters the mesh axes cut (data, tensor, sequence, context parallel)
    ``storage``     which of parameters, gradients and optimizer state are in parts (ZeRO)
    ``schedule``    in what order the stages along axis ``pipe`` work on micro-batches
    ``stages``      which layers each stage has: evenly by number or by cost, or the first layer of each
    ``recompute``   of which layers a forward is repeated in the backward instead of kept
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh | None = None,
        layout: Layout | None = None,
        *,
        seed: int = 0,
        dtype: Any = np.float32,
        backend: Backend = CPU,
        storage: Storage = Storage(),  # noqa: B008 (immutable)
        schedule: schedules.Schedule | None = None,
        stages: Division = "even",
        recompute: Recompute = Recompute.NONE,
    ) -> None:
        self.model, self.seed, self.dtype, self.backend = model, seed, np.dtype(dtype), backend
        self.mesh = mesh if mesh is not None else Mesh()
        self.layout = layout if layout is not None else layout_for(model, self.mesh)
        for name, layer in model.layers:
            self._check_layout(name, layer)
        check(model, recompute)
        self.input_sharding = str(self.layout.spec(model.inputs))
        self.output_sharding = str(self.layout.spec(model.outputs))
        self._target_sharding = str(self.layout.spec(model.targets))
        pipe = self.group(PIPE) if self.mesh.axes.get(PIPE, 1) > 1 else None
        self.schedule = schedule or schedules.named("1f1b" if pipe else "sequential")
        plan = make_plan(
            model,
            self.mesh,
            self.layout,
            self.dtype.itemsize,
            storage=storage,
            stages=stages,
            chunks_per_stage=self.schedule.chunks,
        )
        self._store(dict(model.parameters()), plan, self.mesh, storage, self.dtype, backend)
        self._neighbours = Neighbours(pipe, len(plan.chunks), backend)
        self._program = lru_cache(partial(self.schedule.program, self._neighbours.stages, stage=self._neighbours.stage))
        self._program(1)  # raises if the schedule has no such stages
        self._extras = self._make_extras(plan)
        buffers = {layer: self._extras.buffers.of_layer(layer, model.layers[layer][1].buffers) for layer in plan.uses}
        self._open = OpenParameters(self._storages, plan.uses, buffers)
        passes = [plan.chunks[number] for number in plan.mine]
        self._reducer = Reducer(self._storages, plan.uses, passes)
        shards = [Shards(self.mesh, self.layout, name) for name, _ in model.layers]
        self._chunks = {
            number: Chunk(
                segments(model, layers, recompute), model.layers, shards, self._open, self._reducer, self._extras
            )
            for number, layers in zip(plan.mine, passes, strict=True)
        }
        # Not of a method: the engine would refer to itself, and its arrays outlive it until a collection.
        self._positions = lru_cache(maxsize=8)(partial(_positions, self.layout, self.mesh, backend))
        self.initialize()

    def _check_layout(self, name: str, layer: Layer) -> None:
        stream = dict.fromkeys((*layer.inputs.dims.split(), *layer.outputs.dims.split()))
        between = [letter for letter in stream if letter not in layer.inputs.whole + layer.outputs.whole]
        self.layout.check(name, {*stream, *layer.sizes}, layer.may_cut, layer.across, "".join(between))

    def _make_extras(self, plan: Plan) -> Extras:
        buffers = Buffers(self.model, sorted(plan.uses), self.mesh, self.layout, self.dtype, self.backend)
        return Extras(buffers, SideOutputs(self.model, self.mesh, self.layout))

    @property
    def buffers(self) -> Mapping[str, Array]:  # type: ignore[override]
        """The buffers of the layers on this rank: its blocks, by name."""
        return self._extras.buffers.arrays

    @property
    def buffer_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.model.buffers())

    def buffer_index(self, name: str) -> Index | None:
        if name not in self.buffers:
            return None
        buffer, shape = dict(self.model.buffers())[name]
        return self.layout.spec(buffer.dims).block(shape, self.mesh)

    def initialize(self) -> None:
        """Fill the parameters with initial values: functions of seed, name and global index alone."""
        for name, target in self.parameters.items():
            parameter, shape = self._described[name]
            target[...] = parameter.mean
            if parameter.std and target.size:
                key = random.key_of(self.seed, "initial", name)
                target += parameter.std * random.normal(key, shape, self.dtype, self.index(name), self.backend)

    def load_checkpoint(self, params: Mapping[str, Any]) -> None:
        for name, (_, shape) in {**self._described, **dict(self.model.buffers())}.items():
            if name not in params:
                raise UsageError(f"the checkpoint has no {name!r}; it has: {', '.join(sorted(params))}")
            if tuple(params[name].shape) != shape:
                raise UsageError(f"{name}: the checkpoint has shape {tuple(params[name].shape)}, the model {shape}")
            if name in self.parameters and self.index(name) is not None:  # of a number, others may be the owners
                self.parameters[name][...] = self.block(name, params[name])
            if name in self.buffers:
                self.buffers[name][...] = self.backend.asarray(np.asarray(params[name][self.buffer_index(name)]))
        self._extras.begin()
        self._open.close()

    def after_update(self) -> None:
        self._open.close()
        super().after_update()
        self._extras.buffers.apply()

    # --- inputs and outputs ------------------------------------------------------------------------------

    @property
    def target_sharding(self) -> str:
        return self._target_sharding

    def cut_rows(self, inputs: Array, targets: Array | None, *mask: Array) -> list[Array | None]:
        letters = self.model.inputs, self.model.targets, self.model.targets
        rows = zip((inputs, targets, *mask), letters, strict=False)
        return [x if x is None else deal(x, dims, self.layout, self.mesh, first=1) for x, dims in rows]

    def join_outputs(self, y: Array, label: str = "") -> Array:
        return undeal(super().join_outputs(y, label), self.model.outputs, self.layout, self.mesh)

    # --- forward and backward ----------------------------------------------------------------------------

    def forward(self, x: Array, ctx: ForwardContext | None = None) -> Array | None:
        """Outputs of this rank's block of inputs, at the model's first positions unless ``ctx`` says else.

        In a pipeline every stage is given inputs, only the first one uses more of them than their shape, and only
        the last has outputs; the others return None.
        """
        self.model.check_inputs(x)
        ctx = ctx or self._plain_context(x)
        if ctx.training:
            self._extras.begin()
        self._neighbours.begin(1)
        execution = Execution(self._chunks, self._neighbours, [ctx], [self.backend.asarray(x)], lambda m, y: y)
        execution.run(self._one_pass(schedules.Forward, self.plan.mine))
        self.tape.push(execution)
        if not self.is_training:  # else the backward begins with what is here
            self._open.close()
        return execution.output_gradients.pop((0, len(self.plan.chunks) - 1), None)

    def backward(self, grads: Array | None) -> dict[str, Array]:
        """Gradients by name, like ``owned``, summed over the batch: of this one micro-batch alone."""
        self._reducer.begin(1)
        execution = self.tape.pop()
        last = len(self.plan.chunks) - 1
        if last in self._chunks:
            if grads is None:
                raise UsageError("backward needs the gradient of the outputs on the ranks that have outputs")
            execution.output_gradients[0, last] = grads
        execution.run(self._one_pass(schedules.Backward, reversed(self.plan.mine)))
        self.input_gradient = execution.input_gradients.get((0, 0))
        self._reducer.finish()
        self._open.close()
        return {name: gradient.copy() for name, gradient in self.named(self._gradients).items()}

    def _one_pass(self, kind: type[schedules.Compute], chunks: Iterable[int]) -> schedules.Program:
        """Forwards or backwards of one micro-batch, with what is received before and sent after."""
        order = [kind(0, chunk) for chunk in chunks]
        if self._neighbours.stages == 1:
            return order
        return schedules.with_transfers(order, self._neighbours.chunks - 1, sends_unfinished=len(order))

    def _plain_context(self, x: Array) -> ForwardContext:
        length = self._summed_length(x)
        samples = None
        if self.is_training:
            samples = self._samples(self._whole(x))
        return self._context(length, samples)

    def _summed_length(self, x: Array) -> int:
        """The whole sequence's length, of which this rank's inputs may have a part."""
        if "s" not in self.model.inputs:
            return 1
        axes = self.layout.axes("s")
        return int(self.all_reduce(np.array(x.shape[1]), over=axes, label="length")) if axes else x.shape[1]

    def _samples(self, whole: int, first: int = 0) -> np.ndarray:
        """This rank's numbers of ``whole`` samples that are numbered from ``first``."""
        part = self.batch_span(whole)
        return np.arange(first + part.start, first + part.stop)

    def _context(self, length: int, samples: Array | None, step: int = 0) -> ForwardContext:
        xp = self.backend.xp
        inside, residual = self._positions(length)
        samples = xp.asarray(samples) if samples is not None else None
        return ForwardContext(inside, residual, samples, step, self.seed, training=self.is_training, length=length)

    # --- training ----------------------------------------------------------------------------------------

    @contextmanager
    def watched(self, watch: Callable[[str, Layer], Layer]) -> Iterator[None]:
        """Meanwhile ``watch(name, layer)`` takes the place of each layer here: to see what goes in and comes out."""
        with ExitStack() as stack:
            for chunk in self._chunks.values():
                stack.enter_context(chunk.watched(watch))
            yield

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        """As ShardedEngine.step; gradients are summed over ranks while the backward still runs."""
        count = self.count(batch)
        micro_batches = len(batch.micro_batches)
        self._reducer.begin(micro_batches)
        self._extras.begin()
        total = 0.0

        def lose(m: int, outputs: Array) -> Array:
            nonlocal total
            micro = batch.micro_batches[m]
            value, gradient = (loss or self.loss)(outputs, micro.targets, **micro.loss_options(count))
            total += value
            return gradient

        for micro in batch.micro_batches:
            self.model.check_inputs(micro.inputs)
        inputs = [self.backend.asarray(micro.inputs) for micro in batch.micro_batches]
        self._neighbours.begin(micro_batches)
        execution = Execution(self._chunks, self._neighbours, self._contexts(batch), inputs, lose)
        execution.run(self._program(micro_batches))
        whole = self._start_sum_loss(total)  # under way while the last gradients are
        beside = self._extras.side_outputs.start_sum()
        self._reducer.finish()
        self._open.close()
        self.gradients = self._gradients
        sums = beside.wait()
        self.side_outputs = self._extras.side_outputs.by_name(sums)
        return float(whole.wait()) + self._extras.side_outputs.loss(sums)

    def _contexts(self, batch: Batch) -> list[ForwardContext]:
        """Where each micro-batch is; samples are counted, and lengths summed, where the batch does not say."""
        contexts, first = [], 0
        for m, micro in enumerate(batch.micro_batches):
            samples = micro.samples
            if samples is None:
                whole = self._whole(micro.inputs)
                samples = self._samples(whole, first)
                first += whole
            known = micro.length if "s" in self.model.inputs else 1
            length = known if known is not None else self._summed_length(micro.inputs)
            ctx = self._context(length, samples, batch.step)
            contexts.append(replace(ctx, micro_batch=m, share=1 / len(batch.micro_batches), mask=micro.mask))
        return contexts

    def _whole(self, x: Array) -> int:
        """How many samples all ranks have together, of which those of ``x`` are this rank's."""
        axes = self.layout.axes("b")
        return int(self.all_reduce(np.array(len(x)), over=axes, label="samples")) if axes else len(x)

    def _sum_loss(self, value: float) -> float:
        return float(self._start_sum_loss(value).wait())

    def _start_sum_loss(self, value: float) -> Pending:
        """Over the batch, and from the last stage to all."""
        over = tuple(axis for axis in self.mesh.axes if axis in (*self.batch_axes, PIPE))
        if not over:
            return Pending.completed(value)
        return self.mesh.group(over).start_all_reduce(np.array(value, np.float64), label="loss")

    def loss(self, outputs: Array, targets: Array, **options: Any) -> tuple[float, Array]:
        """The model's own loss of this rank's blocks."""
        if options.get("mask") is not None:
            options["mask"] = self.backend.asarray(options["mask"])
        self.model.check_targets(targets)
        targets = self.backend.asarray(targets)
        return self.model.loss(Shards(self.mesh, self.layout, "loss"), outputs, targets, **options)


def _positions(layout: Layout, mesh: Mesh, backend: Backend, length: int) -> tuple[Array, Array]:
    """This rank's positions of a sequence, inside layers and on the residual stream."""
    inside, residual = (layout.positions(length, mesh, where) for where in ("inside", "residual"))
    return backend.xp.asarray(inside), backend.xp.asarray(residual)
