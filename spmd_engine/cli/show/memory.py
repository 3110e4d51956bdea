"""``show memory``: bytes on each rank, by what they are for, under the stages of ZeRO."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import click

from spmd_engine.axes import MeshPosition, parse_axes
from spmd_engine.cli.config_file import config_option
from spmd_engine.cli.options import image_shape, images_option, model_option
from spmd_engine.cli.show.bytes_per_rank import CLASSES, bytes_per_rank
from spmd_engine.cli.show.options import OPTIMIZERS, dtype_option, mesh_option, optimizer_option, output_option
from spmd_engine.cli.show.output import present
from spmd_engine.cli.show.picture import BLUE, GREEN, ORANGE, PURPLE, Cell, Picture, listed, table, text
from spmd_engine.engine.parallel_config import Composition
from spmd_engine.models.images import ImageShape
from spmd_engine.models.names import build_model
from spmd_engine.planning.dry_run.layer_cache import PassCache
from spmd_engine.units import readable_bytes

FILLS = {"parameters": BLUE, "gradients": ORANGE, "optimizer state": GREEN, "largest groups": PURPLE}
LONGEST_BAR = 72  # columns
MOST_BARS = 12

Held = tuple[tuple[str, int], ...]  # classes with their bytes


@click.command(short_help="Bytes per rank, by what they are for.")
@config_option
@model_option
@images_option
@mesh_option
@click.option("--zero", type=click.IntRange(0, 3), help="One ZeRO stage, rank by rank. [default: all, side by side]")
@dtype_option
@optimizer_option
@output_option
def memory(
    model: str, images: str | None, mesh: str, zero: int | None, dtype: str, optimizer: str, output: Path | None
) -> None:
    """Draw how many bytes of parameters, gradients and optimizer state a rank holds, under each ZeRO stage.

    Stage 1 stores the optimizer state in parts, stage 2 also the gradients, stage 3 also the parameters: over the axes
    that cut the batch or the sequence, 'replicate' excepted. What is in parts is whole for a while when it is used: the
    largest groups. Activations are not counted.

    \b
      python -m spmd_engine show memory --model gpt2 --mesh data=4
      python -m spmd_engine show memory --model gpt2 --mesh replicate=2,shard=4 --zero 3
      python -m spmd_engine show memory --model gpt2 --mesh pipe=2,data=2,model=2 --output memory.svg
    """
    shape = image_shape(model, images)
    present(draw_memory(model, parse_axes(mesh), zero, dtype, optimizer, shape), output)


def draw_memory(
    model: str,
    axes: dict[str, int],
    zero: int | None = None,
    dtype: str = "float32",
    optimizer: str = "adamw",
    images: ImageShape | None = None,
) -> Picture:
    """A bar for each ZeRO stage, of the rank that holds most; with ``zero``, one for all ranks that hold the same."""
    built = build_model(model, sample=images)
    stages = range(4) if zero is None else [zero]
    options = {"dtype": dtype, "optimizer": OPTIMIZERS[optimizer](), "cache": PassCache()}
    held = {stage: bytes_per_rank(built, axes, Composition(zero=stage), **options) for stage in stages}
    if zero is None:
        bars = [(f"zero {stage}", max(ranks, key=_together)) for stage, ranks in held.items()]
        what = "the rank that holds most"
    else:
        bars = _by_holding(held[zero])
        what = f"each rank, zero {zero}"
    notes = ["largest groups: whole for a while, at the worst moment of a step. Activations are not counted."]
    if len(bars) > MOST_BARS:
        notes.insert(0, f"Drawn are the ranks that hold most and least; {len(bars) - 2} others hold something between.")
        bars.sort(key=lambda bar: -_together(bar[1]))
        bars = [bars[0], bars[-1]]
    count, mesh = f"{built.parameter_count:,}", MeshPosition(axes, {})
    title = f"{model}, {count} parameters in {dtype}, {optimizer}, mesh {mesh}: bytes on {what}"
    return Picture(title, _bars(bars), _numbers(bars), notes)


def _together(held: Held) -> int:
    return sum(count for _, count in held)


def _by_holding(ranks: Sequence[Held]) -> list[tuple[str, Held]]:
    """Ranks that hold the same, together, in the order of the first of each."""
    alike: dict[Held, list[int]] = defaultdict(list)
    for rank, held in enumerate(ranks):
        alike[held].append(rank)
    return [(f"{'rank' if len(members) == 1 else 'ranks'} {listed(members)}", held) for held, members in alike.items()]


def _bars(bars: Sequence[tuple[str, Held]]) -> list[Cell]:
    """Bars to one scale."""
    left = max(len(name) for name, _ in bars) + 1
    scale = LONGEST_BAR / max(_together(held) for _, held in bars)
    cells: list[Cell] = []
    for row, (name, held) in enumerate(bars):
        x, y = left, 3 * row
        cells.append(text(0, y + 1, name))
        for kind, count in held:
            if count:
                width = max(2, round(count * scale))
                label = kind if len(kind) + 1 < width else kind[0]
                cells.append(Cell(x, y, width, 2, label, FILLS[kind]))
                x += width
        cells.append(text(x + 2, y + 1, readable_bytes(_together(held))))
    return cells


def _numbers(bars: Sequence[tuple[str, Held]]) -> list[Cell]:
    rows = [("", *(f"({kind[0]}) {kind}" for kind in CLASSES), "together")]
    rows += [(name, *(f"{count:,}" for _, count in held), f"{_together(held):,}") for name, held in bars]
    return table(rows, "lrrrrr")
