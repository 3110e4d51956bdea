"""A global batch as one rank sees it, and its loss and metrics, added up over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.axes import MeshPosition
from spmd_engine.comm.blocks import span
from spmd_engine.errors import UsageError
from spmd_engine.layers.contract import check_call, described
from spmd_engine.layers.layer import Documents
from spmd_engine.sharding.notation import Spec


class CutsBatches(Protocol):
    """How an engine shards batches over its mesh."""

    def batch_span(self, samples: int) -> slice:
        """This rank's part of so many samples."""
        ...

    def cut_rows(self, inputs: Array, targets: Array | None, *mask: Array) -> list[Array | None]:
        """This rank's part of samples that are whole beyond their first dim."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """This rank's block of one micro-batch."""

    inputs: Array
    targets: Array
    samples: Array | None = None  #: index in the global batch of each sample (row) here
    mask: Array | None = None  #: like targets; 0 where a target does not count
    documents: Documents | None = None  #: of which the samples consist, if these are to see nothing of each other
    length: int | None = None  #: of the whole second dim of the inputs, of which this rank may have a part

    def loss_options(self, count: float) -> dict[str, Any]:
        """Keyword arguments of a loss function."""
        return {"count": count} | self.metric_options

    @property
    def metric_options(self) -> dict[str, Any]:
        """Keyword arguments of a metric."""
        return {} if self.mask is None else {"mask": self.mask}


@dataclass(frozen=True)
class Batch:
    """All micro-batches of one optimizer step."""

    micro_batches: Sequence[MicroBatch]
    step: int = 0  #: optimizer steps made before; dropout depends on it
    count: float | None = None  #: terms of the global mean; None: the engine counts them over the ranks


def make_batch(
    load: Callable[[np.ndarray], Sequence[Array]],
    size: int,
    micro_batches: int,
    engine: CutsBatches,
    *,
    step: int = 0,
    count: float | None = None,
    documents: Callable[[np.ndarray], Documents | None] | None = None,
) -> Batch:
    """The batch of ``size`` global samples: split into micro-batches first; the engine then shards each of those.

    ``load(samples)`` gives inputs, targets and, if there is one, the mask of those global samples, whole in all
    other dims; ``documents(samples)`` what they consist of, if that matters. What a micro-batch holds never depends on
    the mesh.
    """
    if micro_batches < 1:
        raise UsageError(f"micro_batches is {micro_batches}: it is 1 or more; the step is given by its name, step=step")
    parts = []
    for m in range(micro_batches):
        whole = span(size, micro_batches, m)
        part = engine.batch_span(whole.stop - whole.start)
        samples = np.arange(whole.start + part.start, whole.start + part.stop)
        rows = load(samples)
        if lengths := [len(each) for each in rows if len(each) != len(samples)]:
            raise UsageError(f"{lengths[0]} rows were loaded of {len(samples)} samples: give one of each")
        length = rows[0].shape[1] if rows[0].ndim > 1 else 1
        inputs, targets, *mask = engine.cut_rows(*rows)
        apart = None if documents is None else documents(samples)
        parts.append(MicroBatch(inputs, targets, samples, *mask, documents=apart, length=length))
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


def batch_of(inputs: Array, targets: Array, engine: CutsBatches, micro_batches: int = 1, step: int = 0) -> Batch:
    """A Batch from whole arrays that every rank has: each takes its part. Raises UsageError for what is no array, and
    for inputs and targets of different numbers of rows."""
    for name, each in (("inputs", inputs), ("targets", targets)):
        if not getattr(each, "shape", None):
            raise UsageError(f"batch_of: {name} is a {type(each).__name__}; give an array, by numpy.asarray({name})")
    if len(inputs) != len(targets):
        raise UsageError(f"batch_of: inputs have {len(inputs)} rows, targets {len(targets)}; give one for each input")

    def load(samples: np.ndarray) -> tuple[Array, Array]:
        return inputs[samples], targets[samples]

    return make_batch(load, len(inputs), micro_batches, engine, step=step, count=targets.size)


# --- What an evaluation says, and how loss and metrics are added up, in training, too


@dataclass(frozen=True)
class Evaluation:
    """A model on some batches, all ranks and micro-batches together: exact, however they are sharded."""

    loss: float  #: the mean over the targets that count
    metrics: Mapping[str, float]  #: of which fraction of these something holds: {"accuracy": 0.98}
    count: float  #: of these targets; of numbers that are compared, not of samples


def value_and_gradient(loss: Callable[..., Any], outputs: Array, targets: Array, **options: Any) -> tuple[float, Any]:
    """What a loss function returns. Raises UsageError if that is no number and no array like the outputs."""
    name = f"loss function {getattr(loss, '__name__', type(loss).__name__)}"
    try:
        returned = loss(outputs, targets, **options)
    except TypeError:
        check_call(f"{name} (of a class: loss = staticmethod(...))", loss, outputs, targets, like=_like, **options)
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
    """How a loss function is called; with mask=..., where there is a mask."""
    raise TypeError("a signature alone")


def _of_metric(name: str, metric: Callable[..., Any], outputs: Array, micro: MicroBatch) -> float:
    value = metric(outputs, micro.targets, **micro.metric_options)
    if not _is_number(value):
        raise UsageError(f"metric {name} returned {described(value)}; return the number of targets for which it holds")
    return value


def _is_number(value: Any) -> bool:
    return getattr(value, "shape", ()) == () and hasattr(value, "__float__")


class Scores:
    """A rank's shares of a batch's loss, and of how many of its targets each metric holds, over its micro-batches.

    ``shares`` is what is to be summed over ranks, all at once: the loss, then the metrics in their order.
    """

    def __init__(self, loss: Callable[..., tuple[float, Any]], metrics: Mapping[str, Callable[..., float]]) -> None:
        self._loss, self._metrics = loss, metrics
        self.shares = np.zeros(1 + len(metrics))

    def add(self, outputs: Array, micro: MicroBatch, count: float) -> Any:
        """Add those of a micro-batch, of which the batch has ``count`` targets in all. Returns the loss's gradient."""
        for number, metric in enumerate(self._metrics, 1):  # before the loss, which may write over the outputs
            self.shares[number] += _of_metric(metric, self._metrics[metric], outputs, micro)
        value, gradient = value_and_gradient(self._loss, outputs, micro.targets, **micro.loss_options(count))
        self.shares[0] += value
        return gradient

    def fractions(self, sums: np.ndarray, count: float) -> dict[str, float]:
        """The metrics by name, of the ``shares`` of all ranks: each holds for which fraction of ``count`` targets."""
        return {name: float(each) / (count or 1.0) for name, each in zip(self._metrics, sums[1:], strict=True)}
