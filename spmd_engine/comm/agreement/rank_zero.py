"""Work of one rank whose errors all ranks raise, and data of one rank that all ranks get.

Rank 0 is the group's ``lowest``: rank 0 of the job in a group of all ranks, at any position of the mesh.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from math import prod
from typing import Any, TypeVar

import numpy as np

from spmd_engine.comm.agreement.signature import number_of
from spmd_engine.comm.group import Group
from spmd_engine.comm.shared_memory.arena import ALIGNMENT, OwnMemory, mapped
from spmd_engine.errors import UsageError

T = TypeVar("T")
Errors = type[Exception] | tuple[type[Exception], ...]


def waits_outside(group: Group, what: str) -> AbstractContextManager[None]:
    """A block in which rank 0 waits for something outside the job, such as a user, and the others in a call for rank 0,
    for any time: without a timeout, and without a report of a hang. ``what`` rank 0 does: "waiting for a request"."""
    progress = group.comm.progress
    return progress.activity.idle(what) if group.rank == group.lowest else progress.patience()


def on_rank_zero(group: Group, do: Callable[[], T], error: type[UsageError] = UsageError) -> T | None:
    """Call ``do()`` on rank 0; returns its result on rank 0, None on other ranks.

    If it raises UsageError or OSError (for example for a missing file), every rank raises the same ``error``.
    """
    result, message = _attempt(do) if group.rank == group.lowest else (None, b"")
    message = group.broadcast(np.frombuffer(message, np.uint8), group.lowest, label="agreement").tobytes()
    if message:
        raise error(message.decode())
    return result


def on_all_ranks(
    group: Group, do: Callable[[], T], error: type[UsageError] = UsageError, *, catch: Errors = (UsageError, OSError)
) -> T:
    """Call ``do()`` on every rank. If any fails, all raise the error of the first such rank, as in ``on_rank_zero``. It
    names this rank unless all fail.

    ``catch``: the exceptions that are failures. Others end the job, as they may come from a collective.
    """
    result, message = _attempt(do, catch)
    mine = [group.rank if message else group.size, bool(message)]
    failed, all_fail = map(int, group.all_reduce(np.array(mine), "min", label="agreement"))
    if failed < group.size:
        message = group.broadcast(np.frombuffer(message, np.uint8), root=failed, label="agreement").tobytes()
        rank = "" if all_fail else f"rank {failed} of {group.size}: "
        raise error(f"{rank}{message.decode()}")
    return result  # type: ignore[return-value]


def _attempt(do: Callable[[], T], catch: Errors = (UsageError, OSError)) -> tuple[T | None, bytes]:
    """The result of ``do()``, or the text of its error."""
    try:
        return do(), b""
    except catch as error:
        return None, failure_text(error).encode(errors="replace")


def failure_text(error: Exception) -> str:
    """The text of an error for other ranks: with its type, on one line, if it was not raised for the user."""
    if isinstance(error, (UsageError, OSError)):
        return str(error) or repr(error)
    return " ".join(f"{type(error).__name__}: {error}".split("\n"))


def text_from_rank_zero(group: Group, make: Callable[[], str], error: type[UsageError] = UsageError) -> str:
    """The result of ``make()`` on rank 0, on every rank, by one broadcast; raises errors like ``on_rank_zero``."""
    text, message = _attempt(make) if group.rank == group.lowest else (None, b"")
    answer = b"!" + message if message else b"=" + (text or "").encode(errors="surrogateescape")
    answer = group.broadcast(np.frombuffer(answer, np.uint8), group.lowest, label="agreement").tobytes()
    if answer.startswith(b"!"):
        raise error(answer[1:].decode())
    return answer[1:].decode(errors="surrogateescape")


def json_from_rank_zero(group: Group, make: Callable[[], Any], error: type[UsageError] = UsageError) -> Any:
    """The JSON-serializable result of ``make()`` on rank 0, on every rank: see ``text_from_rank_zero``."""
    return json.loads(text_from_rank_zero(group, lambda: json.dumps(make()), error))


def gather_json(group: Group, mine: Any, label: str) -> list[Any]:
    """The JSON-serializable objects of all ranks, in rank order; equal ones are the same object. One all_gather."""
    row = np.frombuffer(json.dumps(mine).encode() + b"\0", np.uint8)
    texts = group.all_gather(row, label=label).tobytes().split(b"\0")[:-1]
    parsed = {text: json.loads(text) for text in set(texts)}  # many ranks often have equal objects
    return [parsed[text] for text in texts]


def gather_equal_json(group: Group, mine: Any, label: str) -> list[Any]:
    """As ``gather_json``, for objects that are equal on many ranks: a number of each is gathered, and if they differ,
    the objects of the first of the ranks with equal ones."""
    text = json.dumps(mine)
    numbers = group.all_gather(np.array([number_of((text,))], np.int64), label=label).tolist()
    return of_equal_ranks(group, json.loads(text), numbers, label)


def of_equal_ranks(group: Group, mine: Any, numbers: Sequence[int], label: str) -> list[Any]:
    """The JSON-serializable objects of all ranks, equal ones as one object, if all ranks know ``numbers`` that are
    equal where these are. One all_gather, unless all are equal."""
    first: dict[int, int] = {}  # by number, the first rank that has it
    for rank, number in enumerate(numbers):
        first.setdefault(number, rank)
    if len(first) == 1:
        return [mine] * group.size
    sent = gather_json(group, mine if first[numbers[group.rank]] == group.rank else None, label)
    return [sent[first[number]] for number in numbers]


# --- A read-only array, such as training data, stored once for each node instead of once for each rank


_AT_ONCE = 1 << 20  # bytes of a message between nodes


def share_array(group: Group, parts: Sequence[np.ndarray] | None, *, dtype: Any = None, label: str = "") -> np.ndarray:
    """Rank 0's ``parts``, joined along their first axis, as a read-only array on every rank. Collective.

    ``dtype``: of the result; None: of the first part. The other ranks' ``parts`` are ignored and may be None. Ranks of
    a node map the same memory, like arenas; where the system refuses, each rank has an array of its own.
    """
    zero = group.lowest
    mine = parts if group.rank == zero and parts is not None else ()
    shape, name = json_from_rank_zero(group, lambda: _joined(mine, dtype))
    dtype, size = np.dtype(name), ALIGNMENT + prod(shape) * np.dtype(name).itemsize
    hosts, host = group.comm.hosts, group.comm.node
    # the rank of each node that makes its memory: rank 0, or the first
    first, alone = zero if hosts[zero] == host else hosts.index(host), hosts.count(host) == 1
    makes = first == group.rank and not alone and group.connections.neighbours is not None
    with closing(OwnMemory(size if makes else 0)) as own_memory:
        memories = mapped([gather_json(group, own_memory.handle, label)[first]])
        x = np.ndarray(shape, dtype, memories[0], ALIGNMENT) if memories else np.empty(shape, dtype)
        if group.rank == zero and memories:
            own_memory.write((np.ascontiguousarray(part, dtype) for part in mine), ALIGNMENT)
        elif group.rank == zero:
            np.concatenate(mine, out=x)
        # All ranks have tried to map the memory, and rank 0 has written:
        everywhere = bool(group.all_reduce(np.array(alone or bool(memories)), "min", label=label))
    if not everywhere:
        x = group.broadcast(x, zero, label=label)
    elif len(set(hosts)) > 1:
        _pass_to_nodes(group, x, writes=zero != first == group.rank, label=label)
    x.flags.writeable = False
    return x


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the joined ``parts``."""
    return (sum(map(len, parts)), *parts[0].shape[1:]), np.dtype(dtype or parts[0].dtype).str


def _pass_to_nodes(group: Group, x: np.ndarray, writes: bool, label: str) -> None:
    """Copy rank 0's ``x`` into the memory of the other nodes, where one rank of each ``writes``."""
    rows = max(1, _AT_ONCE // max(1, x[:1].nbytes))
    for start in range(0, len(x), rows):
        part = group.broadcast(x[start : start + rows], group.lowest, label=label)
        if writes:
            x[start : start + rows] = part
    group.barrier(label)
