"""Bytes to learn from: by default the source of Python's own standard library, present on every machine."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from spmd_engine.arrays.random import integers, key_of
from spmd_engine.comm.agreement import on_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, make_batch
from spmd_engine.errors import UsageError
from spmd_engine.tokens.bytes import END_OF_FILE

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
    """Read the files on rank 0 and give their tokens to all.

    ``path`` is a file or a folder; None means the standard library. Raises UsageError on every rank if it is
    missing, empty, or too short for one context in either part.
    """
    corpus = on_rank_zero(group, lambda: _read(path, context))
    facts = np.array([len(corpus.train), len(corpus.validation), corpus.files] if corpus else [0, 0, 0])
    train_size, validation_size, files = group.broadcast(facts, label="corpus").tolist()
    digest = np.frombuffer(bytes.fromhex(corpus.sha256), np.uint8) if corpus else None
    sha256 = group.broadcast(digest, label="corpus").tobytes().hex()
    tokens = np.concatenate([corpus.train, corpus.validation]) if corpus else None
    tokens = group.broadcast(tokens, label="corpus")
    return Corpus(tokens[:train_size], tokens[train_size : train_size + validation_size], files, sha256)


def _read(path: str | None, context: int) -> Corpus:
    if path == "":
        raise UsageError("--data is empty: name a file or a folder, or leave the option out")
    root = Path(path) if path is not None else Path(sysconfig.get_paths()["stdlib"])
    if not os.path.exists(root):
        raise UsageError(f"--data {root}: no such file or folder")
    files = [root] if root.is_file() else sorted(_files(root, "*.py" if path is None else "*"))
    digest = hashlib.sha256()
    train: list[np.ndarray] = []
    validation: list[np.ndarray] = []
    for number, file in enumerate(files):
        content = file.read_bytes()
        name = str(file.relative_to(root)).encode(errors="surrogateescape")
        digest.update(b"%s\0%d\0" % (name, len(content)) + content)
        held_out = len(files) > 1 and number % HELD_OUT == HELD_OUT // 2
        (validation if held_out else train).append(_tokens(content))
    if sum(map(len, train + validation)) <= len(files):
        raise UsageError(f"--data {root}: there is nothing to read in it")
    everything, held = (np.concatenate(parts) if parts else np.empty(0, np.uint16) for parts in (train, validation))
    if len(held) <= context:  # one file, or empty ones: the end of what there is serves as well
        everything = np.concatenate([everything, held])
        cut = len(everything) - max(len(everything) // HELD_OUT, min(context + 1, len(everything) // 2))
        everything, held = everything[:cut], everything[cut:]
    corpus = Corpus(everything, held, len(files), digest.hexdigest())
    shortest = min(len(corpus.train), len(corpus.validation))
    if shortest <= context:
        raise UsageError(
            f"--data {root}: {len(corpus.train)} bytes to train on and {len(corpus.validation)} to validate on; "
            f"each must be longer than the context of {context}. Give more text, or a model with a shorter context"
        )
    return corpus


def _files(root: Path, pattern: str) -> Iterable[Path]:
    """Hidden files and folders are left out; of the standard library, which alone has a pattern, its tests, too."""
    left_out = _NOT_SOURCE if pattern != "*" else set()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not (name.startswith(".") or name in left_out)]
        for name in names:
            file = Path(folder, name)
            if not (name.startswith(".") or name in left_out) and fnmatchcase(name, pattern) and file.is_file():
                yield file


def _tokens(content: bytes) -> np.ndarray:
    tokens = np.empty(len(content) + 1, np.uint16)
    tokens[:-1] = np.frombuffer(content, np.uint8)
    tokens[-1] = END_OF_FILE
    return tokens
