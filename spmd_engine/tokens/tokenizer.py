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


# --- Text that is written while its tokens come: only what later tokens cannot change, and nothing of a stop string


BROKEN = "\ufffd"
CONTEXT = 6  #: tokens before the new ones that are decoded with them, since how a token is written may hang on them


class TextStream:
    """Feed it tokens, and it returns the text that is certain by now.

    Held back are characters of which not all bytes are there, and what may be the beginning of one of the ``stop``
    strings. Once one of these is complete, ``stopped`` says which: the text ends before it. Decoding follows the
    window of vLLM's detokenizer: the text of some tokens, less that of all but the new ones.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, [text for text in stop if text]
        self._tokens = list(prompt[-CONTEXT:])
        self._begin, self._known = 0, len(self._tokens)
        self._held = ""
        self.text = ""  #: all that was returned so far
        self.stopped: str | None = None

    def feed(self, token: int) -> str:
        """The text that is certain with one more token; empty after a stop string."""
        if self.stopped is not None:
            return ""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._begin : self._known])
        now = self._tokenizer.decode(self._tokens[self._begin :])
        if now.endswith(BROKEN) or len(now) <= len(before):
            return ""
        self._begin, self._known = self._known, len(self._tokens)
        return self._let_go(now[len(before) :])

    def finish(self) -> str:
        """The rest, once no more tokens come: what was held back."""
        if self.stopped is not None:
            return ""
        before = self._tokenizer.decode(self._tokens[self._begin : self._known])
        self._held += self._tokenizer.decode(self._tokens[self._begin :])[len(before) :]
        self._begin = self._known = len(self._tokens)
        told = self._let_go("")
        rest, self._held = self._held, ""  # what only might have become a stop string
        self.text += rest
        return told + rest

    def _let_go(self, new: str) -> str:
        """What can be told of what is held and new."""
        self._held += new
        found = [(at, text) for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            at, self.stopped = min(found)
            told, self._held = self._held[:at], ""
        else:
            keep = max((_overlap(self._held, text) for text in self._stop), default=0)
            told, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += told
        return told


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of ``text`` may be the beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
