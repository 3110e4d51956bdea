"""``show collective``: what a collective does to a small vector of each rank, before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from spmd_engine.axes import all_positions, parse_axes
from spmd_engine.cli.show.picture import COLOURS, PALE, Cell, Picture, output_option, present, text
from spmd_engine.comm.communicators.threads import run_threads
from spmd_engine.comm.dispatch import Facts, Tuning, Way, inline_at_most, way
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.shared_memory.slot_table import room_of
from spmd_engine.comm.transports.hierarchical import even_nodes
from spmd_engine.errors import UsageError
from spmd_engine.units import readable_bytes

MOST = 12  # ranks


@dataclass(frozen=True)
class Example:
    """A collective, run on small vectors: ``before(rank, ranks)`` gives a rank's, ``program(mesh, x)`` is run."""

    code: str
    program: Callable[[Mesh, np.ndarray], np.ndarray]
    before: Callable[[int, int], list]
    moves: bool  #: whether the values themselves come out, and so each has one rank that it comes from
    notes: tuple[str, ...]


def _ring_shift(mesh: Mesh, x: np.ndarray) -> np.ndarray:
    mesh.send((mesh.rank + 1) % mesh.size, x)
    return mesh.receive((mesh.rank - 1) % mesh.size)


def _letter(rank: int) -> str:
    return chr(ord("A") + rank)


EXAMPLES = {
    "all_reduce": Example(
        "y = mesh.all_reduce(x)",
        lambda mesh, x: mesh.all_reduce(x),
        lambda rank, ranks: [rank + 1],
        False,
        (
            "The sum over ranks, on every rank: gradients in data parallel, partial products in tensor parallel.",
            "The same as reduce_scatter, then all_gather. Each of n ranks sends 2 S (n-1)/n, S the bytes of x.",
            "Transposed, as gradients go back: all_reduce.",
        ),
    ),
    "all_gather": Example(
        "y = mesh.all_gather(x)",
        lambda mesh, x: mesh.all_gather(x),
        lambda rank, ranks: [_letter(rank)],
        True,
        (
            "Everyone's part, joined in rank order, on every rank: parameters that are stored in parts.",
            "Each of n ranks sends S (n-1)/n, S the bytes of y.",
            "Transposed, as gradients go back: reduce_scatter.",
        ),
    ),
    "reduce_scatter": Example(
        "y = mesh.reduce_scatter(x)",
        lambda mesh, x: mesh.reduce_scatter(x),
        lambda rank, ranks: list(range(1, ranks + 1)),
        False,
        (
            "The sum over ranks, of which each rank gets its part: gradients that are stored in parts.",
            "Each of n ranks sends S (n-1)/n, S the bytes of x.",
            "Transposed, as gradients go back: all_gather.",
        ),
    ),
    "all_to_all": Example(
        "y = mesh.all_to_all(x)",
        lambda mesh, x: mesh.all_to_all(x),
        lambda rank, ranks: [f"{_letter(rank)}{part}" for part in range(ranks)],
        True,
        (
            "Part r of everyone's x goes to rank r: tokens to their experts, a cut that moves to another dim.",
            "Each of n ranks sends S (n-1)/n, S the bytes of x.",
            "Transposed, as gradients go back: all_to_all.",
        ),
    ),
    "broadcast": Example(
        "y = mesh.broadcast(x, root=0)",
        lambda mesh, x: mesh.broadcast(x, root=0),
        lambda rank, ranks: ["A" if rank == 0 else ""],
        True,
        (
            "The root's x on every rank; what the others give is not looked at: tokens that rank 0 has read.",
            "The root hands out parts, then all pass theirs on: it sends 2 S (n-1)/n, others S (n-2)/n.",
            "Transposed, as gradients go back: the sum over ranks, onto the root.",
        ),
    ),
    "send_receive": Example(
        "mesh.send(next, x); y = mesh.receive(previous)",
        _ring_shift,
        lambda rank, ranks: [_letter(rank)],
        True,
        (
            "Each rank sends to the next, the last to the first: keys in ring attention; stages of a pipeline.",
            "Each rank sends S, the bytes of x.",
            "Transposed, as gradients go back: the shift the other way.",
        ),
    ),
}


@click.command(short_help="What a collective does to small vectors.")
@click.argument("name", metavar="COLLECTIVE", type=click.Choice(list(EXAMPLES)))
@click.option("--ranks", type=click.IntRange(2, MOST), default=4, show_default=True, help="Virtual ranks to run it on.")
@click.option("--mesh", metavar="AXIS=SIZE,...", help="Say instead which way its data go on such a mesh, by size.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes of that mesh.")
@output_option
def collective(name: str, ranks: int, mesh: str | None, nodes: int, output: Path | None) -> None:
    """Draw what a collective does to a small vector of each rank, before and after.

    COLLECTIVE is all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send_receive (a shift along a
    ring). It is really run, on virtual ranks. Values keep the colour of the rank they come from; sums have none.

    \b
      python -m spmd_engine show collective all_reduce
      python -m spmd_engine show collective all_to_all --ranks 3 --output all_to_all.svg
      python -m spmd_engine show collective all_reduce --mesh data=4,model=2 --nodes 2
    """
    if mesh is None:
        present(draw_collective(name, ranks), output)
    elif name == "send_receive":
        raise UsageError("send and receive go by messages, on every mesh")
    else:
        click.echo("\n".join(ways_on_mesh(name, parse_axes(mesh), nodes)))


def run_example(name: str, ranks: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Each rank's vector before a collective, and after it."""
    example = EXAMPLES[name]
    before = [np.array(example.before(rank, ranks)) for rank in range(ranks)]
    return before, _run(example, before)


def _run(example: Example, before: list[np.ndarray]) -> list[np.ndarray]:
    def program() -> np.ndarray:
        with Mesh() as mesh:
            return example.program(mesh, before[mesh.rank])

    return run_threads(program, len(before))


def draw_collective(name: str, ranks: int) -> Picture:
    """A column a rank: its vector before, the call, and its vector after."""
    example = EXAMPLES[name]
    before, after = run_example(name, ranks)
    owners = [np.full(len(x), rank) for rank, x in enumerate(before)]
    came_from = _run(example, owners) if example.moves else [np.full(len(y), -1) for y in after]
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
    cells += [text(0, 2, "before"), text(left + 1, 5, example.code), text(0, 8, "after")]
    return Picture(f"{name} on {ranks} ranks", cells, notes=example.notes, fold=(left, column))


def _vector(x: int, y: int, width: int, values: np.ndarray, owners: np.ndarray) -> list[Cell]:
    """A row of cells, each in the colour of its owner; -1: it has none."""
    cells = []
    for place, (value, owner) in enumerate(zip(values, owners, strict=True)):
        fill = COLOURS[owner % len(COLOURS)] if owner >= 0 else PALE
        cells.append(Cell(x + place * width, y, width, 2, str(value), fill if value != "" else None))
    return cells


# --- Which way the data of a collective go on a mesh, by size: what ``comm.ways`` says, as a table


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
