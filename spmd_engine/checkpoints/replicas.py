"""What ranks hold alike must be equal to the bit: a flipped one is found, and named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from zlib import crc32

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.errors import ReplicasDifferError
from spmd_engine.sharding.placement import Placement
from spmd_engine.sharding.rectangles import Rectangle


def compare_replicas(engine: ShardedEngine, optimizer: Optimizer | None = None) -> None:
    """Raise ReplicasDifferError, on every rank, unless all who hold a block of an array have the same bits of it.

    Of parameters, buffers and the optimizer's state. By the CRC-32 of each block, in one all_gather, so that any one
    flipped bit is found. Ranks whose processors or libraries round differently may differ in last bits. Collective.
    """
    kinds: list[tuple[str, Placement, Mapping[str, Array]]] = [
        ("", engine.placement(), {**engine.parameters, **engine.buffers})
    ]
    if optimizer is not None and optimizer.state:
        owned = engine.placement(owned=True)
        kinds += [(f"{kind} of ", owned, engine.named(state)) for kind, state in sorted(optimizer.state.items())]
    group = engine.group()
    mine = [
        _checksum(arrays[name])
        for _, placement, arrays in kinds
        for name, each in placement.items()
        if each.held[group.rank]
    ]
    told = iter(group.all_gather(np.array(mine, np.int64), label="replicas").tolist())
    by_rank = [list(_held(kinds, rank, told)) for rank in range(group.size)]
    found: dict[tuple[str, Rectangle], dict[int, int]] = {}
    for rank, held in enumerate(by_rank):
        for block, checksum in held:
            found.setdefault(block, {})[rank] = checksum
    differ = {block: sums for block, sums in found.items() if len(set(sums.values())) > 1}
    if differ:
        (name, rectangle), sums = next(iter(differ.items()))
        more = f" (and {len(differ) - 1} more blocks)" if len(differ) > 1 else ""
        raise ReplicasDifferError(
            f"{name}{rectangle} is not the same on the ranks that hold it{more}: {_told(sums)}. A bit was flipped, or "
            "something made it differ; continue from the last checkpoint (--resume). On processors of several kinds, "
            "which round differently, switch the comparison off: --check-replicas-every 0"
        )


def _held(kinds, rank: int, told: Iterator[int]) -> Iterator[tuple[tuple[str, Rectangle], int]]:
    """The blocks of a rank, and what it told of them, in the order in which it did."""
    for kind, placement, _ in kinds:
        for name, each in placement.items():
            if each.held[rank]:
                yield (f"{kind}{name}", each.held[rank][0]), next(told)


def _told(sums: Mapping[int, int]) -> str:
    """Who differs from the most of them, if there are most."""
    counts = Counter(sums.values()).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        groups = [[rank for rank in sums if sums[rank] == value] for value, _ in counts]
        return " against ".join(f"rank {', '.join(map(str, ranks))}" for ranks in groups)
    others = [str(rank) for rank in sums if sums[rank] != counts[0][0]]
    return f"rank {', '.join(others)} differs from {counts[0][1]} others that agree"


def _checksum(array: Array) -> int:
    host = np.asarray(backend_of(array).to_host(array), order="C")
    return crc32(host.reshape(-1).view(np.uint8).data)
