"""ShardedEngine: what every sharded model inherits."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.precision import dtype_of, is_float, rounded
from spmd_engine.arrays.updates import total_of_squares
from spmd_engine.comm import Group, Ledger
from spmd_engine.comm.mesh import Collectives, Mesh, Over
from spmd_engine.comm.notation import Spec
from spmd_engine.engine import contract
from spmd_engine.engine.batch import Batch, Evaluation, MicroBatch, Scores, Tape, Tapes, fractions_of
from spmd_engine.engine.definition import EngineDefinition, Loss
from spmd_engine.engine.state.assignment import Index
from spmd_engine.errors import UnknownParameter, UsageError
from spmd_engine.sharding import Rectangle
from spmd_engine.sharding.placement import Placement, exchange_placements, exchange_shapes

if TYPE_CHECKING:
    from spmd_engine.engine.inference import Writer


@dataclass(frozen=True)
class Shard:
    """A rank's part of an array: ``data`` is ``whole[index]``."""

    index: Index
    data: Array


_making: ContextVar[dict[str, Any]] = ContextVar("making", default={})  # noqa: B039 (nothing changes it)


@contextmanager
def making_on(backend: Backend, dtype: Any = None) -> Iterator[None]:
    """Engines that are made in this context have this backend, and ``dtype``, before their ``__init__`` begins."""
    token = _making.set({"backend": backend} | ({} if dtype is None else {"dtype": dtype}))
    try:
        yield
    finally:
        _making.reset(token)


