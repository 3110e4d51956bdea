"""What an evaluation says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Evaluation:
    """A model on some batches, all ranks and micro-batches together: exact, however they are cut."""

    loss: float  #: the mean over the targets that count
    metrics: Mapping[str, float]  #: of which fraction of these something holds: {"accuracy": 0.98}
    count: float  #: of these targets; of numbers that are compared, not of samples
