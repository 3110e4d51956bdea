"""A global batch as one rank sees it: micro-batches of global samples, each cut over the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.axes import MeshPosition
from spmd_engine.comm.blocks import span
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import Documents
from spmd_engine.sharding.notation import Spec


class CutsBatches(Protocol):
    """What an engine tells of how batches are cut over its mesh."""

    def batch_span(self, samples: int) -> slice:
        """This rank's part of so many samples."""

    def cut_rows(self, inputs: Array, targets: Array | None, *mask: Array) -> list[Array | None]:
        """This rank's part of samples that are whole beyond their first dim."""


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
        """What a loss function is told beside outputs and targets."""
        return {"count": count} | self.metric_options

    @property
    def metric_options(self) -> dict[str, Any]:
        """What a metric is told beside outputs and targets."""
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
    documents: Callable[[np.ndarray], Documents] | None = None,
) -> Batch:
    """The batch of ``size`` global samples: cut into micro-batches first, and each of those as the engine wants.

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
    """Raise UsageError if of a micro-batch, cut as the first dim of ``inputs`` on a mesh, a rank gets no sample."""
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
