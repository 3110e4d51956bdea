"""Bytes as tokens: what the models that are trained here by default read and write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256

import numpy as np

from spmd_engine.tokens.tokenizer import Tokenizer

END_OF_FILE = 256  #: the token after each file; the others are bytes


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, and one token more after each file. Its mark does not end a generation: models go on with another
    file."""

    vocabulary = 257
    separator = END_OF_FILE
    sha256 = sha256(b"bytes, and 256 after each text").hexdigest()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode(errors="surrogateescape"))

    def encode_long(self, chunks: Iterable[bytes]) -> Iterator[np.ndarray]:
        return (np.frombuffer(chunk, np.uint8) for chunk in chunks)

    def decode(self, tokens: Iterable[int]) -> str:
        """The end of a file becomes a line of dashes."""
        pieces, current = [], bytearray()
        for token in tokens:
            if token < END_OF_FILE:
                current.append(token)
            elif token == END_OF_FILE:
                pieces.append(current.decode(errors="replace") + "\n-----\n")
                current = bytearray()
        return "".join(pieces) + current.decode(errors="replace")
