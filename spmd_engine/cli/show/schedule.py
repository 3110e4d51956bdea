"""``show schedule``: when each stage of a pipeline computes what, and when it is idle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from spmd_engine.cli.show.picture import GREEN, ORANGE, PALE, SKY, YELLOW, Cell, Picture, table, text, tint
from spmd_engine.cli.show.render import output_option, present
from spmd_engine.engine.schedules.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from spmd_engine.engine.schedules.names import named
from spmd_engine.engine.schedules.schedule import Schedule
from spmd_engine.engine.schedules.timeline import (
    Slot,
    idle_fraction,
    idle_inside,
    makespan,
    peak_activations,
    timeline,
)
from spmd_engine.errors import UsageError

#: The letter, colour and name of each kind of work.
KINDS: dict[type[Compute], tuple[str, str, str]] = {
    Forward: ("F", SKY, "forward"),
    Backward: ("B", ORANGE, "backward"),
    BackwardInput: ("I", YELLOW, "backward of the input"),
    BackwardWeight: ("W", GREEN, "backward of the weights"),
}
MOST = 20_000  # slots, idle ones included


@click.command(short_help="The timeline of a pipeline's schedule.")
@click.argument("name", metavar="SCHEDULE")
@click.option("--stages", type=click.IntRange(1, 64), default=4, show_default=True, help="Of the pipeline.")
@click.option("--micro-batches", type=click.IntRange(1, 512), default=8, show_default=True, help="Of a step.")
@click.option("--chunks", type=click.IntRange(1, 16), help="Chunks of layers a stage. [default: 2 if interleaved]")
@output_option
def schedule(name: str, stages: int, micro_batches: int, chunks: int | None, output: Path | None) -> None:
    """Draw stage by time what a schedule computes: F forward, B backward, or its parts, I for the input and W for the
    weights, each with the number of the micro-batch; chunks of layers have small letters.

    A forward, an input part and a weight part each take one unit of time a stage, and transfers none. Below are the
    bubble, which is the idle part of all stages' time, and how many micro-batches' activations a stage holds at most.

    \b
      python -m spmd_engine show schedule 1f1b --stages 4 --micro-batches 8
      python -m spmd_engine show schedule interleaved --stages 4 --micro-batches 8 --chunks 2
      python -m spmd_engine show schedule zero-bubble --stages 4 --micro-batches 8 --output zero-bubble.svg

    SCHEDULE is naive, gpipe, 1f1b, interleaved, zero-bubble or zero-bubble-h2.
    """
    present(draw_schedule(named(name, chunks), stages, micro_batches), output)


def draw_schedule(plan: Schedule, stages: int, micro_batches: int) -> Picture:
    """A row a stage; one column of the grid is the time of the shortest slot, a forward of one chunk."""

    def check(length: int) -> None:
        if stages * length > MOST:
            raise UsageError(f"{plan.name} with {stages} stages and {micro_batches} micro-batches is too long to draw")

    check(3 * micro_batches * plan.chunks)  # the work alone, before it takes long to find out
    slots = timeline(plan, stages, micro_batches)
    length = round(makespan(slots) * plan.chunks)
    check(length)
    unit = max(len(_label(slot.instruction, plan.chunks, stages)) for slot in slots) + 1
    left = len(f"stage {stages - 1}") + 1
    cells = [text(0, 0, "time")]
    cells += [text(left + at * plan.chunks * unit, 0, str(at)) for at in range(0, length // plan.chunks + 1, 5)]
    for stage in range(stages):
        cells.append(text(0, 1 + stage, f"stage {stage}"))
        own = [slot for slot in slots if slot.stage == stage]
        cells += _row(left, 1 + stage, unit, own, plan.chunks, stages, length)
    title = f"{plan.name}: {stages} stages, {micro_batches} micro-batches"
    title += f", {plan.chunks} chunks a stage" if plan.chunks > 1 else ""
    notes = _notes(plan, slots, stages, micro_batches)
    return Picture(title, cells, table(_stages(slots), "lrrrr"), notes, fold=(left, unit))


def _label(work: Compute, chunks: int, stages: int) -> str:
    """``F3``; with several chunks a stage, ``F3b``: its second one."""
    letter = chr(ord("a") + work.chunk // stages) if chunks > 1 else ""
    return f"{KINDS[type(work)][0]}{work.m}{letter}"


def _row(left: int, y: int, unit: int, slots: Sequence[Slot], chunks: int, stages: int, length: int) -> list[Cell]:
    cells = []
    free = set(range(length))
    for slot in slots:
        start, stop = round(slot.start * chunks), round(slot.end * chunks)
        fill = tint(KINDS[type(slot.instruction)][1], 0.7 * (slot.instruction.chunk // stages) / chunks)
        label = _label(slot.instruction, chunks, stages)
        cells.append(_slot(left + start * unit, y, (stop - start) * unit, label, fill))
        free -= set(range(start, stop))
    return cells + [_slot(left + at * unit, y, unit, ".", PALE) for at in sorted(free)]


def _slot(x: int, y: int, width: int, label: str, fill: str) -> Cell:
    return Cell(x, y, width, 1, label, fill, outline=False, align="left")


def _stages(slots: Sequence[Slot]) -> list[tuple[str, ...]]:
    """A line a stage, under headings."""
    rows = [("", "busy", "idle", "idle inside", "activations held")]
    whole = makespan(slots)
    for stage, (inside, peak) in enumerate(zip(idle_inside(slots), peak_activations(slots), strict=True)):
        busy = sum(slot.end - slot.start for slot in slots if slot.stage == stage)
        rows.append((f"stage {stage}", *(f"{round(x, 2):g}" for x in (busy, whole - busy, inside, peak))))
    return rows


def _notes(plan: Schedule, slots: Sequence[Slot], stages: int, micro_batches: int) -> list[str]:
    expected = plan.expected_bubble(stages, micro_batches)
    formula = "there is no formula for this case" if expected is None else f"by the formula {expected:.1%}"
    kinds = {type(slot.instruction) for slot in slots}
    legend = ", ".join(f"{letter} {name}" for kind, (letter, _, name) in KINDS.items() if kind in kinds)
    chunks = "; small letters are chunks of layers" if plan.chunks > 1 else ""
    return [
        f"bubble: {idle_fraction(slots):.1%} of all stages' time; {formula}",
        f"{legend}, . idle; numbers are micro-batches{chunks}.",
        "Idle inside: between a stage's first and last work. Activations held: at most, in micro-batches.",
    ]
