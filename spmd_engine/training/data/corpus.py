"""Bytes to learn from: by default the source of Python's own standard library, present on every machine."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spmd_engine.arrays.random import integers, key_of
from spmd_engine.comm.agreement.rank_zero import on_rank_zero, share_array, text_from_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, make_batch
from spmd_engine.errors import UsageError
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
