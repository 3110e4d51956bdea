"""A read-only array, such as training data, stored once for each node instead of once for each rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from math import prod
from typing import Any

import numpy as np

from spmd_engine.comm.agreement.rank_zero import gather_json, text_from_rank_zero
from spmd_engine.comm.group import Group
from spmd_engine.comm.shared_memory.arena import ALIGNMENT
from spmd_engine.comm.shared_memory.node import OwnMemory, mapped

_AT_ONCE = 1 << 20  # bytes of a message between nodes


def share_array(group: Group, parts: Sequence[np.ndarray] | None, *, dtype: Any = None, label: str = "") -> np.ndarray:
    """Rank 0's ``parts``, joined along their first axis, as a read-only array on every rank. Collective.

    They are converted to ``dtype``; None: that of the first part. The other ranks' ``parts`` are ignored and may be
    None. Ranks of a node map the same memory, like each other's arenas (see ``node``); where the system refuses, each
    has its own array.
    """
    mine = parts if group.rank == 0 and parts is not None else ()
    shape, name = json.loads(text_from_rank_zero(group, lambda: json.dumps(_joined(mine, dtype))))
    dtype, size = np.dtype(name), ALIGNMENT + prod(shape) * np.dtype(name).itemsize
    hosts, host = group.comm.hosts, group.comm.node
    first, alone = hosts.index(host), hosts.count(host) == 1
    makes = first == group.rank and not alone and group.comm.neighbours is not None
    with closing(OwnMemory(size if makes else 0)) as own:
        memories = mapped([gather_json(group, own.handle, label)[first]])
        x = np.ndarray(shape, dtype, memories[0], ALIGNMENT) if memories else np.empty(shape, dtype)
        if group.rank == 0 and memories:
            own.write((np.ascontiguousarray(part, dtype) for part in mine), ALIGNMENT)
        elif group.rank == 0:
            np.concatenate(mine, out=x)
        # All ranks have tried to map the memory, and rank 0 has written:
        everywhere = bool(group.all_reduce(np.array(alone or bool(memories)), "min", label=label))
    if not everywhere:
        x = group.broadcast(x, label=label)
    elif len(set(hosts)) > 1:
        _pass_to_nodes(group, x, writes=0 < first == group.rank, label=label)
    x.flags.writeable = False
    return x


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the joined ``parts``."""
    return (sum(map(len, parts)), *parts[0].shape[1:]), np.dtype(dtype or parts[0].dtype).str


def _pass_to_nodes(group: Group, x: np.ndarray, writes: bool, label: str) -> None:
    """Copy rank 0's ``x`` into the memory of the other nodes, where one rank of each ``writes``."""
    rows = max(1, _AT_ONCE // max(1, x[:1].nbytes))
    for start in range(0, len(x), rows):
        part = group.broadcast(x[start : start + rows], label=label)
        if writes:
            x[start : start + rows] = part
    group.barrier(label)
