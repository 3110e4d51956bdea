"""Batches that do not depend on the mesh, and NumPy arrays as training data, with a held-out part."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.arrays.random import hash_bits, key_of
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, make_batch
from spmd_engine.errors import UsageError, described
from spmd_engine.layers.layer import Documents


class SampledData(ABC):
    """Training samples, numbered over all steps, and held-out samples, numbered from 0.

    A sample depends only on the data, a seed and its number: neither the mesh nor an interruption of the run changes
    the batch of a step.
    """

    documents: str = "joined"  #: how they share a sample, as ``--documents``

    @property
    @abstractmethod
    def terms(self) -> int:
        """The numbers of a sample that the loss compares."""

    @abstractmethod
    def examples(self, numbers: np.ndarray, held_out: bool = False) -> Sequence[np.ndarray]:
        """Inputs[b ...], targets[b ...] and, if not all targets count, their mask, of samples with these numbers."""

    @abstractmethod
    def held_out_numbers(self, samples: int | None) -> np.ndarray:
        """``samples`` numbers of held-out samples, spread evenly; None: all."""

    def count(self, numbers: np.ndarray, held_out: bool) -> float:
        """The number of targets of these samples that count in the loss."""
        return len(numbers) * self.terms

    def documents_of(self, numbers: np.ndarray, held_out: bool) -> Documents | None:
        """The documents of these samples; None if each position attends to all earlier ones."""
        return None

    def batch(self, engine: ShardedEngine, step: int, *, size: int, micro_batches: int = 1) -> Batch:
        """This rank's block of the batch of one step (from 0): samples step * size to (step + 1) * size - 1."""
        return self._batch(engine, step * size + np.arange(size), False, micro_batches, step)

    def validation_batches(
        self, engine: ShardedEngine, *, size: int, samples: int | None = None, micro_batches: int = 1
    ) -> list[Batch]:
        """``samples`` held-out samples (None: all), spread evenly and in order, in batches of ``size``.

        Micro-batches have at most as many samples as those of a training batch of this ``size``, so that an evaluation
        needs no more memory than a step.
        """
        numbers, most = self.held_out_numbers(samples), -(-size // micro_batches)
        batches = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        return [self._batch(engine, batch, True, -(-len(batch) // most)) for batch in batches]

    def _batch(
        self, engine: ShardedEngine, numbers: np.ndarray, held_out: bool, micro_batches: int = 1, step: int = 0
    ) -> Batch:
        return make_batch(
            lambda samples: self.examples(numbers[samples], held_out),
            len(numbers),
            micro_batches,
            engine,
            step=step,
            count=self.count(numbers, held_out),
            documents=lambda samples: self.documents_of(numbers[samples], held_out),
        )


class ArrayData(SampledData):
    """Samples x[b ...] with targets y[b ...], whole on every rank. Memory maps suffice, since only rows are read.

    Targets are those of the engine's loss: classes y[b], or numbers y[b d]. ``validation`` is the fraction of samples
    that is held out, or the numbers of these samples. The choice of these, and the order of every epoch, depend only on
    the seed, the epoch and the samples' numbers.
    """

    @checked()
    def __init__(self, x: Any, y: Any, *, validation: float | np.ndarray = 0.0, seed: int = 0) -> None:
        for name, array in (("x", x), ("y", y)):
            if not hasattr(array, "shape"):
                raise UsageError(f"ArrayData: {name} is {described(array)}; make it an array, by numpy.asarray")
        if len(x) != len(y):
            raise UsageError(f"ArrayData: x has {len(x)} samples and y {len(y)}")
        if np.ndim(validation) == 0:
            if not 0 <= validation < 1:
                raise UsageError(f"ArrayData: validation={validation} is a fraction of the samples, from 0 and below 1")
            validation = part_of(len(x), round(float(validation) * len(x)), seed)
        self.x, self.y, self.seed = x, y, seed
        self.held_out = np.unique(validation)  #: numbers of the samples for validation
        if len(self.held_out) and not 0 <= self.held_out[0] <= self.held_out[-1] < len(x):
            which = f"{self.held_out[0]} to {self.held_out[-1]}"
            raise UsageError(f"ArrayData: validation has numbers from {which}; samples are numbered 0 to {len(x) - 1}")
        self.train = np.setdiff1d(np.arange(len(x)), self.held_out)  #: numbers of the samples for training
        if not len(self.train):
            raise UsageError(f"ArrayData: {len(x)} samples, of which all are held out, leave none to learn from")

    @property
    def terms(self) -> int:
        return int(np.prod(self.y.shape[1:]))

    @checked({"number": 0})
    def epoch(self, number: int) -> np.ndarray:
        """The numbers of all training samples, in the order of this epoch."""
        return self.train[epoch_order(self.seed, number, len(self.train))]

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """The numbers of the samples at these places in all epochs, one after the other."""
        return self.train[in_epochs(self.seed, len(self.train), places)]

    def held_out_numbers(self, samples: int | None) -> np.ndarray:
        return self.held_out[spread(len(self.held_out), samples)]

    def examples(self, numbers: np.ndarray, held_out: bool = False) -> tuple[np.ndarray, np.ndarray]:
        rows = numbers if held_out else self.numbers(numbers)
        return np.asarray(self.x[rows]), np.asarray(self.y[rows])

    @cached_property
    def sha256(self) -> str:
        """The digest of shapes, dtypes and contents: a checkpoint has it, so that a run resumes with the same data."""
        digest = hashlib.sha256()
        for array in (self.x, self.y):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            for first in range(0, len(array), 4096):
                digest.update(np.ascontiguousarray(array[first : first + 4096]).tobytes())
        return digest.hexdigest()


def spread(count: int, samples: int | None) -> np.ndarray:
    """At most ``samples`` of the numbers below ``count``, spread evenly; None: all."""
    return np.linspace(0, count - 1, count if samples is None else min(samples, count)).astype(np.int64)


def part_of(count: int, size: int, seed: int) -> np.ndarray:
    """``size`` of the numbers below ``count``, in order, drawn by the seed alone."""
    return np.sort(_shuffled(key_of(seed, "validation"), count)[:size])


def in_epochs(seed: int, count: int, places: np.ndarray) -> np.ndarray:
    """The numbers below ``count`` at these places of shuffled epochs, one after the other."""
    epochs, within = np.divmod(places, count)
    numbers = np.empty(len(places), np.int64)
    for epoch in np.unique(epochs).tolist():
        in_epoch = epochs == epoch
        numbers[in_epoch] = epoch_order(seed, epoch, count)[within[in_epoch]]
    return numbers


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The numbers below ``count``, shuffled: a function of the arguments alone."""
    return _shuffled(key_of(seed, "epoch", epoch), count)


def _shuffled(key: int, count: int) -> np.ndarray:
    """The numbers below ``count``, ordered by the random bits that the key gives each of them."""
    return np.argsort(hash_bits(key, np.arange(count, dtype=np.uint64)), kind="stable")
