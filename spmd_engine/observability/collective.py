"""What ``show collective`` draws: what a collective does to a small vector of each rank, and the routes of its data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spmd_engine.axes import all_positions
from spmd_engine.comm import Mesh, run_threads
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.connections import Tuning, even_nodes
from spmd_engine.comm.dispatch import choose, inline_between_nodes, inline_limit
from spmd_engine.comm.shared_memory.slot_table import room_of
from spmd_engine.comm.transports.transport import Facts
from spmd_engine.pictures import COLOURS, PALE, Cell, Picture, text
from spmd_engine.units import readable_bytes

MOST = 12  # ranks that fit into a picture


@dataclass(frozen=True)
class Example:
    """A collective on small vectors, ``before(rank, ranks)`` on each rank."""

    before: Callable[[int, int], list]
    use: str
    cost: str
    adjoint: str
    moves: bool = True  #: whether values are moved unchanged, so that each value comes from one rank
    code: str = "y = mesh.{name}(x)"


def _letter(rank: int) -> str:
    return chr(ord("A") + rank)


EXAMPLES = {
    "all_reduce": Example(
        lambda rank, ranks: [rank + 1],
        "The sum over ranks, on every rank: gradients in data parallel, partial products in tensor parallel.",
        "The same as reduce_scatter, then all_gather. Each of n ranks sends 2 S (n-1)/n for S bytes of x.",
        "all_reduce",
        moves=False,
    ),
    "all_gather": Example(
        lambda rank, ranks: [_letter(rank)],
        "The shards of all ranks, joined in rank order, on every rank: parameters that are stored in shards.",
        "Each of n ranks sends S (n-1)/n for S bytes of y.",
        "reduce_scatter",
    ),
    "reduce_scatter": Example(
        lambda rank, ranks: list(range(1, ranks + 1)),
        "The sum over ranks, sharded: gradients that are stored in shards.",
        "Each of n ranks sends S (n-1)/n for S bytes of x.",
        "all_gather",
        moves=False,
    ),
    "all_to_all": Example(
        lambda rank, ranks: [f"{_letter(rank)}{part}" for part in range(ranks)],
        "Part r of each rank's x goes to rank r: tokens to their experts, a shard of another dim.",
        "Each of n ranks sends S (n-1)/n for S bytes of x.",
        "all_to_all",
    ),
    "broadcast": Example(
        lambda rank, ranks: ["A" if rank == 0 else ""],
        "The root's x on every rank; the others' x is ignored: tokens that rank 0 has read.",
        "The root scatters parts, then all gather them: it sends 2 S (n-1)/n, others S (n-2)/n.",
        "the sum over ranks, on the root",
        code="y = mesh.broadcast(x, root=0)",
    ),
    "send_receive": Example(
        lambda rank, ranks: [_letter(rank)],
        "Each rank sends to the next, the last to the first: keys in ring attention; stages of a pipeline.",
        "Each rank sends S bytes, all of x.",
        "the shift in the other direction",
        code="mesh.send(next, x); y = mesh.receive(previous)",
    ),
}


def run_example(name: str, ranks: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Each rank's vector before a collective, and after it."""
    before = [np.array(EXAMPLES[name].before(rank, ranks)) for rank in range(ranks)]
    return before, _run(name, before)


def _run(name: str, before: list[np.ndarray]) -> list[np.ndarray]:
    def program() -> np.ndarray:
        with Mesh() as mesh:
            x = before[mesh.rank]
            if name != "send_receive":
                return getattr(mesh, name)(x)
            mesh.send((mesh.rank + 1) % mesh.size, x)
            return mesh.receive((mesh.rank - 1) % mesh.size)

    return run_threads(program, len(before))


