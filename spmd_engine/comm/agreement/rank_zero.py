"""Things only one rank can do or know, whose failure must be everyone's."""

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

    A UsageError or OSError of rank 0 (a missing file, say) is raised on every rank as the same ``error``, so
    that the program ends in one way everywhere.
    """
    result, message = _attempt(do) if group.rank == 0 else (None, b"")
    said = group.broadcast(np.frombuffer(message, np.uint8), label="agreement")
    if said.size:
        raise error(said.tobytes().decode())
    return result


def on_all_ranks(group: Group, do: Callable[[], T], error: type[UsageError] = UsageError) -> T:
    """``do()`` on every rank, where any may fail: the first one's error is raised on all, as in ``on_rank_zero``."""
    result, message = _attempt(do)
    failed = int(group.all_reduce(np.array(group.rank if message else group.size), "min", label="agreement"))
    if failed < group.size:
        said = group.broadcast(np.frombuffer(message, np.uint8), root=failed, label="agreement")
        who = f"rank {failed} of {group.size}: " if group.size > 1 else ""
        raise error(f"{who}{said.tobytes().decode()}")
    return result  # type: ignore[return-value]


def _attempt(do: Callable[[], T]) -> tuple[T | None, bytes]:
    """What ``do()`` returns, or what its error says."""
    try:
        return do(), b""
    except (UsageError, OSError) as error:
        return None, (str(error) or repr(error)).encode(errors="replace")


def text_from_rank_zero(group: Group, make: Callable[[], str], error: type[UsageError] = UsageError) -> str:
    """A text that rank 0 makes, on every rank, in one broadcast; errors as in ``on_rank_zero``."""
    text, message = _attempt(make) if group.rank == 0 else (None, b"")
    answer = b"!" + message if message else b"=" + (text or "").encode(errors="surrogateescape")
    said = group.broadcast(np.frombuffer(answer, np.uint8), label="agreement").tobytes()
    if said.startswith(b"!"):
        raise error(said[1:].decode())
    return said[1:].decode(errors="surrogateescape")


def gather_json(group: Group, mine: Any, label: str) -> list[Any]:
    """Every rank's object, made of what JSON knows, in rank order; equal ones are one object. One all_gather."""
    own = np.frombuffer(json.dumps(mine).encode() + b"\0", np.uint8)
    texts = group.all_gather(own, label=label).tobytes().split(b"\0")[:-1]
    read = {text: json.loads(text) for text in set(texts)}  # often, many ranks say the same
    return [read[text] for text in texts]
