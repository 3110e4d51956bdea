"""Things only one rank can do or know, whose failure must be everyone's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError

T = TypeVar("T")


def on_rank_zero(group: Group, do: Callable[[], T]) -> T | None:
    """``do()`` on rank 0 alone; its result there, None elsewhere.

    A UsageError or OSError of rank 0 (a missing file, say) is raised on every rank as the same UsageError, so
    that the program ends in one way everywhere.
    """
    result, message = None, b""
    if group.rank == 0:
        try:
            result = do()
        except (UsageError, OSError) as error:
            message = str(error).encode() or repr(error).encode()
    said = group.broadcast(np.frombuffer(message, np.uint8), label="agreement")
    if said.size:
        raise UsageError(said.tobytes().decode())
    return result
