"""What an evaluation says, and how loss and metrics are added up, in training, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.engine.batch import MicroBatch
from spmd_engine.errors import UsageError
from spmd_engine.layers.contract import check_call, described


@dataclass(frozen=True)
class Evaluation:
    """A model on some batches, all ranks and micro-batches together: exact, however they are cut."""

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
