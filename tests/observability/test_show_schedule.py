"""Pictures of schedules: the slots, the bubble and the activations held."""

import pytest

from spmd_engine.cli import main
from spmd_engine.engine.schedules.orders import SCHEDULES, named
from spmd_engine.engine.schedules.schedule import makespan, timeline
from spmd_engine.pictures import PALE

ONE_FORWARD_ONE_BACKWARD = """
1f1b: 2 stages, 3 micro-batches

time    0              5              10
stage 0 F0 F1 .  .  B0    F2 B1    .  B2
stage 1 .  F0 B0    F1 B1    F2 B2    .  .

         busy  idle  idle inside  activations held
stage 0     9     3            3                 2
stage 1     9     3            0                 1

bubble: 25.0% of all stages' time; by the formula 25.0%
F forward, B backward, . idle; numbers are micro-batches.
Idle inside: between a stage's first and last work. Activations held: at most, in micro-batches.
"""


def shown(capsys, *args):
    main(["show", "schedule", *args])
    return capsys.readouterr().out.splitlines()


def test_one_forward_one_backward(capsys):
    lines = shown(capsys, "1f1b", "--stages", "2", "--micro-batches", "3")
    assert lines == ONE_FORWARD_ONE_BACKWARD.strip("\n").splitlines()


def test_weight_parts_fill_the_bubbles(capsys):
    lines = shown(capsys, "zero-bubble", "--stages", "2", "--micro-batches", "3")
    assert lines[3:5] == [
        "stage 0 F0 F1 .  I0 W0 F2 I1 W1 I2 W2",
        "stage 1 .  F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]
    assert lines[-3] == "bubble: 10.0% of all stages' time; by the formula 10.0%"
    assert "I backward of the input, W backward of the weights" in lines[-2]


def test_chunks_have_letters(capsys):
    lines = shown(capsys, "interleaved", "--stages", "2", "--micro-batches", "2", "--chunks", "2")
    assert lines[0] == "interleaved: 2 stages, 2 micro-batches, 2 chunks a stage"
    assert lines[2] == "time    0                                       5"
    assert lines[3] == "stage 0 F0a F1a F0b F1b .   .   B0b     .   B1b     B0a     B1a"
    assert lines[4] == "stage 1 .   F0a F1a F0b B0b     F1b B1b     B0a     B1a     .   ."


def test_where_no_formula_holds(capsys):
    lines = shown(capsys, "zero-bubble", "--stages", "4", "--micro-batches", "2")
    assert lines[-3].endswith("of all stages' time; there is no formula for this case")


def test_a_long_timeline_goes_on_below(capsys):
    lines = shown(capsys, "gpipe", "--stages", "2", "--micro-batches", "30")
    assert max(map(len, lines)) <= 110
    assert sum(line.startswith("stage 0 ") for line in lines) == 5  # the timeline in four parts, and the table
    assert sum(line.startswith("time ") for line in lines) == 4


SIZES = [(1, 3), (3, 1), (2, 4), (4, 6)]  # stages, micro-batches
DRAWN = [(name, *size) for name in SCHEDULES for size in SIZES if name != "sequential" or size[0] == 1]


@pytest.mark.parametrize("name, stages, micro_batches", DRAWN)
def test_every_moment_of_every_stage_is_drawn_once(name, stages, micro_batches):
    schedule = named(name)
    picture = schedule.picture(stages, micro_batches)
    slots = timeline(schedule, stages, micro_batches)
    columns = round(makespan(slots) * schedule.chunks) * picture.fold[1]
    filled = [cell for cell in picture.drawing if cell.fill]
    assert sum(cell.fill != PALE for cell in filled) == len(slots)
    for stage in range(stages):
        row = sorted((cell for cell in filled if cell.y == 1 + stage), key=lambda cell: cell.x)
        assert row[0].x == picture.fold[0] and sum(cell.width for cell in row) == columns
        assert all(one.x + one.width == other.x for one, other in zip(row, row[1:]))
        assert all((cell.label == ".") == (cell.fill == PALE) for cell in row)
        assert all(len(cell.label) < cell.width for cell in row)


def test_chunks_have_shades():
    forwards = [c for c in named("interleaved", 3).picture(2, 2).drawing if c.label.startswith("F")]
    fills = {cell.label[-1]: cell.fill for cell in forwards}
    assert set(fills) == set("abc") and len(set(fills.values())) == 3
