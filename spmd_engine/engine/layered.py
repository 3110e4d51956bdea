"""LayeredEngine: layers x mesh x layout x storage x schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.arrays import random
from spmd_engine.arrays.backend import CPU, Array, Backend
from spmd_engine.arrays.precision import accumulated_in, float_dtype, rounded
from spmd_engine.comm.agreement.rank_zero import on_all_ranks
from spmd_engine.comm.group import Group
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import Pending
from spmd_engine.engine.batch import Batch, MicroBatch, Scores, fractions_of
from spmd_engine.engine.contract import check_batch
from spmd_engine.engine.definition import Loss, Metric
from spmd_engine.engine.helpers import AssignedLayers
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.engine.pipeline import Recompute
from spmd_engine.engine.schedules.schedule import Backward, Forward, Schedule
from spmd_engine.engine.state.assignment import PIPE, Assignment, Division, Index, ZeroConfig
from spmd_engine.engine.state.engine_state import Copies, EngineState, StateReshard
from spmd_engine.engine.state.moving_state import MovingState, unpack
from spmd_engine.engine.zero.parameter_store import StoredEngine, check_shapes
from spmd_engine.errors import UsageError
from spmd_engine.layers.attention.kv_cache import Cache
from spmd_engine.layers.layer import ForwardContext, Layer
from spmd_engine.models import Model, layout_for
from spmd_engine.sharding.layout import Layout, block_of, in_order
from spmd_engine.sharding.shards import Shards

AT_A_TIME = 1 << 23  # bytes of a large parameter to load at a time, if its rows are cheap to read


class LayeredEngine(StoredEngine):
    """A model, a list of layers, run on a mesh.

    The layers are written for one device. These options select a strategy, or a combination of strategies:

    ``layout``      which letters the mesh axes shard (data, tensor, sequence, context parallel)
    ``storage``     which of parameters, gradients and optimizer state are sharded (ZeRO)
    ``schedule``    the order in which the stages along axis ``pipe`` work on micro-batches
    ``stages``      which layers each stage has: evenly by number or by cost, or the first layer of each
    ``recompute``   which layers repeat their forward in the backward, instead of keeping activations
    ``assign``      which layers helper ranks compute: "block3-5:rank2"

    ``schedule``, ``stages`` and ``recompute`` also take values of the command line: "zero-bubble", "0,3,7", "block".

    Parameters, and the frozen weights under adapters, are ``drawn``, or zeros until they are loaded. Unless ``placed``,
    this rank is outside the mesh and holds nothing, until ``reshard`` takes it onto another one. Unless ``trained``,
    the engine holds neither gradients nor masters, and its ``step`` and ``backward`` raise UsageError.
    """

    placed: EngineState  #: what stores and executes the model on this mesh, while the engine ``is_placed``
    assigned: AssignedLayers | None = None  #: what this rank computes for others while it is outside the mesh

    @checked(model="a Model; as_distributed also takes names and layers", mesh="a Mesh, as Mesh(data=2)")
    def __init__(
        self,
        model: Model,
        mesh: Mesh | None = None,
        layout: Layout | None = None,
        *,
        seed: int = 0,
        dtype: Any = None,
        backend: Backend = CPU,
        storage: ZeroConfig = ZeroConfig(),  # noqa: B008 (immutable)
        schedule: Schedule | str | None = None,
        stages: Division = "even",
        recompute: Recompute | str = Recompute.NONE,
        assign: str | None = None,
        drawn: bool = True,
        placed: bool = True,
        trained: bool = True,
    ) -> None:
        self.model, self.seed, self.backend, self._trained = model, seed, backend, trained
        # That of a job is there before ``__init__``.
        dtype = next(choice for choice in (dtype, self.dtype, np.float32) if choice is not None)
        self.dtype = float_dtype("LayeredEngine", dtype)
        self.mesh = mesh if mesh is not None else Mesh()
        if not placed:
            return
        self._install(
            EngineState(
                model,
                self.mesh,
                layout if layout is not None else layout_for(model, self.mesh),
                dtype=self.dtype,
                backend=backend,
                storage=storage,
                schedule=schedule,
                stages=stages,
                recompute=recompute,
                assign=assign,
                trained=trained,
                together=True,
            )
        )
        if drawn:
            self.initialize()

    def _install(self, placed: EngineState) -> None:
        """Use this placement of the model from now on."""
        self.placed, self.mesh, self.layout, self.store = placed, placed.mesh, placed.layout, placed.store
        self.input_sharding = str(self.layout.spec(self.model.inputs))
        self.output_sharding = str(self.layout.spec(self.model.outputs))
        self._target_sharding = str(self.layout.spec(self.model.targets))
        self._summed_axes = tuple(axis for axis in self.mesh.axes if axis in (*self.batch_axes, PIPE))
        self._shards: dict[str, Shards] = {}  # for the loss and metrics

    @property
    def assignment(self) -> Assignment:
        """This rank's share of the model."""
        return self.store.assignment

    @property
    def schedule(self) -> Schedule:
        """The order in which stages work on micro-batches."""
        return self.placed.schedule

    @property
    def buffers(self) -> Mapping[str, Array]:  # type: ignore[override]
        """This rank's blocks of the layers' buffers, by name."""
        return {**self.placed.extras.buffers.arrays, **self.placed.frozen.arrays}

    @property
    def buffer_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.model.buffers())

    def buffer_index(self, name: str) -> Index | None:
        frozen = self.placed.frozen.index
        return frozen[name] if name in frozen else self.placed.extras.buffers.index.get(name)

    @checked(mesh="a Mesh, or None on a rank outside of it")
    def reshard(
        self,
        mesh: Mesh | None,
        layout: Layout | None = None,
        *,
        optimizer: Optimizer | None = None,
        states: Sequence[MovingState] = (),
        model: Model | None = None,
        among: Group | None = None,
        copies: Copies | None = None,
        fill: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        """Continue on another mesh of all or some of the same ranks, in any order, with the same parameters, buffers
        and, if the ``optimizer`` is given, its state; ``states`` move with the engine, as a cache of sequences does.

        A rank outside the new mesh passes None for it: it sends its blocks to the others and keeps no arrays. Such a
        rank can be taken back: ``among`` is a group of all ranks of both meshes; None: those of the old mesh.
        ``options`` are those of the constructor that control the computation: ``storage``, ``schedule``, ``stages``,
        ``recompute``; ``model`` is this model with layers for them, if they differ. Collective over ``among``. The
        ledger of the old mesh counts the transfer, unless ``among`` has another, and the old mesh stays open.
        With ``copies`` of all elements that ranks lack, or if ``fill`` fills the arrays on the ranks of the new mesh,
        nothing is transferred. Raises UsageError on all ranks if the model cannot be placed on the mesh, or its arrays
        not filled without a transfer; engine and optimizer are then unchanged.
        """
        move, model = StateReshard(self, optimizer, among, copies), model or self.model

        def placed() -> EngineState | None:
            if mesh is None:
                return None
            chosen_layout = layout if layout is not None else layout_for(model, mesh)
            how: dict[str, Any] = {"dtype": self.dtype, "backend": self.backend, "trained": self._trained}
            return EngineState(model, mesh, chosen_layout, **how, **options)

        state = on_all_ranks(move.group, placed, catch=Exception if copies else (UsageError, OSError))
        before, state_before = vars(self).copy(), dict(optimizer.state) if optimizer else {}
        packed = [one.pack(self) if self.is_placed else (None, {}) for one in states]
        try:
            self.model = model
            self.gradients, self.input_gradient = {}, None  # those of the last step are on the old mesh
            if state is not None:
                self._install(state)
            self.assigned = None
            move.finish(self if state else None, fill)
        except UsageError:
            vars(self).clear()
            vars(self).update(before)
            if optimizer:
                optimizer.state = state_before
            raise
        if state is not None:
            self.filled()
        elif self.is_placed:
            del self.placed, self.store
        unpack(states, packed, self if state else None, move.group, self.backend)

    @property
    def is_placed(self) -> bool:
        """Whether this rank is on the mesh of the engine: False before or after its time there, see ``reshard``."""
        return "placed" in vars(self)

    def initialize(self, frozen: bool = True) -> None:
        """Fill the parameters, and with ``frozen`` the frozen weights, with initial values: functions of seed, name and
        global index alone. Collective."""

        def draw(name: str, target: Array, index: Index | None) -> None:
            parameter, shape = self.store.described[name]
            self._draw(target, name, shape, parameter.mean, parameter.std, index)

        self.store.fill(draw)
        buffers = self.buffers
        for name, (buffer, shape) in self.model.buffers() if frozen else ():
            if buffer.frozen and name in buffers:
                self._draw(buffers[name], name, shape, buffer.initial, buffer.std, self.buffer_index(name))

    def _draw(
        self, target: Array, name: str, shape: tuple[int, ...], mean: float, std: float, index: Index | None
    ) -> None:
        """Fill ``target``, this rank's part at ``index`` of an array of the whole ``shape``."""
        target[...] = mean
        if std and target.size:
            key = random.key_of(self.seed, "initial", name)
            values = std * random.normal(key, shape, accumulated_in(self.dtype), index, self.backend)
            values += mean
            target[...] = rounded(values, target.dtype)

    def load_checkpoint(self, params: Mapping[str, Any]) -> None:
        described = {**self.store.described, **dict(self.model.buffers())}
        check_shapes(params, {name: shape for name, (_, shape) in described.items()})
        for name in described:
            if name in self.parameters and self.index(name) is not None:  # a scalar may belong to another rank
                self._load(self.parameters[name], params[name], self.index(name))
            if name in self.buffers:
                self._load(self.buffers[name], params[name], self.buffer_index(name))
        self.filled()

    def _load(self, target: Array, source: Any, index: Index | None) -> None:
        """Copy a part of a whole array; a large part some rows at a time, if ``source.rows_are_cheap``."""
        if not index:  # a scalar
            target[...] = rounded(self.backend.asarray(source[()]), target.dtype)
            return
        rows = index[0]
        step = max(1, rows.stop - rows.start)
        if getattr(source, "rows_are_cheap", False) and target.nbytes > AT_A_TIME:
            step = max(1, AT_A_TIME * step // target.nbytes)
        for first in range(rows.start, rows.stop, step):
            part = slice(first, min(first + step, rows.stop))
            values = rounded(self.backend.asarray(source[(part, *index[1:])]), target.dtype)
            target[part.start - rows.start : part.stop - rows.start] = values

    is_filled_in_place = True

    def filled(self) -> None:
        self.placed.extras.begin()
        self.placed.unsharder.changed()
        self.store.publish()

    def after_update(self) -> None:
        self.placed.unsharder.changed()
        super().after_update()
        self.placed.extras.apply()

    # --- inputs and outputs ------------------------------------------------------------------------------

    @property
    def target_sharding(self) -> str:
        return self._target_sharding

    def cut_rows(self, inputs: Array, targets: Array | None, *mask: Array) -> list[Array | None]:
        self.model.check_samples(inputs)
        letters = self.model.inputs, self.model.targets, self.model.targets
        rows = zip((inputs, targets, *mask), letters, strict=False)
        return [x if x is None else block_of(x, dims, self.layout, self.mesh, first=1) for x, dims in rows]

    def join_outputs(self, y: Array, label: str = "") -> Array:
        return in_order(super().join_outputs(y, label), self.model.outputs, self.layout, self.mesh)

    # --- forward and backward ----------------------------------------------------------------------------

    def forward(self, x: Array, ctx: ForwardContext | None = None, *, cache: Cache | None = None) -> Array | None:
        """Outputs for this rank's block of inputs, at the model's first positions unless ``ctx`` has others.

        With a ``cache``, in inference mode, ``x`` holds the next positions of the cached sequences, whole: see
        ``decode_inputs``, which also makes contexts for sequences that grow by different numbers of positions.
        In a pipeline every stage gets inputs, but only the first uses more than their shape; only the last has outputs,
        the others return None.
        """
        self.model.check_inputs(x)
        if cache is not None:
            from spmd_engine.engine.inference import decode_inputs

            decoding = decode_inputs(self, x, cache)
            x, ctx = decoding.inputs, decoding.ctx
        ctx = ctx or self._plain_context(x)
        passes = self.placed.passes if ctx.cache is None and ctx.wanted is None else self.placed.own_passes
        execution = passes.begin("forward", [ctx], [self.converted(self.backend.asarray(x))], lambda m, y: y)
        execution.run(passes.one_pass(Forward))
        self.tape.push(execution)
        if ctx.cache is not None:
            ctx.cache.end()
        if not self.is_training:  # in training the backward begins with these parameters
            self.placed.unsharder.release()
        return execution.output_gradients.pop((0, passes.neighbours.chunks - 1), None)

    def backward(self, grads: Array | None) -> dict[str, Array]:
        """Gradients by name, like ``owned``, summed over the batch: those of this micro-batch alone."""
        self.placed.reducer.begin(1)
        execution, passes = self.tape.pop(), self.placed.passes
        last = passes.neighbours.chunks - 1
        if last in passes.chunks:
            if grads is None:
                raise UsageError("backward needs the gradient of the outputs on the ranks that have outputs")
            execution.output_gradients[0, last] = grads
        passes.neighbours.order("backward", execution.contexts, execution.number)
        execution.run(passes.one_pass(Backward))
        self.input_gradient = execution.input_gradients.get((0, 0))
        self.placed.reducer.finish()
        self.placed.unsharder.release()
        return {name: gradient.copy() for name, gradient in self.named(self.store.gradients).items()}

    def _on_own_backend(self, micro: MicroBatch) -> MicroBatch:
        return micro  # after targets are checked on the host

    def outputs_of(self, micro: MicroBatch) -> Array | None:
        if micro.documents is None:
            return self.forward(micro.inputs)
        ctx = replace(self._plain_context(micro.inputs), documents=micro.documents.on(self.backend))
        return self.forward(micro.inputs, ctx)

    def _plain_context(self, x: Array) -> ForwardContext:
        length = self._summed_length(x)
        if not self.is_training:
            return self._context(length, None)
        samples = self._samples(self._count_samples(x))
        return self._context(length, samples, micro_batch=next(self.placed.extras.passes))

    def _summed_length(self, x: Array) -> int:
        """The length of the whole sequence, of which this rank's inputs may be a part. Collective if it is sharded."""
        if "s" not in self.model.inputs:
            return 1
        axes = self.layout.axes("s")
        return int(self.all_reduce(np.array(x.shape[1]), over=axes, label="length")) if axes else x.shape[1]

    def _samples(self, count: int, first: int = 0) -> np.ndarray:
        """The numbers of this rank's samples, among ``count`` samples numbered from ``first``."""
        part = self.batch_span(count)
        return np.arange(first + part.start, first + part.stop)

    def _context(self, length: int, samples: Array | None, step: int = 0, **others: Any) -> ForwardContext:
        inside, residual = self.placed.positions(length)
        samples = self.backend.xp.asarray(samples) if samples is not None else None
        training = self.is_training
        return ForwardContext(inside, residual, samples, step, self.seed, training=training, length=length, **others)

    # --- training ----------------------------------------------------------------------------------------

    @contextmanager
    def wrapped(self, wrap: Callable[[str, Layer], Layer]) -> Iterator[None]:
        """In this context ``wrap(name, layer)`` replaces each layer of this rank, to observe its inputs and outputs."""
        with ExitStack() as stack:
            for chunk in self.placed.passes.chunks.values():
                stack.enter_context(chunk.wrapped(wrap))
            yield

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        """As ShardedEngine.step; gradients are summed over ranks while the backward still runs."""
        check_batch(batch)
        count = self.count(batch)
        micro_batches = len(batch.micro_batches)
        self.placed.reducer.begin(micro_batches)
        self.placed.extras.begin()
        scores = Scores(loss or self.loss, self.metrics)

        def loss_gradient(m: int, outputs: Array) -> Array:
            return rounded(scores.add(outputs, batch.micro_batches[m], count / self.loss_scale), self.dtype)

        for micro in batch.micro_batches:
            self.model.check_inputs(micro.inputs)
        inputs = [self.converted(self.backend.asarray(micro.inputs)) for micro in batch.micro_batches]
        passes, contexts = self.placed.passes, self._contexts(batch)
        program = passes.program(micro_batches)
        passes.begin("step", contexts, inputs, loss_gradient).run(program)
        shares = self._start_sum(scores.shares)  # overlaps the last reductions of gradients
        pending_side_outputs = self.placed.extras.side_outputs.start_sum()
        self.placed.reducer.finish()
        self.placed.unsharder.release()
        self.gradients = self.store.gradients
        side_sums = pending_side_outputs.wait()
        self.side_outputs = self.placed.extras.side_outputs.by_name(side_sums)
        sums = shares.wait()
        self.training_metrics = fractions_of(self.metrics, sums, count)
        return float(sums[0]) / self.loss_scale + self.placed.extras.side_outputs.loss(side_sums)

    def _contexts(self, batch: Batch) -> list[ForwardContext]:
        """The context of each micro-batch. Counts samples, and sums lengths, that the batch does not give."""
        contexts, first = [], 0
        for m, micro in enumerate(batch.micro_batches):
            samples = micro.samples
            if samples is None:
                count = self._count_samples(micro.inputs)
                samples = self._samples(count, first)
                first += count
            given_length = micro.length if "s" in self.model.inputs else 1
            length = given_length if given_length is not None else self._summed_length(micro.inputs)
            mask = None if micro.mask is None else self.backend.asarray(micro.mask)
            documents = None if micro.documents is None else micro.documents.on(self.backend)
            of_step = {"share": 1 / len(batch.micro_batches), "scale": self.loss_scale}
            ctx = self._context(length, samples, batch.step, micro_batch=m, mask=mask, documents=documents, **of_step)
            contexts.append(ctx)
        return contexts

    def _count_samples(self, x: Array) -> int:
        """The number of samples of all ranks; those of ``x`` are this rank's. Collective if they are sharded."""
        axes = self.layout.axes("b")
        return int(self.all_reduce(np.array(len(x)), over=axes, label="samples")) if axes else len(x)

    def _sum_shares(self, shares: np.ndarray) -> np.ndarray:
        return self._start_sum(shares).wait()

    def _start_sum(self, shares: np.ndarray) -> Pending:
        """Start to sum ``shares`` over the batch axes, and over ``pipe``, so that all stages have those of the last."""
        if not self._summed_axes:
            return Pending.completed(shares)
        over, counted = self.mesh.summed_over(self._summed_axes)
        return self.mesh.group(over).start_all_reduce(shares if counted else np.zeros_like(shares), label="loss")

    def loss(self, outputs: Array, targets: Array, **options: Any) -> tuple[float, Array]:
        """The model's loss on this rank's blocks."""
        return self._call_with_targets(self.model.loss, "loss", outputs, targets, **options)

    @property
    def metrics(self) -> Mapping[str, Metric]:  # type: ignore[override]
        """The model's metrics on this rank's blocks."""
        return {name: partial(self._call_with_targets, metric, name) for name, metric in self.model.metrics.items()}

    def _call_with_targets(self, function: Callable, label: str, outputs: Array, targets: Array, **options: Any) -> Any:
        """The result of a loss or a metric of the model."""
        if options.get("mask") is not None:
            options["mask"] = self.backend.asarray(options["mask"])
        self.model.check_targets(targets)
        targets = self.backend.asarray(targets)
        if label not in self._shards:
            self._shards[label] = Shards(self.mesh, self.layout, label)
        return function(self._shards[label], outputs, targets, **options)
