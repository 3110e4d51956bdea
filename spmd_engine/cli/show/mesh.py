"""``show mesh``: the ranks of a mesh by their coordinates, and the groups of each axis."""

from __future__ import annotations

from math import prod
from pathlib import Path

import click
import numpy as np

from spmd_engine.axes import MeshPosition, all_positions, parse_axes
from spmd_engine.cli.show.picture import COLOURS, WIDEST, Cell, Picture, grid, listed, size, table, text
from spmd_engine.cli.show.render import output_option, present
from spmd_engine.errors import UsageError

MOST = 1024  # ranks


@click.command(short_help="The ranks of a mesh, and each axis' groups.")
@click.argument("axes", metavar="AXIS=SIZE,...")
@output_option
def mesh(axes: str, output: Path | None) -> None:
    """Draw the ranks of a mesh by their coordinates, and list the groups along each axis.

    The last axis varies fastest, so that its ranks, which talk most, are neighbours, on one node where they fit.
    A collective over an axis joins the ranks that differ along that axis alone. Ranks of one group of the last
    axis have one colour.

    \b
      python -m spmd_engine show mesh data=2,pipe=2,model=2
      python -m spmd_engine show mesh data=4,model=2 --output mesh.svg
    """
    present(draw_mesh(parse_axes(axes)), output)


def draw_mesh(axes: dict[str, int]) -> Picture:
    """The last two axes are a grid; each axis before them is a row, or a column, of boxes around it."""
    ranks = np.arange(len(all_positions(axes))).reshape(tuple(axes.values()))
    if ranks.size > MOST:
        raise UsageError(f"mesh {MeshPosition(axes, {})} has {ranks.size} ranks; at most {MOST} can be drawn")
    cells = _boxes(list(axes), ranks, ranks.shape[-1])
    rows = [("axis", "size", "groups: the ranks that a collective over this axis joins")]
    rows += [(axis, str(size), _groups(ranks, dim)) for dim, (axis, size) in enumerate(axes.items())]
    title = f"mesh {MeshPosition(axes, {})}: {prod(axes.values())} ranks"
    return Picture(title, cells, table(rows, "lrl"))


def _boxes(axes: list[str], ranks: np.ndarray, fastest: int) -> list[Cell]:
    """``ranks`` has a dimension an axis; ``fastest`` is the size of the mesh's last axis."""
    if len(axes) < 3:
        rows = ranks.reshape(-1, ranks.shape[-1])
        row_names = [f"{axes[0]} {row}" for row in range(len(rows))] if len(axes) == 2 else [""]
        column_names = [f"{axes[-1]} {column}" for column in range(fastest)]
        fills = [[COLOURS[rank // fastest % len(COLOURS)] for rank in row] for row in rows]
        return grid(row_names, column_names, [list(map(str, row)) for row in rows], fills)
    cells: list[Cell] = []
    x = y = 0
    for place, part in enumerate(ranks):
        inside = _boxes(axes[1:], part, fastest)
        width, height = (side + more for side, more in zip(size(inside), (3, 2), strict=True))
        if x and x + width > WIDEST:  # beside the others while there is room
            x, y = 0, y + height + 1
        cells.append(Cell(x, y, width, height))
        cells.append(text(x + 2, y + 1, f"{axes[0]} {place}"))
        cells += [cell.moved(x + 2, y + 2) for cell in inside]
        x += width + 2
    return cells


def _groups(ranks: np.ndarray, dim: int) -> str:
    """``{0,1} {2,3}``: as many as a line has room for."""
    groups = np.moveaxis(ranks, dim, -1).reshape(-1, ranks.shape[dim])
    shown = ""
    for count, group in enumerate(groups):
        one = "{" + listed(group.tolist()) + "} "
        if len(shown) + len(one) > WIDEST - 30:
            return f"{shown}... {len(groups) - count} more"
        shown += one
    return shown.rstrip()
