"""Which way the data of a collective go on a mesh, by size: what ``comm.ways`` says, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmd_engine.axes import all_positions
from spmd_engine.comm.slot_table import room_of
from spmd_engine.comm.transports.hierarchical import even_nodes
from spmd_engine.comm.tuning import Tuning
from spmd_engine.comm.ways import Facts, Way, inline_at_most, way
from spmd_engine.units import readable_bytes

LARGEST = 34  # a power of two, of bytes: sizes to look at, and half as much again as each


def ways_on_mesh(operation: str, axes: Mapping[str, int], nodes: int) -> list[str]:
    """A line for each mesh axis, and for all of them together: the ways of an array by its size, of rank 0's group.

    Its ranks are on so many ``nodes``, one after the other; each sends ordinary arrays, all as long.
    """
    places = all_positions(axes)
    hosts = [rank * nodes // len(places) for rank in range(len(places))]
    lines = []
    for names in [*([(name,) for name, size in axes.items() if size > 1]), *([tuple(axes)] if len(axes) > 1 else [])]:
        group = [hosts[place.index(None)] for place in places[0].peers(names)]
        count = len(set(group))
        lines.append(f"over {','.join(names)} ({len(group)} ranks on {count} node{'s' if count > 1 else ''}):")
        lines.append(f"  {'; '.join(ways_by_size(operation, group, Tuning()))}")
    return lines


def ways_by_size(operation: str, hosts: Sequence[int], tuning: Tuning) -> list[str]:
    """The bytes of a rank's array up to which each way is taken, of ranks on these ``hosts``; in words."""
    ranks, one_node, by_nodes = len(hosts), len(set(hosts)) == 1, even_nodes(hosts) is not None
    room = room_of(ranks) if one_node else tuning.with_agreement // ranks

    def way_of(size: int) -> Way:
        inline = size <= inline_at_most(operation, ranks, room, one_node, tuning)
        whole = size * ranks if operation == "all_gather" and not one_node else size
        facts = Facts(operation, whole, ranks, 0, one_node, by_nodes, True, inline=inline, shown=True)
        return way(facts, tuning)

    parts = []
    for size in [size for power in range(3, LARGEST) for size in (1 << power, 3 << power - 1)]:
        for most, word in (size - 1, "below"), (size, "up to"):
            if way_of(most) is not way_of(most + 1):
                parts.append(f"{word} {readable_bytes(size)} {way_of(most).value}")
    return [*parts, ("else " if parts else "") + way_of(1 << LARGEST).value]
