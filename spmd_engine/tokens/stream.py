"""Text that is written while its tokens come: only what later tokens cannot change, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_engine.tokens.tokenizer import Tokenizer

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
