"""A corpus as tokens in one file: encoded once, mapped by whoever learns from it.

It is a safetensors file. ``tokens`` has those of all documents, one behind the other, first those to learn from, then
those to validate on; ``ends`` where each document ends; ``learnt``, if there is one, which tokens are to be foretold;
``tokenizer`` the files of the tokenizer, as JSON. The metadata say how many there are of each, and their digest.
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
from spmd_engine.formats.tensor import MappedArray

FORMAT = "spmd_engine tokens 1"
_HASHED = 1 << 20  # values at a time
_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "I64": "<i8"}


@dataclass(frozen=True)
class TokenFacts(Configuration):
    """What a file of tokens holds."""

    tokens: int = setting(MISSING, least=0)
    train_tokens: int = setting(MISSING, least=0)  #: to learn from; the others are to validate on
    documents: int = setting(MISSING, least=0)
    train_documents: int = setting(MISSING, least=0)
    learnt: int = setting(MISSING, least=0)  #: tokens that are to be foretold
    vocabulary: int = setting(MISSING, least=1)
    tokenizer_sha256: str = setting(MISSING)
    sha256: str = setting(MISSING)  #: of all documents' own digests
    files: int = setting(MISSING, least=0)  #: that they were read from

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.train_tokens, self.learnt) > self.tokens or self.train_documents > self.documents:
            raise UsageError("a part has more tokens or documents than the whole")

    @property
    def dtype(self) -> str:
        """Of tokens: the smallest that holds them."""
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
        """The tokenizer's files, texts by name; none of bytes."""
        with reading(f"{self.path} is a damaged file of tokens: its tokenizer", "; prepare it again"):
            files = parse_json(self.arrays["tokenizer"].open().tobytes() or b"{}")
            if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
                raise ValueError("it must be an object of texts by name")
            return files

    def digest(self) -> str:
        """SHA-256 of all documents, read anew: equal to that of ``facts``, unless the file was damaged."""
        return sha256(self.digests(0, self.facts.documents)).hexdigest()

    def digests(self, first: int, last: int) -> bytes:
        """SHA-256 of each of the documents ``first`` up to and without ``last``, one behind the other."""
        tokens, learnt = np.asarray(self.tokens), None if self.learnt is None else np.asarray(self.learnt)
        begin, found = int(self.ends[first - 1]) if first else 0, bytearray()
        for end in self.ends[first:last].tolist():
            digest = sha256()
            add_to_digest(digest, tokens[begin:end], "<u4")
            if learnt is not None:
                add_to_digest(digest, learnt[begin:end], "<u1")
            found += digest.digest()
            begin = end
        return bytes(found)


def add_to_digest(digest: Any, values: np.ndarray, dtype: str) -> None:
    """Hash numbers as this dtype, a part at a time: a document may be as large as the file."""
    for first in range(0, len(values), _HASHED):
        digest.update(np.ascontiguousarray(values[first : first + _HASHED], dtype))


def shapes_of(facts: TokenFacts, with_learnt: bool, tokenizer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and the shape of each array in a file, with so many bytes of the ``tokenizer``."""
    shapes = {"tokens": (facts.dtype, (facts.tokens,)), "ends": ("I64", (facts.documents,))}
    shapes |= {"learnt": ("U8", (facts.tokens,))} if with_learnt else {}
    return shapes | {"tokenizer": ("U8", (tokenizer,))}


def layout(facts: TokenFacts, with_learnt: bool, tokenizer: bytes) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file, and at which byte each array begins; after the last, at which it ends (``end``)."""
    shapes = shapes_of(facts, with_learnt, len(tokenizer))
    described: dict[str, Any] = {}
    at, offsets = 0, {}
    for name in sorted(shapes, key=lambda name: -np.dtype(_DTYPES[shapes[name][0]]).itemsize):  # all stay aligned
        dtype, shape = shapes[name]
        offsets[name] = at
        at += prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offsets[name], at]}
    metadata = {"format": FORMAT, "facts": json.dumps(asdict(facts))}
    header = json.dumps({"__metadata__": metadata, **described}).encode()
    header += b" " * (-len(header) % 8)
    begin = 8 + len(header)
    return len(header).to_bytes(8, "little") + header, {name: begin + offset for name, offset in offsets.items()} | {
        "end": begin + at
    }


def is_token_file(path: str | Path) -> bool:
    """Whether this is a file of tokens, to go by its beginning."""
    try:
        if not Path(path).is_file():  # of a pipe nothing may come
            return False
        with open(path, "rb") as file:
            return FORMAT.encode() in file.read(200)
    except OSError:
        return False


def open_token_file(path: str | Path) -> TokenFile:
    """A file of tokens, of which only the header is read. Raises UsageError for one that is missing or damaged."""
    if not Path(path).is_file():
        raise UsageError(f"{path}: no such file")
    try:
        with reading(f"{path} is a damaged file of tokens", "; prepare it again"):
            described, begin, size = read_header(path)
            facts = TokenFacts.from_json(parse_json(described.pop("__metadata__")["facts"]), f"{path}: its facts")
            tensors = tensors_of(Path(path), described, begin, size)
            expected = shapes_of(facts, "learnt" in tensors, prod(tensors["tokenizer"].shape))
            if {name: (each.dtype, each.shape) for name, each in tensors.items()} != expected:
                raise ValueError("its arrays are others than its facts say")
            arrays = {
                name: MappedArray(str(path), _DTYPES[each.dtype], each.offset, each.shape)
                for name, each in tensors.items()
            }
    except CheckpointError as error:
        raise UsageError(f"{error}; a damaged file of tokens: prepare it again") from error
    return TokenFile(str(path), facts, arrays)
