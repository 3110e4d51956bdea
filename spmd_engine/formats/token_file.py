"""Files of tokens: a corpus that is encoded once, and that each rank maps for training.

A file of tokens is a safetensors file. ``tokens`` has the tokens of all documents, first those for training, then those
for validation; ``ends`` has the end of each document; ``learnt``, which is optional, marks the tokens that are targets;
``tokenizer`` has the files of the tokenizer, as JSON. The metadata has counts and digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.foreign import parse_json, reading
from spmd_engine.formats.safetensors_file import read_header, tensors_of
from spmd_engine.formats.safetensors_header import dtype_of, header
from spmd_engine.formats.tensor import MappedArray

FORMAT = "spmd_engine tokens 1"
_HASHED = 1 << 20  # values that are hashed at a time


@dataclass(frozen=True)
class TokenFacts(Configuration):
    """Counts and digests of a file of tokens."""

    tokens: int = setting(MISSING, least=0)
    train_tokens: int = setting(MISSING, least=0)  #: the others are for validation
    documents: int = setting(MISSING, least=0)
    train_documents: int = setting(MISSING, least=0)
    learnt: int = setting(MISSING, least=0)  #: tokens that are targets
    vocabulary: int = setting(MISSING, least=1)
    tokenizer_sha256: str = setting(MISSING)
    sha256: str = setting(MISSING)  #: the SHA-256 of the digests of all documents
    files: int = setting(MISSING, least=0)  #: source files

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.train_tokens, self.learnt) > self.tokens or self.train_documents > self.documents:
            raise UsageError("a part has more tokens or documents than the whole")

    @property
    def dtype(self) -> str:
        """The smallest dtype that holds all tokens."""
        return "U16" if self.vocabulary <= 1 << 16 else "U32"


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens, mapped."""

    path: str
    facts: TokenFacts
    arrays: Mapping[str, MappedArray]

    @cached_property
    def tokens(self) -> np.ndarray:
        return self.arrays["tokens"].open()

    @cached_property
    def ends(self) -> np.ndarray:
        return self.arrays["ends"].open()

    @cached_property
    def learnt(self) -> np.ndarray | None:
        return self.arrays["learnt"].open() if "learnt" in self.arrays else None

    @property
    def tokenizer(self) -> dict[str, str]:
        """The texts of the tokenizer's files by name; empty for a byte tokenizer."""
        with reading(f"{self.path} is a damaged file of tokens: its tokenizer", "; prepare it again"):
            files = parse_json(self.arrays["tokenizer"].open().tobytes() or b"{}")
            if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
                raise ValueError("it must be an object of texts by name")
            return files

    def digests(self, first: int, last: int) -> bytes:
        """The concatenated SHA-256 of the documents ``first`` to ``last`` - 1. The SHA-256 of all is in ``facts``."""
        tokens, learnt = np.asarray(self.tokens), None if self.learnt is None else np.asarray(self.learnt)
        begin, digests = int(self.ends[first - 1]) if first else 0, bytearray()
        for end in self.ends[first:last].tolist():
            digest = sha256()
            add_to_digest(digest, tokens[begin:end], "<u4")
            if learnt is not None:
                add_to_digest(digest, learnt[begin:end], "<u1")
            digests += digest.digest()
            begin = end
        return bytes(digests)


def add_to_digest(digest: Any, values: np.ndarray, dtype: str) -> None:
    """Hash numbers as this dtype, in pieces, because a document may be as large as the file."""
    for first in range(0, len(values), _HASHED):
        digest.update(np.ascontiguousarray(values[first : first + _HASHED], dtype))


def shapes_of(facts: TokenFacts, with_learnt: bool, tokenizer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and the shape of each array in a file; ``tokenizer`` is the size of that array in bytes."""
    shapes = {"tokens": (facts.dtype, (facts.tokens,)), "ends": ("I64", (facts.documents,))}
    shapes |= {"learnt": ("U8", (facts.tokens,))} if with_learnt else {}
    return shapes | {"tokenizer": ("U8", (tokenizer,))}


def layout(facts: TokenFacts, with_learnt: bool, tokenizer: bytes) -> tuple[bytes, dict[str, int]]:
    """The header of a file, and the first byte of each array; ``end`` is the end of the file."""
    shapes = shapes_of(facts, with_learnt, len(tokenizer))
    names = sorted(shapes, key=lambda name: -dtype_of(shapes[name][0]).itemsize)  # all stay aligned
    metadata = {"format": FORMAT, "facts": json.dumps(asdict(facts))}
    head, offsets = header([(name, *shapes[name]) for name in names], metadata)
    return head, dict(zip((*names, "end"), offsets, strict=True))


def is_token_file(path: str | Path) -> bool:
    """Whether the file at the path is a file of tokens, by its first bytes."""
    try:
        if not Path(path).is_file():  # reading a pipe may block
            return False
        with open(path, "rb") as file:
            return FORMAT.encode() in file.read(200)
    except OSError:
        return False


def open_token_file(path: str | Path) -> TokenFile:
    """Open a file of tokens; reads its header alone. Raises UsageError if the file is missing or damaged."""
    if not Path(path).is_file():
        raise UsageError(f"{path}: no such file")
    try:
        with reading(f"{path} is a damaged file of tokens", "; prepare it again"):
            described, begin, size = read_header(path)
            facts = TokenFacts.from_json(parse_json(described.pop("__metadata__")["facts"]), f"{path}: its facts")
            tensors = tensors_of(Path(path), described, begin, size)
            expected = shapes_of(facts, "learnt" in tensors, prod(tensors["tokenizer"].shape))
            if {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} != expected:
                raise ValueError("its arrays are not those of its facts")
            arrays = {
                name: MappedArray(str(path), tensor.numpy, tensor.offset, tensor.shape)
                for name, tensor in tensors.items()
            }
    except CheckpointError as error:
        raise UsageError(f"{error}; a damaged file of tokens: prepare it again") from error
    return TokenFile(str(path), facts, arrays)
