"""Bytes to learn from: by default the source of Python's own standard library, present on every machine."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from string import ascii_uppercase, digits
from typing import Any, NamedTuple

import numpy as np

from spmd_engine.arrays.random import integers, key_of
from spmd_engine.comm.agreement.rank_zero import on_rank_zero, text_from_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.comm.shared_memory.shared_array import share_array
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, make_batch
from spmd_engine.errors import UsageError
from spmd_engine.models.model import Model
from spmd_engine.tokens.tokenizer import END_OF_FILE

HELD_OUT = 20  #: one file in so many is for validation (of a single file, its last part)
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo"}


@dataclass(frozen=True)
class Corpus:
    """Tokens[n] to train on and to validate on, equal on every rank, and what they were read from."""

    train: np.ndarray
    validation: np.ndarray
    files: int
    sha256: str

    def __str__(self) -> str:
        return f"{len(self.train):,} tokens from {self.files} files"

    def batch(
        self, engine: ShardedEngine, step: int, *, size: int, micro_batches: int, context: int, seed: int
    ) -> Batch:
        """This rank's block of the batch of one step: sample j of step i is a function of seed and i · size + j."""

        def load(samples: np.ndarray):
            starts = integers(key_of(seed, "samples"), len(self.train) - context, step * size + samples)
            return _windows(self.train, starts, context)

        return make_batch(load, size, micro_batches, engine, step=step, count=size * context)

    def validation_batches(self, engine: ShardedEngine, *, samples: int, size: int, context: int) -> list[Batch]:
        """``samples`` windows spread evenly over the held-out tokens, in batches of ``size``: always the same."""
        starts = np.linspace(0, len(self.validation) - context - 1, samples).astype(np.int64)
        batches = []
        for first in range(0, samples, size):
            part = starts[first : first + size]

            def load(rows: np.ndarray, part=part):
                return _windows(self.validation, part[rows], context)

            batches.append(make_batch(load, len(part), 1, engine, count=len(part) * context))
        return batches


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """inputs[b s] and targets[b s], one token apart, from each start."""
    window = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return window[:, :-1], window[:, 1:]


def load_corpus(group: Group, path: str | None, context: int) -> Corpus:
    """Read the files on rank 0 and share their tokens with all, in one array a node.

    ``path`` is a file or a folder; None means the standard library. Raises UsageError on every rank if it is
    missing, empty, or too short for one context in either part.
    """
    read = on_rank_zero(group, lambda: _read(path, context))
    facts = text_from_rank_zero(group, lambda: json.dumps([read.train_size, read.files, read.sha256] if read else None))
    train_size, files, sha256 = json.loads(facts)
    tokens = share_array(group, read.parts if read else None, dtype=np.uint16, label="corpus")
    return Corpus(tokens[:train_size], tokens[train_size:], files, sha256)


class _Read(NamedTuple):
    """What files hold, bytes and ends by turns: those to train on come first."""

    parts: list[np.ndarray]
    train_size: int
    files: int
    sha256: str


def _read(path: str | None, context: int) -> _Read:
    if path == "":
        raise UsageError("--data is empty: name a file or a folder, or leave the option out")
    root = str(Path(path)) if path is not None else os.path.dirname(os.__file__)
    if not os.path.exists(root):
        raise UsageError(f"--data {root}: no such file or folder")
    if not (os.path.isfile(root) or os.path.isdir(root)):
        raise UsageError(f"--data {root}: no file and no folder; write what a pipe gives into a file first")
    files = [root] if os.path.isfile(root) else _files(root, "*.py" if path is None else "*")
    digest, end = hashlib.sha256(), np.array([END_OF_FILE], np.uint16)
    train: list[np.ndarray] = []
    validation: list[np.ndarray] = []
    for number, file in enumerate(files):
        with open(file, "rb", buffering=0) as opened:
            if path is not None:
                from spmd_engine.formats.text_documents import check_text  # Python's own source needs no look

                check_text(opened, f"--data {file}")
            content = opened.read()
        name = os.fsencode(file[len(root) :].lstrip(os.sep) or ".")
        digest.update(b"%s\0%d\0" % (name, len(content)))
        digest.update(content)
        held_out = len(files) > 1 and number % HELD_OUT == HELD_OUT // 2
        (validation if held_out else train).extend((np.frombuffer(content, np.uint8), end))
    train_size, size = sum(map(len, train)), sum(map(len, (*train, *validation)))
    if size <= len(files):
        raise UsageError(f"--data {root}: there is nothing to read in it")
    if size - train_size <= context:  # one file, or empty ones: the end of what there is serves as well
        train_size = size - max(size // HELD_OUT, min(context + 1, size // 2))
    shortest = min(train_size, size - train_size)
    if shortest <= context:
        raise UsageError(
            f"--data {root}: {train_size} bytes to train on and {size - train_size} to validate on; "
            f"each must be longer than the context of {context}. Give more text, or a model with a shorter context"
        )
    return _Read([*train, *validation], train_size, len(files), digest.hexdigest())


def _files(root: str, pattern: str) -> list[str]:
    """Paths, a folder's files beside its folders in the order of names.

    Hidden files and folders are left out; of the standard library, which alone has a pattern, its tests, too.
    """
    left_out = _NOT_SOURCE if pattern != "*" else set()
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not (name.startswith(".") or name in left_out)]
        for name in names:
            if not (name.startswith(".") or name in left_out) and fnmatchcase(name, pattern):
                found.append(os.path.join(folder, name))
    return sorted(filter(os.path.isfile, found), key=lambda path: path.split(os.sep))


# --- Real data for dense models: windows of a corpus' bytes as vectors of numbers


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
