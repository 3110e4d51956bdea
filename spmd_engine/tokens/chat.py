"""Conversations as text in the format of a model's training, written by its chat template."""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from spmd_engine.errors import UsageError
from spmd_engine.foreign import reading
from spmd_engine.tokens.tokenizer import Tokenizer

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
        reply = _answer(text.encode())
    if "error" in reply:
        raise UsageError(f"{_FAILED}: {reply['error']}")
    return reply["text"]


def _answer(request: bytes) -> dict[str, str]:
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