class ShardedEngine(Collectives, EngineDefinition):
    """A sharded model: every rank runs the same program on its own shard.

    A subclass defines the members of ``EngineDefinition`` (``engine/definition.py``): three methods and, to train,
    save, show and verify the model, some declarations. It need not call ``super().__init__()``.

    It inherits collectives (``send``, ``receive``, ``all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all``,
    ``broadcast``, ``barrier``), over the whole world or over ``over="data"``; tapes and an inference mode; ``block``,
    ``gather``, ``step``, ``evaluate``, ``inference_loop``.
    """

    gradients: Mapping[str, Array] = MappingProxyType({})  #: those of the last step, like ``owned``
    backend: Backend = CPU  #: where its arrays are; ``xp`` is its array module
    dtype: Any = None  #: that it computes in: that of a job; None: that of the arrays that it is given
    _known_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # global shapes, while a placement is computed
    #: Metrics of the last step's batch, before its update: the fraction of targets that satisfy each.
    training_metrics: Mapping[str, float] = MappingProxyType({})
    loss_scale: float = 1.0  #: factor of the gradients of a step, not of its loss: see ``training/loss_scale.py``
    _is_checked: bool = False  # whether its declarations have been checked
    checks_gradients: bool = True  #: whether the names and shapes of a user's gradients are checked
    checks_replicas: bool = True  #: whether the next step compares gradients between ranks with the same block

    def __new__(cls, *args: Any, **options: Any) -> Self:
        engine = super().__new__(cls)
        vars(engine).update(_making.get())
        return engine

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        contract.guard_engine(cls)

    @property
    def xp(self) -> ModuleType:
        """The array module of its backend: NumPy or CuPy."""
        return self.backend.xp

    # --- position on the mesh ----------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The mesh of this engine: by default all ranks on one axis, ``data``."""
        if "_mesh" not in self.__dict__:
            self._mesh = Mesh()
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @property
    def device_id(self) -> int:
        """The rank of this device in the world."""
        return self.mesh.rank

    @property
    def num_devices(self) -> int:
        """The number of ranks in the world."""
        return self.mesh.size

    @property
    def ledger(self) -> Ledger:
        return self.mesh.ledger

    def group(self, over: Over = None) -> Group:
        return self.mesh.group(over)

    # --- arrays by name -----------------------------------------------------------------------------------

    def gather_buffer(self, name: str, *, root: int | None = None) -> Array | None:
        """As ``gather``, for a buffer."""
        return self._gathered(name, self.buffers.get(name), False, root)

    def sharding(self, name: str) -> Spec:
        """The sharding of a parameter."""
        contract.check_dict(self, "shardings")
        if name in self.shardings:
            return contract.read_sharding(self, f"shardings[{name!r}]", self.shardings[name])
        if name not in self.parameters:
            raise self._unknown(name)
        return Spec.parse(" ".join("ijklmnop"[: np.ndim(self.parameters[name])]))

    def _unknown(self, name: str) -> UnknownParameter:
        return UnknownParameter(name, self.names, lack="" if self.names else contract.lack_of_parameters(self))

    def owned_sharding(self, name: str) -> Spec:
        """The sharding of a parameter's gradients and optimizer state: by default, that of the parameter."""
        return self.sharding(name)

    def index(self, name: str) -> Index | None:
        """The part of a whole parameter that this rank stores; None if none. Collective if sizes are not known."""
        return self.sharding(name).block(self.global_shape(name), self.mesh)

    def owned_index(self, name: str) -> Index | None:
        """The part of a whole parameter that this rank updates, and whose gradients and optimizer state it holds."""
        return self.owned_sharding(name).block(self.global_shape(name), self.mesh)

    def addressable_shard(self, name: str) -> Shard | None:
        """This rank's part of a parameter, and its place in the whole; None if this rank stores none.

        Raises UsageError if the model has no such parameter.
        """
        if name not in self.names:
            raise self._unknown(name)
        index = self.index(name)
        return None if index is None else Shard(index, self.parameters[name])

    def block(self, name: str, array: Any, owned: bool = False) -> Array:
        """This rank's part (if ``owned``, the part that it updates) of a whole array, which is read only by slices.

        The result is a contiguous copy, since it will be updated in place. Floats are converted to the engine's
        ``dtype``, if it has one; integers, bools and complex numbers are not. An array with an attribute
        ``slices_are_copies``, such as those of a ``Checkpoint``, is not copied twice.
        """
        if not hasattr(array, "shape"):
            described = contract.described(array)
            raise UsageError(f"block({name!r}, ...): {described} is no array; make it one, by numpy.asarray")
        part = array[self._index_in(name, array, owned)]
        block = _copy_to_backend(part, self.backend, fresh=getattr(array, "slices_are_copies", False))
        return block if owned else self.converted(block)

    def converted(self, x: Array) -> Array:
        """``x`` in the engine's ``dtype``, if it has one, and ``x`` has floats."""
        return x if self.dtype is None or not is_float(x.dtype) else rounded(x, dtype_of(self.dtype))

    def _index_in(self, name: str, array: Any, owned: bool) -> Any:
        """The index of this rank's part in a whole array."""
        if name not in self.shardings and not owned:
            return tuple(slice(0, length) for length in array.shape)
        # By the array's own shape: during a load, the engine may not know the shapes of its parameters yet.
        spec = self.owned_sharding(name) if owned else self.sharding(name)
        contract.check_letters(self, name, spec, array)
        return spec.block(tuple(array.shape), self.mesh)

    def global_shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a parameter. Collective over the axes that shard it."""
        if name not in self.parameters:
            raise self._unknown(name)
        if name in self._known_shapes:
            return self._known_shapes[name]
        shape = list(self.parameters[name].shape)
        for dim, (_, axes) in enumerate(self.sharding(name)):
            for axis in reversed(axes):
                shape[dim] = int(self.all_reduce(np.array(shape[dim]), over=axis, label="shape"))
        return tuple(shape)

    def placement(self, owned: bool = False) -> Placement:
        """The part of every array that each rank stores, or (``owned``) of every parameter that it updates.

        Ranks are those of ``group()``.
        Collective over the world: two all_gathers for all arrays together.
        """
        blocks = {name: (self.sharding(name), np.shape(block)) for name, block in self.parameters.items()}
        self._known_shapes = exchange_shapes(self.group(), self.mesh, blocks)
        try:
            held = self._held_here(owned)
        finally:
            del self._known_shapes
        return exchange_placements(self.group(), {"": held})[""]

    def _held_here(self, owned: bool) -> dict[str, tuple[np.dtype, Rectangle]]:
        """Dtypes and rectangles of the arrays that this rank holds. Collective if shapes are not known."""
        indices = {name: (self.owned_index if owned else self.index)(name) for name in self.names}
        indices |= {name: self.buffer_index(name) for name in self.buffer_names if not owned}
        rectangles = {name: Rectangle.of(index) for name, index in indices.items() if index is not None}
        arrays = {**self.parameters, **self.buffers}
        return {name: (arrays[name].dtype, rectangle) for name, rectangle in rectangles.items()}

    def gather(self, name: str, *, root: int | None = None) -> Array | None:
        """The whole parameter, on every rank or only on ``root``. Collective over the world.

        Raises MismatchError on all ranks, instead of a hang, if a rank ends or gathers another array.
        """
        return self._gathered(name, self.parameters.get(name), False, root)

    def gather_owned(self, name: str, arrays: Mapping[str, Array], *, root: int | None = None) -> Array | None:
        """As ``gather``, for arrays like ``owned`` (``gradients``, a kind of optimizer state)."""
        return self._gathered(name, self.named(arrays).get(name), True, root)

    def _gathered(self, name: str, part: Array | None, owned: bool, root: int | None) -> Array | None:
        from spmd_engine.engine.gather import assemble

        return assemble(self, name, part, owned, root)

    def counts_here(self, name: str) -> bool:
        """Whether a sum counts this rank's part of a parameter: on one of the ranks that own the same part."""
        sharded_axes = self.owned_sharding(name).axes
        return all(coordinate == 0 for axis, coordinate in self.mesh.coordinates.items() if axis not in sharded_axes)

    def gradient_norm(self) -> float:
        """The 2-norm of the whole gradient, each element counted once. Collective over the world."""
        total = total_of_squares(self._counted_gradients())
        if not self._counts_all:
            total = float(self.all_reduce(np.array(total, np.float64), label="gradient norm"))
        return total**0.5

    @property
    def _counts_all(self) -> bool:
        """Whether every rank counts the whole gradient, so that no sum over ranks is needed."""
        return False

    def _counted_gradients(self) -> Iterable[Array]:
        """The flat gradients that this rank counts in a sum over ranks."""
        named = self.named(self.gradients).items()
        return (backend_of(g).xp.ravel(g) for name, g in named if self.counts_here(name))

    # --- micro-batches in flight --------------------------------------------------------------------------

    @property
    def _tapes(self) -> Tapes:
        return vars(self).setdefault("_tape_store", Tapes())

    @property
    def tape(self) -> Tape:
        """The stack of the current micro-batch; in inference mode, one that stores nothing."""
        return self._tapes.current

    def micro_batch(self, index: Hashable) -> AbstractContextManager[None]:
        """``with engine.micro_batch(3): ...``: the forward and backward inside use the tape of micro-batch 3."""
        return self._tapes.select(index)

    def inference(self) -> AbstractContextManager[None]:
        """``with engine.inference(): ...``: forwards save nothing."""
        return self._tapes.off()

    @property
    def is_training(self) -> bool:
        return self._tapes.recording

    # --- training ----------------------------------------------------------------------------------------

    def check_declared(self, training: bool = False) -> None:
        """Raise UsageError for parameters or shardings that do not fit together (checked once), or inputs and targets
        that are sharded differently, whose gradients do not sum to those of the loss. Collective."""
        if not self._is_checked:
            contract.check_declared(self, training)
            self._is_checked = True
        inputs, targets = (
            spec.cuts_of(spec.letters[0]) if spec.dims else ()
            for spec in map(self._spec, ("input_sharding", "target_sharding"))
        )
        if inputs and targets != inputs:
            raise UsageError(
                f'inputs are "{self.input_sharding}", targets "{self.target_sharding}": declare in output_sharding (or '
                f"target_sharding) that the batch is sharded over {','.join(axis for axis, _ in inputs)} there too"
            )

    def _spec(self, attribute: str) -> Spec:
        return contract.read_sharding(self, attribute, getattr(self, attribute))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that shard the targets, over which the loss is summed."""
        return self._spec("target_sharding").axes

    def batch_span(self, samples: int) -> slice:
        """This rank's part of ``samples`` samples, the first dim of its inputs."""
        spec = self._spec("input_sharding")
        return spec.part(0, samples, self.mesh) if spec.dims else slice(0, samples)

    def cut_rows(self, inputs: Array, targets: Array | None, *mask: Array) -> list[Array | None]:
        """This rank's block, by the shardings, of samples whose other dims are whole."""
        for attribute, x in (("input_sharding", inputs), ("target_sharding", targets)):
            if x is not None:
                contract.check_dims(self, attribute, x)
        shardings = (self.input_sharding, self.target_sharding, self.target_sharding)
        return [_shard_row(x, text, self.mesh) for x, text in zip((inputs, targets, *mask), shardings, strict=False)]

    def join_outputs(self, y: Array, label: str = "") -> Array:
        """The whole outputs, from the blocks of all ranks. Collective over the axes that shard them."""
        return Spec.parse(self.output_sharding).gather(y, self.mesh, label=label) if self.output_sharding else y

    def count(self, batch: Batch) -> float:
        """The number of terms in the global mean: all targets of all ranks that are not masked."""
        if batch.count is not None:
            return batch.count
        local = sum(float(m.targets.size if m.mask is None else m.mask.sum()) for m in batch.micro_batches)
        return float(self._sum_over_batch(np.array(local, np.float64)))

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        """Forward and backward of every micro-batch. Returns the global mean loss.

        Sets ``gradients`` and ``training_metrics``.
        ``loss(outputs, targets, count=n)`` returns this rank's share of the mean over n terms, and its gradient.
        """
        contract.check_batch(batch)
        self.check_declared(training=True)
        count, scores = self.count(batch), Scores(loss or self.loss, self.metrics)
        gradients: dict[str, Array] = {}
        for index, micro in enumerate(batch.micro_batches):
            with self.micro_batch(index):
                contract.add_gradients(self, gradients, self._gradients_of(micro, scores, count))
        if self.mesh.checks and self.checks_replicas:
            contract.check_replicas(self, gradients)
            self.checks_replicas = False  # a reduction in one step is in every step
        self.gradients = gradients
        return self._take_scores(scores, count)

    def _gradients_of(self, micro: MicroBatch, scores: Scores, count: float) -> Mapping[str, Array]:
        """What the backward of a micro-batch returns, for a loss that is a mean over ``count`` terms."""
        micro, on_tape = self._on_own_backend(micro), len(self.tape)
        contract.check_dims(self, "input_sharding", micro.inputs)
        outputs = self.forward(micro.inputs)
        gradients = contract.backward_of(
            self, None if outputs is None else self._gradient_of_loss(scores, outputs, micro, count)
        )
        contract.check_tape(self, on_tape)
        return gradients

    def _gradient_of_loss(self, scores: Scores, outputs: Array, micro: MicroBatch, count: float) -> Array:
        """The gradient of this micro-batch's share of the loss, times ``loss_scale``, in the dtype of the outputs."""
        dtype = outputs.dtype  # the dtype before the loss, which may write over the outputs
        return rounded(scores.add(outputs, micro, count / self.loss_scale), dtype)

    def _take_scores(self, scores: Scores, count: float) -> float:
        """The global mean loss of a step with ``count`` targets; sets ``training_metrics``."""
        sums = self._sum_shares(scores.shares)
        self.training_metrics = fractions_of(self.metrics, sums, count)
        return float(sums[0]) / self.loss_scale

    def evaluate(self, batch: Batch, loss: Loss | None = None) -> float:
        """The global mean loss, without a backward and without a tape."""
        return self.evaluation([batch], loss).loss

    def evaluation(self, batches: Iterable[Batch], loss: Loss | None = None) -> Evaluation:
        """The mean loss and the metrics over all ``batches``, without a backward and without a tape."""
        self.check_declared()
        counts: list[float] = []
        total = np.zeros(1 + len(self.metrics))
        with self.inference():
            for batch in batches:
                contract.check_batch(batch, "evaluation")
                counts.append(count := self.count(batch))
                scores = Scores(loss or self.loss, self.metrics)
                for micro in map(self._on_own_backend, batch.micro_batches):
                    outputs = self.outputs_of(micro)
                    if outputs is not None:
                        scores.add(outputs, micro, count)
                sums = self._sum_shares(scores.shares)  # batch by batch, so that the first stage does not run far ahead
                sums[0] *= count
                total += sums
        count = sum(counts)
        return Evaluation(float(total[0]) / (count or 1.0), fractions_of(self.metrics, total, count), count)

    def _on_own_backend(self, micro: MicroBatch) -> MicroBatch:
        """A micro-batch where ``outputs_of`` and the loss want it: on the engine's backend."""
        micro = micro.on(self.backend)
        return replace(micro, inputs=self.converted(micro.inputs))

    def _sum_shares(self, shares: np.ndarray) -> np.ndarray:
        """The loss and metrics, summed over ranks."""
        return self._sum_over_batch(shares)

    def _sum_over_batch(self, shares: np.ndarray) -> np.ndarray:
        axes = self.batch_axes
        return self.all_reduce(shares, over=axes, label="loss") if axes else shares

    # --- serving -----------------------------------------------------------------------------------------

    def inference_loop(self, input_stream: Iterable[Array] | None, output_stream: Writer | None) -> None:
        """Answer every input with an output: rank 0 reads whole inputs and writes whole outputs.

        Called on all ranks; arguments on ranks other than 0 are ignored. ``input_stream`` is an iterable,
        ``output_stream`` has ``write(array)``. Each input is sharded by ``input_sharding``
        and the output gathered by ``output_sharding``. No tape is kept.
        """
        from spmd_engine.engine.inference import serve

        serve(self, input_stream, output_stream)


def _shard_row(x: Array | None, text: str, mesh: Mesh) -> Array | None:
    spec = Spec.parse(text)
    if x is None or not any(axes for _, axes in spec.dims[1:]):
        return x
    index = Spec(spec.dims[1:], spec.weights).block(x.shape[1:], mesh)
    return x[(slice(None), *index)]


def _copy_to_backend(part: Any, backend: Backend, fresh: bool) -> Array:
    """``part`` as a contiguous array of ``backend``; copied unless it is ``fresh``, a copy already."""
    if (backend.on_device and backend.owns(part)) or isinstance(part, ShapedArray):
        return part if fresh and part.flags.c_contiguous else part.copy()
    part = backend_of(part).to_host(part)
    if backend.on_device:  # the move to the device is the copy
        return backend.asarray(np.asarray(part, order="C"))
    return np.array(part, order="C", copy=None if fresh else True)  # a memory map becomes an ordinary array
