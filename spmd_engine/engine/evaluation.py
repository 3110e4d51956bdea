"""What an evaluation says, and how loss and metrics are added up, in training, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.engine.batch import MicroBatch


@dataclass(frozen=True)
class Evaluation:
    """A model on some batches, all ranks and micro-batches together: exact, however they are cut."""

    loss: float  #: the mean over the targets that count
    metrics: Mapping[str, float]  #: of which fraction of these something holds: {"accuracy": 0.98}
    count: float  #: of these targets; of numbers that are compared, not of samples


class Scores:
    """A rank's shares of a batch's loss, and of how many of its targets each metric holds, over its micro-batches.

    ``shares`` is what is to be summed over ranks, all at once: the loss, then the metrics in their order.
    """

    def __init__(self, loss: Callable[..., tuple[float, Any]], metrics: Mapping[str, Callable[..., float]]) -> None:
        self._loss, self._metrics = loss, metrics
        self.shares = np.zeros(1 + len(metrics))

    def add(self, outputs: Array, micro: MicroBatch, count: float) -> Any:
        """Add those of a micro-batch, of which the batch has ``count`` targets in all. Returns the loss's gradient."""
        for number, metric in enumerate(self._metrics.values(), 1):  # before the loss, which may write over the outputs
            self.shares[number] += metric(outputs, micro.targets, **micro.metric_options)
        value, gradient = self._loss(outputs, micro.targets, **micro.loss_options(count))
        self.shares[0] += value
        return gradient

    def fractions(self, sums: np.ndarray, count: float) -> dict[str, float]:
        """The metrics by name, of the ``shares`` of all ranks: each holds for which fraction of ``count`` targets."""
        return {name: float(each) / (count or 1.0) for name, each in zip(self._metrics, sums[1:], strict=True)}
