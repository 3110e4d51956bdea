"""A schedule as a picture: when each stage of a pipeline computes, and when it is idle."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_engine.engine.schedules import schedule as schedules
from spmd_engine.errors import UsageError
from spmd_engine.pictures import GREEN, ORANGE, PALE, SKY, YELLOW, Cell, Picture, table, text, tint

#: The letter, colour and name of each kind of work.
KINDS: dict[type[schedules.Compute], tuple[str, str, str]] = {
    schedules.Forward: ("F", SKY, "forward"),
    schedules.Backward: ("B", ORANGE, "backward"),
    schedules.BackwardInput: ("I", YELLOW, "backward of the input"),
    schedules.BackwardWeight: ("W", GREEN, "backward of the weights"),
}
MOST_SLOTS = 20_000  # slots, idle ones included


def draw_schedule(plan: schedules.Schedule, stages: int = 4, micro_batches: int = 8) -> Picture:
    """A row for each stage; one column of the grid is the time of the shortest slot, a forward of one chunk.

    Raises UsageError for more slots than can be drawn.
    """

    def check(length: int) -> None:
        if stages * length > MOST_SLOTS:
            raise UsageError(f"{plan.name} with {stages} stages and {micro_batches} micro-batches is too long to draw")

    check(3 * micro_batches * plan.chunks)  # a quick check, by the work without idle slots
    slots = schedules.timeline(plan, stages, micro_batches)
    length = round(schedules.makespan(slots) * plan.chunks)
    check(length)
    unit = max(len(_label(slot.instruction, plan.chunks, stages)) for slot in slots) + 1
    left = len(f"stage {stages - 1}") + 1
    cells = [text(0, 0, "time")]
    cells += [text(left + at * plan.chunks * unit, 0, str(at)) for at in range(0, length // plan.chunks + 1, 5)]
    for stage in range(stages):
        cells.append(text(0, 1 + stage, f"stage {stage}"))
        stage_slots = [slot for slot in slots if slot.stage == stage]
        cells += _slots_of_stage(left, 1 + stage, unit, stage_slots, plan.chunks, stages, length)
    title = f"{plan.name}: {stages} stages, {micro_batches} micro-batches"
    title += f", {plan.chunks} chunks a stage" if plan.chunks > 1 else ""
    notes = _notes(plan, slots, stages, micro_batches)
    return Picture(title, cells, table(_stages(slots), "lrrrr"), notes, fold=(left, unit))


def _label(work: schedules.Compute, chunks: int, stages: int) -> str:
    """``F3``; with several chunks a stage, ``F3b`` for its second chunk."""
    letter = chr(ord("a") + work.chunk // stages) if chunks > 1 else ""
    return f"{KINDS[type(work)][0]}{work.m}{letter}"


def _slots_of_stage(
    left: int, y: int, unit: int, slots: Sequence[schedules.Slot], chunks: int, stages: int, length: int
) -> list[Cell]:
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


def _stages(slots: Sequence[schedules.Slot]) -> list[tuple[str, ...]]:
    """A row for each stage, under headings."""
    rows: list[tuple[str, ...]] = [("", "busy", "idle", "idle inside", "activations held")]
    step_time = schedules.makespan(slots)
    for stage, (inside, peak) in enumerate(
        zip(schedules.idle_inside(slots), schedules.peak_activations(slots), strict=True)
    ):
        busy = sum(slot.end - slot.start for slot in slots if slot.stage == stage)
        rows.append((f"stage {stage}", *(f"{round(x, 2):g}" for x in (busy, step_time - busy, inside, peak))))
    return rows


def _notes(plan: schedules.Schedule, slots: Sequence[schedules.Slot], stages: int, micro_batches: int) -> list[str]:
    expected = plan.expected_bubble(stages, micro_batches)
    formula = "there is no formula for this case" if expected is None else f"by the formula {expected:.1%}"
    kinds = {type(slot.instruction) for slot in slots}
    legend = ", ".join(f"{letter} {name}" for kind, (letter, _, name) in KINDS.items() if kind in kinds)
    chunks = "; small letters are chunks of layers" if plan.chunks > 1 else ""
    return [
        f"bubble: {schedules.idle_fraction(slots):.1%} of all stages' time; {formula}",
        f"{legend}, . idle; numbers are micro-batches{chunks}.",
        "Idle inside: between a stage's first and last work. Activations held: at most, in micro-batches.",
    ]
