"""Tokenizers, bytes as tokens, and text that is decoded while its tokens arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import accumulate
from types import MappingProxyType

import numpy as np

from spmd_engine.errors import UsageError


class Tokenizer(ABC):
    """Encodes text as numbers below ``vocabulary``, and decodes them."""

    vocabulary: int  #: tokens are 0 to vocabulary - 1
    end: int | None = None  #: the token that ends a text, if there is one
    separator: int | None = None  #: the token after each document of a corpus; usually equal to ``end``
    before: Sequence[int] = ()  #: tokens that the tokenizer adds before every text
    after: Sequence[int] = ()  #: and those after it
    turn_ends: Sequence[int] = ()  #: tokens that end a message in its chat template, besides ``end``
    files: Mapping[str, str] = MappingProxyType({})  #: texts by name: the files that describe the tokenizer
    sha256: str = ""  #: the SHA-256 of all that determines the encoding, in hexadecimal digits
    chat_template: str | None = None  #: a jinja template that writes a conversation as text
    special: Mapping[str, str] = MappingProxyType({})  #: special tokens by name: {"bos_token": "<s>"}

    @abstractmethod
    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text; if ``special``, with the tokens before and after every text, such as a begin token."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens, without special tokens; an incomplete character becomes a replacement mark."""

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a text, without special tokens around it, and the first and the end character of each.

        Unless a tokenizer says otherwise, they are found by the texts of its tokens. Raises UsageError if these do not
        make up the text; such a tokenizer cannot encode instructions."""
        tokens = self.encode(text, special=False)
        pieces = [self.piece(token) for token in tokens]
        if "".join(pieces) != text:
            raise UsageError(
                f"{type(self).__name__} has no encode_places, which finds what of an instruction is learnt, and the "
                "pieces of its tokens do not make up the text"
            )
        ends = [*accumulate(map(len, pieces))]
        return tokens, [*zip([0, *ends], ends, strict=False)]

    def piece(self, token: int) -> str:
        """The text of a token, also of a special one; as the vocabulary writes it where it is a part of a character."""
        return self.decode([token])

    def is_special(self, token: int) -> bool:
        """Whether it is a token of its own, that no text is split into."""
        return token in (self.end, self.separator)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of many texts, without special tokens before and after each; encoded in parallel if possible."""
        return [self.encode(text, special=False) for text in texts]

    def encode_long(self, chunks: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Encode a text in pieces of UTF-8; yield its tokens in pieces: those of ``encode_all`` for the whole text."""
        (tokens,) = self.encode_all([b"".join(chunks).decode(errors="surrogateescape")])
        yield np.array(tokens, np.int64)


# --- Bytes as tokens: the default for models that are trained with this package


END_OF_FILE = 256  #: the token after each file; smaller tokens are bytes


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, with a separator after each file. It does not end a generation: models continue with a new file."""

    vocabulary = 257
    separator = END_OF_FILE
    sha256 = sha256(b"bytes, and 256 after each text").hexdigest()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode(errors="surrogateescape"))

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        sizes = [len(character.encode(errors="surrogateescape")) for character in text]
        places = [(at, at + 1) for at, size in enumerate(sizes) for _ in range(size)]
        return self.encode(text), places

    def piece(self, token: int) -> str:
        return chr(token) if token < 128 else "<end>" if token == END_OF_FILE else f"<0x{token:02X}>"

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


# --- Text that is decoded while its tokens arrive


BROKEN = "\ufffd"
CONTEXT = 6  #: earlier tokens that are decoded with new ones, because the text of a token can depend on them


class TextStream:
    """Decodes tokens one by one, and returns text as soon as later tokens cannot change it.

    Incomplete characters, and text that may begin one of the ``stop`` strings, are held back. When a stop string is
    complete, ``stopped`` is that string, and the text ends before it. Decoding uses a window, as in vLLM's detokenizer:
    new text is the text of the window's tokens without the text of its earlier ones.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, [text for text in stop if text]
        self._tokens = list(prompt[-CONTEXT:])
        self._begin, self._decoded = 0, len(self._tokens)
        self._held = ""
        self.text = ""  #: all text that was returned so far
        self.stopped: str | None = None

    def feed(self, token: int) -> str:
        """Add a token; return the text that later tokens cannot change any more. Empty after a stop string."""
        if self.stopped is not None:
            return ""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._begin : self._decoded])
        current = self._tokenizer.decode(self._tokens[self._begin :])
        if current.endswith(BROKEN) or len(current) <= len(before):
            return ""
        self._begin, self._decoded = self._decoded, len(self._tokens)
        return self._release(current[len(before) :])

    def finish(self) -> str:
        """Return the text that was held back. No more tokens may follow."""
        if self.stopped is not None:
            return ""
        before = self._tokenizer.decode(self._tokens[self._begin : self._decoded])
        self._held += self._tokenizer.decode(self._tokens[self._begin :])[len(before) :]
        self._begin = self._decoded = len(self._tokens)
        certain = self._release("")
        rest, self._held = self._held, ""  # perhaps the beginning of a stop string
        self.text += rest
        return certain + rest

    def _release(self, new: str) -> str:
        """Return the part of the held and the new text that cannot begin a stop string; keep the rest."""
        self._held += new
        matches = [(at, text) for text in self._stop if (at := self._held.find(text)) >= 0]
        if matches:
            at, self.stopped = min(matches)
            certain, self._held = self._held[:at], ""
        else:
            keep = max((_overlap(self._held, text) for text in self._stop), default=0)
            certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += certain
        return certain


def _overlap(text: str, stop: str) -> int:
    """The number of characters at the end of ``text`` that may begin ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
