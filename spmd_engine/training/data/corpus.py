"""Corpora of bytes: by default the source of Python's standard library, which is on every machine."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from string import ascii_uppercase, digits
from typing import Any

import numpy as np

from spmd_engine.arguments import checked
from spmd_engine.arrays.random import integers, key_of
from spmd_engine.comm.agreement.rank_zero import json_from_rank_zero, share_array
from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError
from spmd_engine.foreign import check_link, first_few
from spmd_engine.models.model import Model
from spmd_engine.tokens.tokenizer import END_OF_FILE
from spmd_engine.training.data.array_data import SampledData

HELD_OUT = 20  #: one file of this many is for validation (of a single file, the last part)
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo"}


@dataclass(frozen=True)
class Corpus:
    """Tokens[n] for training and for validation, equal on every rank, with the number and digest of their files."""

    train: np.ndarray
    validation: np.ndarray
    files: int
    sha256: str
    documents: int = 0  #: a file has one, or one a row
    left_out: Mapping[str, int] = field(default_factory=dict)  #: numbers of rows, by the reason
    unread: Sequence[str] = ()  #: keys or columns of rows that are not read

    def __str__(self) -> str:
        rows = "" if self.documents in (0, self.files) else f", {self.documents:,} documents"
        rest = "".join(f"; {count:,} left out: {reason}" for reason, count in self.left_out.items())
        rest += f"; not read: {first_few(self.unread, 8)}" if self.unread else ""
        return f"{len(self.train):,} tokens from {self.files} files{rows}{rest}"

    def windows(self, length: int, seed: int = 0) -> TokenWindows:
        """Samples of ``length`` tokens each; the seed determines the starts of training samples."""
        return TokenWindows(self, length, seed=seed)


@checked({"context": 1})
def load_corpus(group: Group, path: str | None, context: int, columns: Mapping[str, str] | None = None) -> Corpus:
    """Read the files on rank 0 and share their tokens with all ranks, in one array for each node.

    ``path`` is a file or a folder; None means the standard library. ``columns`` names what to read in rows.
    Raises UsageError on every rank if it is missing, empty, or too short for one context in either part.
    """
    parts: list[np.ndarray] = []  # on rank 0

    def read() -> list[Any]:
        parts[:], *facts = _read(path, context, columns)
        return facts

    train_size, facts = json_from_rank_zero(group, read)
    tokens = share_array(group, parts, dtype=np.uint16, label="corpus")
    return Corpus(tokens[:train_size], tokens[train_size:], **facts)


def _read(
    path: str | None, context: int, columns: Mapping[str, str] | None
) -> tuple[list[np.ndarray], int, dict[str, Any]]:
    """Bytes and end of each document, training documents first; tokens for training; and facts of a ``Corpus``."""
    if path == "":
        raise UsageError("--data is empty: name a file or a folder, or leave the option out")
    root = str(Path(path)) if path is not None else os.path.dirname(os.__file__)
    if not os.path.exists(root):
        raise UsageError(f"--data {root}: no such file or folder")
    if not (os.path.isfile(root) or os.path.isdir(root)):
        raise UsageError(f"--data {root}: neither a file nor a folder; write the output of a pipe into a file first")
    files = [root] if os.path.isfile(root) else _files(root, "*.py" if path is None else "*")
    digest, end, left_out, unread = hashlib.sha256(), np.array([END_OF_FILE], np.uint16), Counter[str](), list[str]()
    train: list[np.ndarray] = []
    validation: list[np.ndarray] = []
    if path is None:
        contents = [(file, _content(file)) for file in files]
    else:
        from spmd_engine.formats.text_documents import documents_among  # which Python's own source does not need

        found, others = documents_among([(file, os.path.getsize(file)) for file in files], columns, [root])
        files = [file for file, _ in found]
        for kind in dict.fromkeys(others.values()):
            names = [file[len(root) :].lstrip(os.sep) for file, its_kind in others.items() if its_kind == kind]
            left_out[f"{kind} ({first_few(names)})"] = len(names)
        contents = [*_contents(files, columns, left_out, unread)]
    for number, (file, content) in enumerate(contents):
        name = os.fsencode(file[len(root) :].lstrip(os.sep) or ".")
        digest.update(b"%s\0%d\0" % (name, len(content)))
        digest.update(content)
        held_out = len(contents) > 1 and number % HELD_OUT == HELD_OUT // 2
        (validation if held_out else train).extend((np.frombuffer(content, np.uint8), end))
    train_size, size = sum(map(len, train)), sum(map(len, (*train, *validation)))
    if size <= len(contents):
        raise UsageError(f"--data {root}: there is nothing to read in it")
    if size - train_size <= context:  # one file, or empty ones: validate on the end of all bytes
        train_size = size - max(size // HELD_OUT, min(context + 1, size // 2))
    shortest = min(train_size, size - train_size)
    if shortest <= context:
        raise UsageError(
            f"--data {root}: {train_size} bytes to train on and {size - train_size} to validate on; "
            f"each must be longer than the context of {context}. Give more text, a smaller --length, or a model with a "
            "shorter context"
        )
    facts = {"documents": len(contents), "files": len(files), "sha256": digest.hexdigest(), "left_out": left_out}
    facts["unread"] = list(dict.fromkeys(unread))
    return [*train, *validation], train_size, facts


def _content(file: str) -> bytes:
    """What ``Path.read_bytes`` returns, in two thirds of the time: without a buffer in between."""
    with open(file, "rb", buffering=0) as opened:
        return opened.read()


def _contents(
    files: Sequence[str], columns: Mapping[str, str] | None, left_out: Counter[str], unread: list[str]
) -> Iterator[tuple[str, bytes]]:
    """The file and the UTF-8 of each document; ``left_out`` gets the numbers of the other rows, by the reason, and
    ``unread`` the names of what else rows have."""
    from spmd_engine.formats.text_documents import documents, find_files  # which Python's own source does not need

    for file in files:
        ((_, size),) = found = find_files([file])
        if not size:
            yield file, b""
            continue
        for document in documents(found, 0, size, size, columns):
            if not document.is_text:
                raise UsageError(
                    f"--data {document.where}: an instruction, of which only the answer is learnt; encode it first: "
                    "data prepare --tokenizer PATH --output FILE, then --data FILE"
                )
            unread += document.unread
            if document.left_out:
                left_out[document.left_out] += 1
            else:
                yield file, b"".join(document.chunks())


def _files(root: str, pattern: str) -> list[str]:
    """Paths of the files in a folder and its subfolders, in the order of names.

    Hidden and compiled files are left out; so are the tests of the standard library, which alone has a pattern.
    """
    left_out = _NOT_SOURCE if pattern != "*" else {"__pycache__"}
    paths = []
    for folder, folders, names in os.walk(root):
        hidden = {name for name in (*folders, *names) if name.startswith(".") or name in left_out}
        folders[:] = [name for name in folders if name not in hidden]
        names = [name for name in names if name not in hidden and fnmatchcase(name, pattern)]
        for name in (*folders, *names) if pattern == "*" else ():
            check_link(os.path.join(folder, name))
        paths += (os.path.join(folder, name) for name in names)
    return sorted(filter(os.path.isfile, paths), key=lambda path: path.split(os.sep))


# --- Samples: windows of a corpus, as tokens or as vectors of numbers

BITS = 8
#: The kinds of the next character in Python's source; "other" is the kind of all further characters.
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
class Windows(SampledData):
    """Samples from a corpus: windows of tokens.

    ``features`` is the size of a sample's input, ``dtype`` that of inputs and of the engine's parameters. The ``seed``
    and a sample's number determine the start of a training window; held-out windows are spread evenly. Raises
    UsageError for a corpus shorter than one window.
    """

    corpus: Corpus
    features: int
    dtype: Any = np.float32
    seed: int = 0

    def __post_init__(self) -> None:
        shortest = min(len(self.corpus.train), len(self.corpus.validation))
        if shortest < self.length:
            raise UsageError(f"--data: {shortest} bytes in one part, fewer than a window of {self.length}; give more")

    @property
    def length(self) -> int:
        """Tokens of a window, including those to predict."""
        return self.features + 1

    @property
    def terms(self) -> int:
        return self.features

    def examples(self, numbers: np.ndarray, held_out: bool = False) -> tuple[np.ndarray, np.ndarray]:
        tokens, starts = self.corpus.validation, numbers
        if not held_out:
            tokens = self.corpus.train
            starts = integers(key_of(self.seed, "samples"), len(tokens) - self.length + 1, numbers)
        return self.inputs_and_targets(tokens[starts[:, None] + np.arange(self.length)])

    def held_out_numbers(self, samples: int | None) -> np.ndarray:
        last = len(self.corpus.validation) - self.length
        return np.linspace(0, last, last + 1 if samples is None else samples).astype(np.int64)

    @abstractmethod
    def inputs_and_targets(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs[b ...] and targets[b ...] of windows, tokens[b length]."""


