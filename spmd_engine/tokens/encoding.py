"""Texts, prompts and conversations as tokens: what stands before and after them, and which tokens are learnt.

A text is encoded once, as a whole: tokens at the border between what is read and what is learnt are those that a text
without a border has. The border is found by the places of the tokens in the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.tokens.chat import Message, chat_text
from spmd_engine.tokens.tokenizer import Tokenizer


def around(
    tokenizer: Tokenizer, first: Sequence[int], last: Sequence[int] | None, *, by_template: bool = False
) -> tuple[list[int], list[int]]:
    """The tokens to add before and after a text with these first and last tokens: one rule for all texts.

    Before it: what the tokenizer adds to every text, unless the text begins with it; nothing if a chat template has
    written it. After it: what the tokenizer adds, or else the end token, unless the text ends with it; nothing
    (``last`` is None) after a text that a model is to continue.
    """
    before, after = list(tokenizer.before), list(tokenizer.after)
    if by_template or (before and list(first[: len(before)]) == before):
        before = []
    if not after and tokenizer.separator is not None:
        after = [tokenizer.separator]
    if last is None or (after and list(last[-len(after) :]) == after):
        after = []
    return before, after


@dataclass(frozen=True)
class Encoded:
    """The tokens of a document."""

    tokens: list[int]
    learnt: np.ndarray | None = None  #: flags of the tokens that are targets; None: all of them are
    text: str = ""  #: what a chat template has written, or the text itself
    notice: str = ""  #: what of the document is not in it


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that a model is to read, and to continue."""
    tokens = tokenizer.encode(text, special=False)
    return [*around(tokenizer, tokens, None)[0], *tokens]


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> tuple[str, list[int]]:
    """The text of a conversation up to the assistant's next message, and its tokens. Raises UsageError."""
    text = chat_text(tokenizer, messages, tools=tools)
    return text, tokenizer.encode(text, special=False)


def encode_text(tokenizer: Tokenizer, text: str) -> Encoded:
    """A whole document, with its end."""
    (tokens,) = tokenizer.encode_all([text])
    before, after = around(tokenizer, tokens, tokens)
    return Encoded([*before, *tokens, *after], None, text)


def encode_pair(tokenizer: Tokenizer, prompt: str, completion: str) -> Encoded:
    """A prompt with its completion; only the latter, with its end, is learnt."""
    tokens, places = tokenizer.encode_places(prompt + completion)
    before, after = around(tokenizer, tokens, tokens)
    learnt = [end > len(prompt) for _, end in places]
    flags = np.array([0] * len(before) + learnt + [1] * len(after), np.uint8)
    return Encoded([*before, *tokens, *after], flags, prompt + completion)


def encode_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> Encoded:
    """A conversation, by the chat template; only the assistant's messages are learnt, each up to its end token.

    If the template writes no end after the last one, the end token is added. Raises UsageError for a conversation
    without an answer, and for templates that change what precedes an answer when the conversation continues.
    """
    answers = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    if not answers:
        raise UsageError("a conversation without a message of the assistant has nothing to be learnt")
    messages = messages[: answers[-1] + 1]
    text = chat_text(tokenizer, messages, answer=False, tools=tools)
    tokens, places = tokenizer.encode_places(text)
    begins, ends = np.array(places, np.int64).reshape(-1, 2).T
    special = np.array([tokenizer.is_special(token) for token in tokens], bool)
    learnt, ended, notice = np.zeros(len(tokens), np.uint8), False, ""
    for begin, end, as_in_chats in _answers(tokenizer, messages, answers, tools, text, ends):
        notice = notice if as_in_chats else REWRITTEN
        inside = np.flatnonzero((ends > begin) & (begins < end))
        last = inside[special[inside]][-1:]
        ended = bool(len(last)) and not text[ends[last[0]] : end].strip()
        learnt[inside[inside <= last[0]] if ended else inside] = 1
    after = [] if ended else around(tokenizer, tokens, tokens, by_template=True)[1]
    flags = np.concatenate([learnt, np.ones(len(after), np.uint8)])
    return Encoded([*tokens, *after], flags, text, notice or _unwritten(tokenizer.chat_template or "", messages, tools))


#: A notice: what a model of such a template answers in a chat, it does not learn there.
REWRITTEN = "answers before the last that the chat template writes in another way, as without reasoning"


def _unwritten(template: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
    """What of a conversation its template does not mention."""
    calls = any(message.get("tool_calls") for message in messages)
    for name, has_some in ("tools", tools), ("tool_calls", calls):
        if has_some and name not in template:
            return f"{name}, which the chat template does not write"
    return ""


def _answers(
    tokenizer: Tokenizer, messages: Sequence[Message], answers: Sequence[int], tools: Any, text: str, ends: np.ndarray
) -> Iterator[tuple[int, int, bool]]:
    """The first character of each of the assistant's messages in the text of a conversation, that after it, and whether
    the message is written as it is where it is the last. ``ends`` are the ends of the text's tokens."""
    for number in answers:
        before = chat_text(tokenizer, messages[:number], tools=tools)
        upto = (
            text if number == answers[-1] else chat_text(tokenizer, messages[: number + 1], answer=False, tools=tools)
        )
        begin, end, as_last = len(before), len(upto), True
        if text.startswith(before) and not text.startswith(upto):
            content = str(messages[number].get("content") or "").strip()
            tail, at = upto[upto.rfind(content) + len(content) :], text.find(content, begin) if content else -1
            end = at + len(content) if at >= 0 else 0
            as_last = upto.startswith(text[:end])  # else a last answer, or its end, is written in another way
            shared = commonprefix([tail, text[end:]])
            if tail != shared:  # whole lines, or at least tokens: it may contain the first letters of what follows
                shared = shared[: shared.rfind("\n") + 1] or shared
            last = end + len(shared)
            end = max(end, int(ends[ends <= last].max(initial=0))) if shared or not tail else 0
        if not text.startswith(before) or end < begin:
            raise UsageError(
                "the chat template changes earlier messages when a conversation continues, so its answers cannot be "
                'located. Write {"prompt": ..., "completion": ...} for each answer'
            )
        yield begin, end, as_last
