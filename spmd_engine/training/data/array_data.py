"""NumPy arrays as training data: shuffled epochs, and a part held out for validation."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np

from spmd_engine.arrays.random import hash_bits, key_of
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, make_batch
from spmd_engine.errors import UsageError


class ArrayData:
    """Samples x[b ...] with targets y[b ...], whole on every rank; memory maps will do, since only rows are read.

    Targets are whatever the engine's loss takes: classes y[b], or numbers y[b d]. ``validation`` is the fraction of
    samples that is held out, or the numbers of these. Which these are, and the order of every epoch, are functions of
    the seed, the epoch and the samples' numbers alone: neither the mesh, nor where a run was broken off, changes what
    a step is given.
    """

    def __init__(self, x: Any, y: Any, *, validation: float | np.ndarray = 0.0, seed: int = 0) -> None:
        if len(x) != len(y):
            raise UsageError(f"ArrayData: x has {len(x)} samples and y {len(y)}")
        if np.ndim(validation) == 0:
            if not 0 <= validation < 1:
                raise UsageError(f"ArrayData: validation={validation} is a fraction of the samples, from 0 and below 1")
            validation = part_of(len(x), round(validation * len(x)), seed)
        self.x, self.y, self.seed = x, y, seed
        self.held_out = np.unique(validation)  #: numbers of the samples for validation
        self.train = np.setdiff1d(np.arange(len(x)), self.held_out)  #: and of those to learn from
        if not len(self.train):
            raise UsageError(f"ArrayData: {len(x)} samples, of which all are held out, leave none to learn from")
        self._epochs: dict[int, np.ndarray] = {}  # orders of the last ones

    def epoch(self, number: int) -> np.ndarray:
        """The numbers of the samples to learn from, each once, in the order of this epoch."""
        if number not in self._epochs:
            if len(self._epochs) > 1:  # a batch may lie in two
                del self._epochs[min(self._epochs)]
            order = _shuffled(key_of(self.seed, "epoch", number), len(self.train))
            self._epochs[number] = self.train[order]
        return self._epochs[number]

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """Which samples stand at these places in all epochs, one after the other."""
        epochs, within = np.divmod(places, len(self.train))
        numbers = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            numbers[here] = self.epoch(epoch)[within[here]]
        return numbers

    def batch(self, engine: ShardedEngine, step: int, *, size: int, micro_batches: int = 1) -> Batch:
        """This rank's block of the batch of one step (from 0): places step · size and on, of all epochs."""

        def load(samples: np.ndarray):
            return self.examples(step * size + samples)

        return make_batch(load, size, micro_batches, engine, step=step, count=size * self._terms)

    def validation_batches(self, engine: ShardedEngine, *, size: int, samples: int | None = None) -> list[Batch]:
        """All that is held out, or so many evenly spread ``samples`` of it, in order, in batches of ``size``."""
        held_out, batches = self.held_out, []
        if samples is not None and samples < len(held_out):
            held_out = held_out[np.linspace(0, len(held_out) - 1, samples).astype(np.int64)]
        for first in range(0, len(held_out), size):
            part = held_out[first : first + size]

            def load(samples: np.ndarray, part=part):
                return self._rows(part[samples])

            batches.append(make_batch(load, len(part), 1, engine, count=len(part) * self._terms))
        return batches

    @cached_property
    def sha256(self) -> str:
        """Of shapes, dtypes and contents: a fact for a checkpoint, so that a run goes on with the same data."""
        digest = hashlib.sha256()
        for array in (self.x, self.y):
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            for first in range(0, len(array), 4096):
                digest.update(np.ascontiguousarray(array[first : first + 4096]).tobytes())
        return digest.hexdigest()

    def examples(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the samples that stand at these places in all epochs."""
        return self._rows(self.numbers(places))

    @property
    def _terms(self) -> int:
        """How many numbers of a sample the loss compares."""
        return int(np.prod(self.y.shape[1:]))

    def _rows(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(self.x[numbers]), np.asarray(self.y[numbers])


def part_of(count: int, size: int, seed: int) -> np.ndarray:
    """So many of the numbers below ``count``, in order, drawn by the seed alone."""
    return np.sort(_shuffled(key_of(seed, "validation"), count)[:size])


def _shuffled(key: int, count: int) -> np.ndarray:
    """The numbers below ``count``, ordered by the random bits that the key gives each of them."""
    numbers = np.arange(count, dtype=np.uint64)
    return np.argsort(hash_bits(key, numbers), kind="stable")