class TokenWindows(Windows):
    """x[b s]: as many tokens as features; targets[b s]: the same window one token later."""

    def inputs_and_targets(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = tokens.astype(np.int64)
        return tokens[:, :-1], tokens[:, 1:]


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

    def inputs_and_targets(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bits = np.unpackbits(_bytes(tokens[:, :-1]), axis=1).astype(self.dtype)
        return bits * 2 - 1, classes_of(tokens[:, -1])


@dataclass(frozen=True)
class BytePairs(Windows):
    """x[b d]: d bytes, scaled to [-1, 1]; targets[b d]: the same window one byte later.

    ``shape`` is that of each sample and its targets: x[b s d], or x[b h w c]. The loss is the mean squared error. The
    end of a file is byte 0.
    """

    shape: tuple[int, ...] = ()

    def inputs_and_targets(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scaled = _bytes(tokens).astype(self.dtype) / 127.5 - 1
        shape = (len(tokens), *(self.shape or [self.features]))
        return scaled[:, :-1].reshape(shape), scaled[:, 1:].reshape(shape)


def data_for(
    model: Model, corpus: Corpus, dtype: Any = np.float32, length: int | None = None, seed: int = 0
) -> Windows:
    """The samples of a corpus for a model: its targets are tokens, the class of the next byte, or the next bytes.

    The letters of its inputs and targets determine which. ``length`` is that of a sample in tokens, by default the
    model's context. Raises UsageError for other letters, and for sizes that do not fit.
    """
    dims = model.inputs.split(), model.targets.split()
    if dims == (["b", "s"], ["b", "s"]):
        return corpus.windows(length or model.context, seed)
    first, last = model.layers[0][1], model.layers[-1][1]
    if dims == (["b", "d"], ["b"]):
        classes = last.sizes[model.outputs.split()[-1]]
        if classes != len(CLASSES):
            raise UsageError(f"{model.name} has {classes} classes, this data {len(CLASSES)}: {', '.join(CLASSES)}")
        return ByteClasses(corpus, first.sizes["d"], dtype, seed)
    if dims == (["b", "d"], ["b", "d"]):
        return BytePairs(corpus, first.sizes["d"], dtype, seed)
    raise UsageError(f"{model.name}: no data of inputs [{model.inputs}] and targets [{model.targets}]; bring your own")


def classes_of(tokens: np.ndarray) -> np.ndarray:
    """The number of each token's class, in the order of ``CLASSES``."""
    table = np.full(END_OF_FILE + 1, len(CLASSES) - 1)
    for number, characters in enumerate(CLASSES.values()):
        table[list(characters.encode())] = number
    return table[tokens]


def _bytes(tokens: np.ndarray) -> np.ndarray:
    return np.where(tokens == END_OF_FILE, 0, tokens).astype(np.uint8)
