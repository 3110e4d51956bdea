"""A global batch as one rank sees it: micro-batches of global samples, each cut over the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.algorithms import span


@dataclass(frozen=True)
class MicroBatch:
    """This rank's block of one micro-batch."""

    inputs: Array
    targets: Array
    samples: Array | None = None  #: index in the global batch of each sample (row) here
    mask: Array | None = None  #: like targets; 0 where a target does not count

    def loss_options(self, count: float) -> dict[str, Any]:
        """What a loss function is told beside outputs and targets."""
        return {"count": count} if self.mask is None else {"count": count, "mask": self.mask}


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
    local: Callable[[int], slice],
    *,
    step: int = 0,
    count: float | None = None,
) -> Batch:
    """The batch of ``size`` global samples: cut into micro-batches first, and each of those over the ranks.

    ``load(samples)`` gives inputs, targets and, if there is one, the mask of those global samples; ``local(n)`` is
    this rank's part of n
    (``engine.batch_span``). So what a micro-batch holds never depends on the mesh.
    """
    parts = []
    for m in range(micro_batches):
        whole = span(size, micro_batches, m)
        part = local(whole.stop - whole.start)
        samples = np.arange(whole.start + part.start, whole.start + part.stop)
        inputs, targets, *mask = load(samples)
        parts.append(MicroBatch(inputs, targets, samples, *mask))
    return Batch(parts, step, count)


def batch_of(inputs: Array, targets: Array, engine, micro_batches: int = 1, step: int = 0) -> Batch:
    """A Batch from whole arrays that every rank has: each takes its part of dim 0, the batch."""
    return make_batch(
        lambda samples: (inputs[samples], targets[samples]),
        len(inputs),
        micro_batches,
        engine.batch_span,
        step=step,
    )
