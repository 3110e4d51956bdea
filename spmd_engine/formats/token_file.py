"""A corpus as tokens in one file: encoded once, mapped by whoever learns from it.

It is a safetensors file. ``tokens`` has those of all documents, one behind the other, first those to learn from, then
those to validate on; ``ends`` where each document ends; ``learnt``, if there is one, which tokens are to be foretold;
``tokenizer`` the files of the tokenizer, as JSON. The metadata say how many there are of each, and their digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from spmd_engine.errors import CheckpointError, UsageError
from spmd_engine.formats.mapped import MappedArray
from spmd_engine.formats.safetensors_file import read_header

FORMAT = "spmd_engine tokens 1"
_HASHED = 1 << 20  # values at a time
_DTYPES = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "I64": "<i8"}


@dataclass(frozen=True)
class TokenFacts:
    """What a file of tokens holds."""

    tokens: int
    train_tokens: int  #: to learn from; the others are to validate on
    documents: int
    train_documents: int
    learnt: int  #: tokens that are to be foretold
    vocabulary: int
    tokenizer_sha256: str
    sha256: str  #: of all documents' own digests
    files: int  #: that they were read from

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
        return json.loads(self.arrays["tokenizer"].open().tobytes() or b"{}")

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


def layout(facts: TokenFacts, with_learnt: bool, tokenizer: bytes) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file, and at which byte each array begins; after the last, at which it ends (``end``)."""
    shapes = {"tokens": (facts.dtype, facts.tokens), "ends": ("I64", facts.documents)}
    shapes |= {"learnt": ("U8", facts.tokens)} if with_learnt else {}
    shapes["tokenizer"] = ("U8", len(tokenizer))
    described: dict[str, Any] = {}
    at, offsets = 0, {}
    for name in sorted(shapes, key=lambda name: -np.dtype(_DTYPES[shapes[name][0]]).itemsize):  # all stay aligned
        dtype, length = shapes[name]
        offsets[name] = at
        at += length * np.dtype(_DTYPES[dtype]).itemsize
        described[name] = {"dtype": dtype, "shape": [length], "data_offsets": [offsets[name], at]}
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
        described, begin, size = read_header(path)
        facts = TokenFacts(**json.loads(described.pop("__metadata__")["facts"]))
        arrays, end = {}, 0
        for name, each in described.items():
            dtype, shape, (first, last) = _DTYPES[each["dtype"]], tuple(each["shape"]), each["data_offsets"]
            if last - first != prod(shape) * np.dtype(dtype).itemsize:
                raise ValueError(f"{name} of shape {shape} from byte {first} to {last}")
            arrays[name], end = MappedArray(str(path), dtype, begin + first, shape), max(end, last)
        if arrays["tokens"].shape != (facts.tokens,) or arrays["ends"].shape != (facts.documents,):
            raise ValueError("its arrays are of other lengths than it says")
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is a damaged file of tokens ({error}); prepare it anew") from None
    if size != begin + end:
        raise UsageError(f"{path} has {size} bytes, but needs {begin + end}: it is cut short; prepare it anew")
    return TokenFile(str(path), facts, arrays)
