"""Texts, prompts and conversations as tokens: what stands before and after them, and which tokens are learnt.

A text is encoded once, as a whole: tokens at the border between what is read and what is learnt are those that a text
without a border has. The border is found by the places of the tokens in the text.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from spmd_engine.errors import UsageError
from spmd_engine.foreign import reading
from spmd_engine.tokens.tokenizer import Tokenizer

# --- Conversations as text in the format of a model's training, written by its chat template


Message = Mapping[str, Any]  #: {"role": "user", "content": "Hello"}
SAFE = [3, 1, 6]  #: the version of jinja2: templates leave the sandbox of earlier ones (CVE-2025-27516)
SECONDS = 5.0  #: CPU time that a template may take for a conversation
_FAILED = "the chat template cannot write this conversation"
_one_at_a_time = Lock()


def chat_text(
    tokenizer: Tokenizer, messages: Sequence[Message], *, answer: bool = True, tools: Sequence[Any] | None = None
) -> str:
    """A conversation as text; if an ``answer`` is to follow, with the beginning of the assistant's next turn.
    ``tools`` describes what the assistant may call.

    Templates are untrusted programs: they run in jinja's sandbox, in a process with limits on time and memory.
    Raises UsageError for a tokenizer without a template, for a template that is damaged or exceeds the limits, and for
    messages that the template refuses.
    """
    if not tokenizer.chat_template:
        raise UsageError(
            "this model has no chat template: write its format into the texts to learn, or into the prompt of a "
            "'generate' without --chat"
        )
    if "tool_calls" not in tokenizer.chat_template:  # it would write None
        messages = [{**turn, "content": ""} if turn.get("content", "") is None else turn for turn in messages]
    values = {"messages": messages, "tools": tools or None, "documents": None, "add_generation_prompt": answer}
    request = {"template": tokenizer.chat_template, "values": {**tokenizer.special, **values}, "seconds": SECONDS}
    with reading(_FAILED):
        text = json.dumps(request, default=dict)
    with _one_at_a_time:
        reply = _reply(text.encode())
    if "error" in reply:
        raise UsageError(f"{_FAILED}: {reply['error']}")
    return reply["text"]


def _reply(request: bytes) -> dict[str, str]:
    """The answer of the process, or the error with which it ended; the next request then starts another process."""
    process = _process()
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(request + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = b""
    except BaseException:  # Ctrl-C: otherwise the next request would get this answer
        _end(process)
        raise
    if line.endswith(b"\n"):
        return json.loads(line)
    _end(process)
    return {"error": f"it computes for more than {SECONDS:g} s, or broke its process (exit code {process.returncode})"}


@cache
def _process() -> subprocess.Popen[bytes]:
    """The process that runs templates, in a session of its own, so that it does not receive a terminal's Ctrl-C.

    Raises UsageError for a jinja2 that is missing, or whose sandbox a template can leave.
    """
    from importlib.metadata import PackageNotFoundError, version  # whose import takes long

    try:
        installed = version("jinja2")
    except PackageNotFoundError:
        raise UsageError("a chat template needs jinja2: pip install 'spmd_engine[hf]'") from None
    if [int(number) for number in re.findall(r"\d+", installed)[:3]] < SAFE:
        raise UsageError(f"a chat template could run any code with jinja2 {installed}: pip install 'jinja2>=3.1.6'")
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("chat_process.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    _process.cache_clear()
    process.kill()
    process.communicate()


# --- As tokens


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
