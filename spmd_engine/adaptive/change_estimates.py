"""What a change of shape would move, and how long it would take, by each protocol: see ``migrate --dry-run``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

from spmd_engine.adaptive.migration import (
    BYTES_PER_SECOND,
    LiveMigration,
    describe_change,
    exchange_change,
    moves_as_json,
    moves_of,
)
from spmd_engine.comm.agreement.rank_zero import on_all_ranks, text_from_rank_zero
from spmd_engine.engine.reshape import Reshaper, Shape
from spmd_engine.errors import UsageError
from spmd_engine.sharding.transfer import plan_transfer

FILE = 1 << 23  #: bytes of the file by which the disk is timed


def estimate_change(reshaper: Reshaper, shape: Shape, step_seconds: float, folder: Path) -> dict[str, dict[str, Any]]:
    """By protocol: the ``bytes`` that ranks send, their ``moves`` by sender and receiver, ``seconds`` until the job has
    the new shape, and those of them in which it ``stops``; or why it is ``refused``. Collective over the world.

    Times are measured: of a trial of the exchange, of all that is done beside it, which includes to make the new mesh
    and arrays, and of a small file in the ``folder``. No array of the job changes. Raises UsageError on all ranks if
    the model cannot be placed.
    """
    group, began = reshaper.all_ranks, perf_counter()
    described = on_all_ranks(group, lambda: describe_change(reshaper, shape))
    old, new = exchange_change(group, described)
    assert reshaper.optimizer is not None
    kinds, nodes = len(reshaper.optimizer.kinds), list(group.comm.hosts)
    plans = [(plan_transfer(old[owned], new[owned], nodes=nodes), kinds if owned else 1) for owned in (False, True)]
    reshaper.rehearse(shape)
    beside = perf_counter() - began  # rank 0 writes its own times
    try:
        live = LiveMigration(reshaper, shape, step_seconds)
    except UsageError as error:
        live, why = None, str(error)
    rate = live.rate if live else BYTES_PER_SECOND
    held = [sum(sets * plan.target.nbytes(rank) for plan, sets in plans) for rank in range(group.size)]
    sent = [sum(sets * plan.bytes_sent(rank) for plan, sets in plans) for rank in range(group.size)]
    filling = max(held) / rate  # each rank writes all of its new arrays
    moves = moves_of(plans)
    estimates = {"stop-and-copy": _estimate(moves, beside + max(filling, max(sent) / rate))}
    whole = [sum(prod(one.shape) * one.dtype.itemsize for one in plan.source.values()) for plan, _ in plans]
    saved = sum(sets * nbytes for (_, sets), nbytes in zip(plans, whole, strict=True))
    disk = text_from_rank_zero(group, lambda: str(_disk_speed(folder)))
    seconds = beside + (saved + max(held)) / float(disk)
    estimates["checkpoint-based"] = {**_estimate({}, seconds), "saved": saved, "loaded": sum(held)}
    if live is None:
        return {**estimates, "live": {"refused": why}}
    plan = live.plan
    return {**estimates, "live": _estimate(plan.moves, plan.seconds + beside + filling, beside + filling)}


def _estimate(moves: Mapping[tuple[int, int], int], seconds: float, stops: float | None = None) -> dict[str, Any]:
    times = {"seconds": round(seconds, 4), "stops": round(seconds if stops is None else stops, 4)}
    return {"bytes": sum(moves.values()), "moves": moves_as_json(moves), **times}


def _disk_speed(folder: Path) -> float:
    """Bytes a second that are hashed, written to the folder and synced."""
    content = os.urandom(FILE)
    began = perf_counter()
    sha256(content)
    with TemporaryFile(dir=folder) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FILE / (perf_counter() - began)
