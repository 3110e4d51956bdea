"""A rank's part of a global batch, the tapes of its micro-batches, and the sums of its loss and metrics over them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_engine.arguments import bound, checked
from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.axes import MeshPosition
from spmd_engine.comm.blocks import span
from spmd_engine.comm.notation import Spec
from spmd_engine.errors import UsageError, described
from spmd_engine.layers.layer import Documents

if TYPE_CHECKING:
    from spmd_engine.engine.base import ShardedEngine


@dataclass(frozen=True)
class MicroBatch:
    """This rank's block of one micro-batch."""

    inputs: Array
    targets: Array
    samples: Array | None = None  #: index in the global batch of each sample (row)
    mask: Array | None = None  #: like targets; 0 where a target does not count
    documents: Documents | None = None  #: in each sample, if attention must not cross them
    length: int | None = None  #: length of the whole second dim of the inputs, which may be sharded

    def on(self, backend: Backend) -> MicroBatch:
        """The same with inputs, targets and mask on a device."""
        if not backend.on_device:
            return self
        mask = None if self.mask is None else backend.asarray(self.mask)
        return replace(self, inputs=backend.asarray(self.inputs), targets=backend.asarray(self.targets), mask=mask)

    @property
    def metric_options(self) -> dict[str, Any]:
        """Keyword arguments of a metric, and of a loss function, which also takes ``count``."""
        return {} if self.mask is None else {"mask": self.mask}


@dataclass(frozen=True)
class Batch:
    """All micro-batches of one optimizer step."""

    micro_batches: Sequence[MicroBatch]
    step: int = 0  #: optimizer steps before this one; dropout depends on it
    count: float | None = None  #: terms of the global mean; None: the engine counts them over the ranks


def make_batch(
    load: Callable[[np.ndarray], Sequence[Array]],
    size: int,
    micro_batches: int,
    engine: ShardedEngine,
    *,
    step: int = 0,
    count: float | None = None,
    documents: Callable[[np.ndarray], Documents | None] | None = None,
) -> Batch:
    """The batch of ``size`` global samples: split into micro-batches first; then the engine shards each of them.

    ``load(samples)`` returns inputs, targets and, if there is one, the mask of those global samples, whole in all
    other dims; ``documents(samples)`` their documents, or None. The samples of a micro-batch do not depend on the mesh.
    Raises UsageError for less than one micro-batch, and if ``load`` returns another number of rows.
    """
    if micro_batches < 1:
        raise UsageError(f"micro_batches is {micro_batches}: make it 1 or more; pass the step by its name, step=step")
    if step < 0:
        raise UsageError(f"batch: step is {step}; steps count from 0")
    parts = []
    for m in range(micro_batches):
        micro_span = span(size, micro_batches, m)
        part = engine.batch_span(micro_span.stop - micro_span.start)
        samples = np.arange(micro_span.start + part.start, micro_span.start + part.stop)
        rows = load(samples)
        if lengths := [len(array) for array in rows if len(array) != len(samples)]:
            raise UsageError(f"{lengths[0]} rows were loaded for {len(samples)} samples: return one for each")
        length = rows[0].shape[1] if rows[0].ndim > 1 else 1
        inputs, targets, *mask = engine.cut_rows(*rows)
        sample_documents = None if documents is None else documents(samples)
        parts.append(MicroBatch(inputs, targets, samples, *mask, documents=sample_documents, length=length))
    return Batch(parts, step, count)