def draw_collective(name: str, ranks: int) -> Picture:
    """A column for each rank: its vector before, the call, and its vector after."""
    example = EXAMPLES[name]
    before, after = run_example(name, ranks)
    owners = [np.full(len(x), rank) for rank, x in enumerate(before)]
    came_from = _run(name, owners) if example.moves else [np.full(len(y), -1) for y in after]
    width = max(len(str(value)) for vector in (*before, *after) for value in vector) + 3
    longest = max(len(vector) for vector in (*before, *after))
    column = max(longest * width, len(f"rank {ranks}")) + 3
    left = len("before") + 2
    cells = []
    for rank in range(ranks):
        x = left + rank * column
        cells.append(text(x + 1, 0, f"rank {rank}"))
        cells += _vector(x, 1, width, before[rank], owners[rank])
        cells += _vector(x, 7, width, after[rank], came_from[rank])
    cells += [text(0, 2, "before"), text(left + 1, 5, example.code.format(name=name)), text(0, 8, "after")]
    notes = [example.use, example.cost, f"Adjoint, for gradients: {example.adjoint}."]
    return Picture(f"{name} on {ranks} ranks", cells, notes=notes, fold=(left, column))


def _vector(x: int, y: int, width: int, values: np.ndarray, owners: np.ndarray) -> list[Cell]:
    """A row of cells, each in the colour of its owner; -1: no owner."""
    cells = []
    for place, (value, owner) in enumerate(zip(values, owners, strict=True)):
        fill = COLOURS[owner % len(COLOURS)] if owner >= 0 else PALE
        cells.append(Cell(x + place * width, y, width, 2, str(value), fill if value != "" else None))
    return cells


# --- the transports of a collective on a mesh, by size: ``comm.dispatch.choose`` as a table


INLINE = "inline with the agreement"
LARGEST = 34  # largest size, as a power of two of bytes; sizes are powers of two and 1.5 times each


def transports_on_mesh(operation: str, axes: Mapping[str, int], nodes: int) -> list[str]:
    """Transports by size of an array, for each mesh axis and for all axes together, in rank 0's groups.

    Ranks fill ``nodes`` one after the other; arrays are equally long on all ranks, and in ordinary memory but for the
    last line.
    """
    places = all_positions(axes)
    hosts = [rank * nodes // len(places) for rank in range(len(places))]
    lines = []
    for names in [*([(name,) for name, size in axes.items() if size > 1]), *([tuple(axes)] if len(axes) > 1 else [])]:
        group = [hosts[place.index(None)] for place in places[0].peers(names)]
        count = len(set(group))
        lines.append(f"over {','.join(names)} ({len(group)} ranks on {count} node{'s' if count > 1 else ''}):")
        lines.append(f"  {'; '.join(transports_by_size(operation, group, Tuning()))}")
    on_devices = _name(operation, Facts(1, len(places), host=False, nccl=True))
    return [*lines, f"on GPUs: {on_devices}, if each rank has its own; else see --transport of train"]


def transports_by_size(operation: str, hosts: Sequence[int], tuning: Tuning) -> list[str]:
    """The bytes of a rank's array up to which each transport moves the data, for ranks on these ``hosts``, as text."""
    ranks, one_node, even = len(hosts), len(set(hosts)) == 1, even_nodes(hosts) is not None
    if one_node:
        limit = inline_limit(operation, ranks, room_of(ranks), tuning)
    else:
        local = max(Counter(hosts).values())
        senders = ranks // local if even else ranks
        limit = min(room_of(local), inline_between_nodes(operation, ranks, senders, False, tuning))

    def name_of(size: int) -> str:
        inline = size <= limit
        payload = size * ranks if operation == "all_gather" and not one_node else size
        facts = Facts(payload, ranks, one_node, even, inline=inline, readable=True, tuning=tuning)
        return _name(operation, facts)

    parts, powers = [], [1 << power for power in range(3, LARGEST)]
    for size in sorted({limit, *powers, *(power * 3 // 2 for power in powers)}):
        for most, word in (size - 1, "below"), (size, "up to"):
            if name_of(most) != name_of(most + 1):
                parts.append(f"{word} {readable_bytes(size)} {name_of(most)}")
    return [*parts, ("else " if parts else "") + name_of(1 << LARGEST)]


def _name(operation: str, facts: Facts) -> str:
    transport = choose(Signature(operation), facts)
    return INLINE if transport is None else transport.name
