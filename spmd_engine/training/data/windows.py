"""Real data for dense models: windows of a corpus' bytes as vectors of numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from string import ascii_uppercase, digits
from typing import Any

import numpy as np

from spmd_engine.arrays.random import integers, key_of
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, make_batch
from spmd_engine.errors import UsageError
from spmd_engine.models.model import Model
from spmd_engine.tokens.tokenizer import END_OF_FILE
from spmd_engine.training.data.corpus import Corpus

BITS = 8
#: What kind of character comes next, in Python's source; what is in none of these is "other".
CLASSES = {
    "space": " ",
    "newline": "\n",
    "lower-case vowel": "aeiou",
    "lower-case consonant": "bcdfghjklmnpqrstvwxyz",
    "upper case": ascii_uppercase,
    "digit": digits,
    "underscore": "_",
    "bracket": "()[]{}",
    "operator or punctuation": "!\"#$%&'*+,-./:;<=>?@\\^`|~",
    "other": "",
}


@dataclass(frozen=True)
class Windows(ABC):
    """Samples cut from a corpus, with the interface of ``Corpus``: batches are functions of seed and numbers alone.

    ``features`` is the whole size of a sample's input, ``dtype`` the inputs' (that of the engine's parameters).
    ``context``, which those who call ``Corpus`` give, is not looked at: ``length`` says how long a window is. Raises
    UsageError for a corpus shorter than one.
    """

    corpus: Corpus
    features: int
    dtype: Any = np.float32

    def __post_init__(self) -> None:
        shortest = min(len(self.corpus.train), len(self.corpus.validation))
        if shortest < self.length:
            raise UsageError(f"--data: {shortest} bytes in one part, fewer than a window of {self.length}; give more")

    @property
    @abstractmethod
    def length(self) -> int:
        """Bytes of a window, with what is to be foretold."""

    @property
    @abstractmethod
    def terms(self) -> int:
        """How many numbers of a sample the loss compares."""

    @abstractmethod
    def examples(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs[b features] and targets[b ...] of windows, tokens[b length]."""

    def batch(
        self, engine: ShardedEngine, step: int, *, size: int, micro_batches: int = 1, context: int = 1, seed: int = 0
    ) -> Batch:
        """This rank's block of the batch of one step: sample j of step i is a function of seed and i · size + j."""

        def load(samples: np.ndarray):
            ends = len(self.corpus.train) - self.length + 1
            starts = integers(key_of(seed, "samples"), ends, step * size + samples)
            return self._cut(self.corpus.train, starts)

        return make_batch(load, size, micro_batches, engine, step=step, count=size * self.terms)

    def validation_batches(self, engine: ShardedEngine, *, samples: int, size: int, context: int = 1) -> list[Batch]:
        """``samples`` windows spread evenly over the held-out bytes, in batches of ``size``: always the same."""
        held_out = self.corpus.validation
        starts = np.linspace(0, len(held_out) - self.length, samples).astype(np.int64)
        batches = []
        for first in range(0, samples, size):
            part = starts[first : first + size]

            def load(rows: np.ndarray, part=part):
                return self._cut(held_out, part[rows])

            batches.append(make_batch(load, len(part), 1, engine, count=len(part) * self.terms))
        return batches

    def _cut(self, tokens: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.examples(tokens[starts[:, None] + np.arange(self.length)])


class ByteClasses(Windows):
    """x[b i]: the bits, as -1 and 1, of i / 8 bytes; targets[b]: the class, of ten, of the byte that follows.

    Bits come most significant first. The end of a file is byte 0, and its class is "other".
    """

    def __post_init__(self) -> None:
        if self.features % BITS or self.features < BITS:
            raise UsageError(f"inputs are the bits of whole bytes: {self.features} is no multiple of {BITS}")
        super().__post_init__()

    @property
    def length(self) -> int:
        return self.features // BITS + 1

    @property
    def terms(self) -> int:
        return 1

    def examples(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bits = np.unpackbits(_bytes(tokens[:, :-1]), axis=1).astype(self.dtype)
        return bits * 2 - 1, classes_of(tokens[:, -1])


class BytePairs(Windows):
    """x[b d]: d bytes, scaled to [-1, 1]; targets[b d]: the same window one byte further on.

    Outputs are to be compared by the mean squared error. The end of a file is byte 0.
    """

    @property
    def length(self) -> int:
        return self.features + 1

    @property
    def terms(self) -> int:
        return self.features

    def examples(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scaled = _bytes(tokens).astype(self.dtype) / 127.5 - 1
        return scaled[:, :-1], scaled[:, 1:]


@dataclass(frozen=True)
class ShapedBytePairs(BytePairs):
    """x[b s d], or x[b h w c]: the windows of ``BytePairs``, each in the ``shape`` of a sample; targets alike."""

    shape: tuple[int, ...] = (-1,)

    def examples(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = super().examples(tokens)
        shape = (len(tokens), *self.shape)
        return inputs.reshape(shape), targets.reshape(shape)


def data_for(model: Model, corpus: Corpus, dtype: Any = np.float32) -> Corpus | Windows:
    """What a model learns from a corpus: its tokens, the class of the next byte, or the window one byte further on.

    Decided by the letters of its inputs and targets; raises UsageError for others, and for sizes that do not fit.
    """
    dims = model.inputs.split(), model.targets.split()
    if dims == (["b", "s"], ["b", "s"]):
        return corpus
    first, last = model.layers[0][1], model.layers[-1][1]
    if dims == (["b", "d"], ["b"]):
        classes = last.sizes[model.outputs.split()[-1]]
        if classes != len(CLASSES):
            raise UsageError(f"{model.name} has {classes} classes, this data {len(CLASSES)}: {', '.join(CLASSES)}")
        return ByteClasses(corpus, first.sizes["d"], dtype)
    if dims == (["b", "d"], ["b", "d"]):
        return BytePairs(corpus, first.sizes["d"], dtype)
    raise UsageError(f"{model.name}: no data of inputs [{model.inputs}] and targets [{model.targets}]; bring your own")


def classes_of(tokens: np.ndarray) -> np.ndarray:
    """The number of each token's class, in the order of ``CLASSES``."""
    table = np.full(END_OF_FILE + 1, len(CLASSES) - 1)
    for number, characters in enumerate(CLASSES.values()):
        table[list(characters.encode())] = number
    return table[tokens]


def _bytes(tokens: np.ndarray) -> np.ndarray:
    return np.where(tokens == END_OF_FILE, 0, tokens).astype(np.uint8)
