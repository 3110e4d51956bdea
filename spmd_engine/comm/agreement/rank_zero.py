"""Work that only one rank can do, with an error that all ranks raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError

T = TypeVar("T")


def on_rank_zero(group: Group, do: Callable[[], T], error: type[UsageError] = UsageError) -> T | None:
    """``do()`` on rank 0 alone; its result there, None elsewhere.

    A UsageError or OSError of rank 0 (for example a missing file) is raised as the same ``error`` on every rank.
    """
    result, message = _attempt(do) if group.rank == 0 else (None, b"")
    message = group.broadcast(np.frombuffer(message, np.uint8), label="agreement").tobytes()
    if message:
        raise error(message.decode())
    return result


def on_all_ranks(group: Group, do: Callable[[], T], error: type[UsageError] = UsageError) -> T:
    """``do()`` on every rank. If any fails, all raise the error of the first, as in ``on_rank_zero``."""
    result, message = _attempt(do)
    failed = int(group.all_reduce(np.array(group.rank if message else group.size), "min", label="agreement"))
    if failed < group.size:
        message = group.broadcast(np.frombuffer(message, np.uint8), root=failed, label="agreement").tobytes()
        rank = f"rank {failed} of {group.size}: " if group.size > 1 else ""
        raise error(f"{rank}{message.decode()}")
    return result  # type: ignore[return-value]


def _attempt(do: Callable[[], T]) -> tuple[T | None, bytes]:
    """The result of ``do()``, or the text of its error."""
    try:
        return do(), b""
    except (UsageError, OSError) as error:
        return None, (str(error) or repr(error)).encode(errors="replace")


def text_from_rank_zero(group: Group, make: Callable[[], str], error: type[UsageError] = UsageError) -> str:
    """A text that rank 0 makes, on every rank, in one broadcast; errors as in ``on_rank_zero``."""
    text, message = _attempt(make) if group.rank == 0 else (None, b"")
    answer = b"!" + message if message else b"=" + (text or "").encode(errors="surrogateescape")
    answer = group.broadcast(np.frombuffer(answer, np.uint8), label="agreement").tobytes()
    if answer.startswith(b"!"):
        raise error(answer[1:].decode())
    return answer[1:].decode(errors="surrogateescape")


def gather_json(group: Group, mine: Any, label: str) -> list[Any]:
    """The JSON-serializable objects of all ranks, in rank order; equal ones are the same object. One all_gather."""
    own = np.frombuffer(json.dumps(mine).encode() + b"\0", np.uint8)
    texts = group.all_gather(own, label=label).tobytes().split(b"\0")[:-1]
    parsed = {text: json.loads(text) for text in set(texts)}  # often equal on many ranks
    return [parsed[text] for text in texts]
