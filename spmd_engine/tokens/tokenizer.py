"""What turns text into tokens and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType

import numpy as np


class Tokenizer(ABC):
    """Text as numbers below ``vocabulary``, and back."""

    vocabulary: int  #: tokens are 0 to vocabulary - 1
    end: int | None = None  #: the token that ends a text, if there is one
    separator: int | None = None  #: the token after each document of a corpus; usually the same
    files: Mapping[str, str] = MappingProxyType({})  #: texts by name: files from which it can be read anew
    sha256: str = ""  #: of what decides how text is encoded, in hexadecimal digits
    chat_template: str | None = None  #: a jinja text that writes a conversation as the model was taught
    special: Mapping[str, str] = MappingProxyType({})  #: what templates call special tokens: {"bos_token": "<s>"}

    @abstractmethod
    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text; with what belongs before or after every text (a beginning's mark), if ``special``."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens, without special ones; a broken character becomes a replacement mark."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Many texts, without what belongs before or after each; in parallel where that is possible."""
        return [self.encode(text, special=False) for text in texts]

    def encode_long(self, chunks: Iterable[bytes]) -> Iterator[np.ndarray]:
        """One text that comes in parts, UTF-8: its tokens in parts, those of ``encode_all`` for the whole text."""
        (tokens,) = self.encode_all([b"".join(chunks).decode(errors="surrogateescape")])
        yield np.array(tokens, np.int64)


# --- Bytes as tokens: what the models that are trained here by default read and write


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