def check_batch(size: int, micro_batches: int, inputs: Spec, mesh: MeshPosition) -> None:
    """Raise UsageError if a rank gets no sample of a micro-batch, sharded as the first dim of ``inputs`` on a mesh."""
    over = inputs.dims[0][1] if inputs.dims else ()
    smallest, parts = size // micro_batches, mesh.axis_size(over)
    if smallest < parts:
        raise UsageError(
            f"--batch-size {size} in {micro_batches} micro-batch(es) gives {smallest} "
            f"sample(s) each, fewer than the {parts} rank(s) that it is sharded over. Raise --batch-size to "
            f"{parts * micro_batches} or more, or take fewer micro-batches, or a smaller data axis in --mesh"
        )
    for samples in sorted({smallest, -(-size // micro_batches)}) if inputs.weights else ():
        parts = [inputs.part(0, samples, peer) for peer in mesh.peers(over)]
        if any(part.start == part.stop for part in parts):
            raise UsageError(
                f"--batch-size {size} in {micro_batches} micro-batch(es) gives {samples} sample(s) each, which, "
                f'sharded as "{inputs}", leave a rank none. Raise --batch-size, or take fewer micro-batches, or '
                "--shares that are closer to each other"
            )


@checked()
def batch_of(inputs: Array, targets: Array, engine: ShardedEngine, micro_batches: int = 1, step: int = 0) -> Batch:
    """A Batch from whole arrays that every rank has; each takes its part. Raises UsageError if inputs or targets are no
    arrays, or differ in their numbers of rows."""
    if isinstance(engine, type) or not hasattr(engine, "batch_span"):
        raise UsageError(f"batch_of: engine is {described(engine)}; give a ShardedEngine")
    for name, array in (("inputs", inputs), ("targets", targets)):
        if not getattr(array, "shape", None):
            raise UsageError(f"batch_of: {name} is a {type(array).__name__}; give an array, by numpy.asarray({name})")
        if getattr(array.dtype, "kind", "") in "OSU" or not len(array):
            has = f"{array.dtype}, which are no numbers" if len(array) else "no rows"
            raise UsageError(f"batch_of: {name} has {has}; give an array of numbers with a row for each sample")
    if len(inputs) != len(targets):
        raise UsageError(f"batch_of: inputs have {len(inputs)} rows, targets {len(targets)}; give one for each input")
    if micro_batches > len(inputs):
        raise UsageError(f"batch: {len(inputs)} samples in {micro_batches} micro-batches: give at most as many parts")

    def load(samples: np.ndarray) -> tuple[Array, Array]:
        return inputs[samples], targets[samples]

    return make_batch(load, len(inputs), micro_batches, engine, step=step, count=targets.size)


# --- Tapes: what forwards save for backwards, one stack for each micro-batch in flight


class Tape:
    """A stack. ``push(a, b)`` in the forward, ``a, b = pop()`` in the backward, in opposite order."""

    def __init__(self, recording: bool = True) -> None:
        self._entries: list[tuple[Any, ...]] = []
        self._recording = recording

    def push(self, *arrays: Any) -> None:
        if self._recording:
            self._entries.append(arrays)

    def pop(self) -> Any:
        """The last entry: the array if one was pushed, else a tuple. Raises UsageError if the tape is empty."""
        if not self._entries:
            raise UsageError(
                "tape.pop(): the tape is empty: a backward without a forward of the same micro-batch, or after one in "
                "inference mode, or backward pops more than forward pushes"
            )
        entry = self._entries.pop()
        return entry[0] if len(entry) == 1 else entry

    def __len__(self) -> int:
        return len(self._entries)


class Tapes:
    """The tapes of all micro-batches in flight, and the current one."""

    def __init__(self) -> None:
        self._tapes: dict[Hashable, Tape] = {}
        self._current: Hashable = 0
        self._recording = True

    @property
    def current(self) -> Tape:
        if not self._recording:
            return Tape(recording=False)
        return self._tapes.setdefault(self._current, Tape())

    @property
    def recording(self) -> bool:
        return self._recording

    @contextmanager
    def select(self, micro_batch: Hashable) -> Iterator[None]:
        previous, self._current = self._current, micro_batch
        try:
            yield
        finally:
            if not self._tapes.get(self._current):  # empty
                self._tapes.pop(self._current, None)
            self._current = previous

    @contextmanager
    def off(self) -> Iterator[None]:
        previous, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = previous

    def __len__(self) -> int:
        return sum(1 for tape in self._tapes.values() if len(tape))


# --- The results of an evaluation, and the sums of loss and metrics, also in training


@dataclass(frozen=True)
class Evaluation:
    """The results of a model on some batches, over all ranks and micro-batches: exact for every sharding."""

    loss: float  #: the mean over the targets that count
    metrics: Mapping[str, float]  #: the fraction of those targets that satisfy each: {"accuracy": 0.98}
    count: float  #: number of those targets: of the numbers compared, not of samples


def value_and_gradient(loss: Callable[..., Any], outputs: Array, targets: Array, **options: Any) -> tuple[float, Any]:
    """The loss and its gradient. Raises UsageError unless they are a number and an array like the outputs."""
    name = f"loss function {getattr(loss, '__name__', type(loss).__name__)}"
    try:
        returned = loss(outputs, targets, **options)
    except TypeError:
        bound(f"{name} (of a class: loss = staticmethod(...))", loss, (outputs, targets), options, _like)
        raise
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UsageError(f"{name} returned {described(returned)}; return (value, gradient of the outputs)")
    value, gradient = returned
    if not _is_number(value) or getattr(gradient, "shape", None) != outputs.shape:
        raise UsageError(
            f"{name} returned ({described(value)}, {described(gradient)}); return (value, gradient), a number and an "
            f"array of the outputs' shape {outputs.shape}"
        )
    return value, gradient


def _like(outputs: Array, targets: Array, *, count: float) -> tuple[float, Array]:
    """The signature of a loss function; with mask=... if there is a mask."""
    raise TypeError("a signature alone")


def _is_number(value: Any) -> bool:
    return getattr(value, "shape", ()) == () and hasattr(value, "__float__")


class Scores:
    """A rank's shares of a batch's loss and of the number of targets that satisfy each metric, over micro-batches.

    On a device they stay there until ``shares`` is read.
    """

    def __init__(self, loss: Callable[..., tuple[Any, Any]], metrics: Mapping[str, Callable[..., Any]]) -> None:
        self._loss, self._metrics = loss, metrics
        self._sums: list[Any] = [0.0] * (1 + len(metrics))

    @property
    def shares(self) -> np.ndarray:
        """The array to sum over ranks: the loss, then the metrics in their order."""
        backend = next((backend_of(x) for x in self._sums if backend_of(x).on_device), None)
        if backend is None:
            return np.array(self._sums)
        xp = backend.xp
        return backend.to_host(xp.stack([xp.asarray(x) for x in self._sums]))  # a user's may be floats

    def add(self, outputs: Array, micro: MicroBatch, count: float) -> Any:
        """Add the shares of a micro-batch of a batch with ``count`` targets. Returns the gradient of the loss."""
        for number, name in enumerate(self._metrics, 1):  # before the loss, which may overwrite the outputs
            value = self._metrics[name](outputs, micro.targets, **micro.metric_options)
            if not _is_number(value):
                holds = "return the number of targets for which it holds"
                raise UsageError(f"metric {name} returned {described(value)}; {holds}")
            self._sums[number] += value
        value, gradient = value_and_gradient(self._loss, outputs, micro.targets, count=count, **micro.metric_options)
        self._sums[0] += value
        return gradient


def fractions_of(metrics: Iterable[str], sums: np.ndarray, count: float) -> dict[str, float]:
    """By metric, the fraction of ``count`` targets that satisfy it, from the summed ``Scores.shares`` of all ranks."""
    return {name: float(total) / (count or 1.0) for name, total in zip(metrics, sums[1:], strict=True)}
