"""Schedules are data: what each stage does, in order, is checked for all small pipelines, without executing it."""

from collections import Counter
from functools import cache
from itertools import product

import pytest

from spmd_engine.engine.schedules import SCHEDULES, named
from spmd_engine.engine.schedules.orders import Interleaved, Sequential
from spmd_engine.engine.schedules.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    StartReceiveGradient,
    StartReceiveInput,
    StartSendGradient,
    StartSendOutput,
    Transfer,
    Wait,
    other_end,
    with_transfers,
)
from spmd_engine.errors import UsageError

PIPELINES = [SCHEDULES[name]() for name in SCHEDULES if name != "sequential"] + [Interleaved(3)]
STAGES, MICRO_BATCHES = (1, 2, 3, 4, 5, 8), (*range(1, 9), 11, 16)
CASES = list(product(STAGES, MICRO_BATCHES))
SENDS, RECEIVES = (StartSendOutput, StartSendGradient), (StartReceiveInput, StartReceiveGradient)

every_pipeline = pytest.mark.parametrize("schedule", PIPELINES, ids=str)
every_schedule = pytest.mark.parametrize("schedule", [Sequential(), *PIPELINES], ids=str)


def cases(schedule):
    return [(1, m) for m in MICRO_BATCHES] if schedule.name == "sequential" else CASES


@cache
def program(schedule, stages, micro_batches, stage):
    return schedule.program(stages, micro_batches, stage)


def programs(schedule):
    """(stages, micro-batches, stage, program) of all cases."""
    for stages, micro_batches in cases(schedule):
        for stage in range(stages):
            yield stages, micro_batches, stage, program(schedule, stages, micro_batches, stage)


# --- what is computed


@every_schedule
def test_everything_is_computed_once(schedule):
    split = schedule.name.startswith("zero-bubble")
    kinds = (Forward, BackwardInput, BackwardWeight) if split else (Forward, Backward)
    for stages, micro_batches, stage, instructions in programs(schedule):
        chunks = range(stage, stages * schedule.chunks, stages)
        expected = {kind(m, chunk) for kind, m, chunk in product(kinds, range(micro_batches), chunks)}
        computed = Counter(i for i in instructions if isinstance(i, Compute))
        assert computed == Counter(expected), (stages, micro_batches, stage)


@every_schedule
def test_a_program_computes_in_the_order_of_its_schedule(schedule):
    for stages, micro_batches, stage, instructions in programs(schedule):
        computed = [i for i in instructions if isinstance(i, Compute)]
        assert computed == schedule.order(stages, micro_batches, stage)


@every_schedule
def test_gradients_are_summed_in_the_same_order(schedule):
    """The bits of a sum depend on its order: first micro-batch first, for each chunk."""
    for stages, micro_batches, stage, instructions in programs(schedule):
        for chunk in range(stage, stages * schedule.chunks, stages):
            adds = [i.m for i in instructions if isinstance(i, (Backward, BackwardWeight)) and i.chunk == chunk]
            assert adds == list(range(micro_batches))


def test_orders_as_drawn_in_the_papers():
    def letters(schedule, stages, micro_batches, stage):
        names = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}
        return " ".join(f"{names[type(i)]}{i.m}" for i in schedule.order(stages, micro_batches, stage))

    assert letters(named("naive"), 4, 2, 1) == "F0 B0 F1 B1"
    assert letters(named("gpipe"), 4, 3, 1) == "F0 F1 F2 B0 B1 B2"
    assert letters(named("1f1b"), 4, 5, 1) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert letters(named("1f1b"), 4, 2, 0) == "F0 F1 B0 B1"
    assert letters(named("zero-bubble"), 3, 4, 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"
    assert letters(named("zero-bubble"), 3, 4, 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert letters(named("zero-bubble-h2"), 2, 4, 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3"
    assert letters(named("zero-bubble-h2"), 2, 4, 1) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


def test_interleaved_goes_through_its_chunks_by_groups():
    def order(stage):
        return [(type(i).__name__[0], i.m, i.chunk) for i in Interleaved().order(2, 2, stage)]

    forwards, backwards = [("F", 0, 0), ("F", 1, 0), ("F", 0, 2), ("F", 1, 2)], [("B", 0, 2), ("B", 1, 2)]
    assert order(0) == [*forwards, *backwards, ("B", 0, 0), ("B", 1, 0)]
    alternating = [("F", 0, 3), ("B", 0, 3), ("F", 1, 3), ("B", 1, 3)]
    assert order(1) == [("F", 0, 1), ("F", 1, 1), *alternating, ("B", 0, 1), ("B", 1, 1)]


@pytest.mark.parametrize("micro_batches, sizes", [(3, [3]), (8, [4, 4]), (7, [7]), (11, [5, 6])])
def test_interleaved_groups_have_at_least_as_many_micro_batches_as_there_are_stages(micro_batches, sizes):
    order = [i for i in Interleaved().order(4, micro_batches, 0) if isinstance(i, Forward)]
    first = [i.m for i in order if i.chunk == 0]
    assert first == list(range(micro_batches))
    ends = [n for n in range(1, len(order)) if order[n - 1].chunk == 0 and order[n].chunk == 4]
    assert [sum(i.chunk == 0 for i in order[:end]) for end in ends] == [sum(sizes[: k + 1]) for k in range(len(sizes))]


# --- what is sent and received


def ends_at(stages, stage, instruction):
    """(kind, from stage, to stage) of a transfer, and (micro-batch, the chunk that made the array)."""
    m, chunk = instruction.m, instruction.chunk
    match instruction:
        case StartSendOutput():
            return ("output", stage, (stage + 1) % stages), (m, chunk)
        case StartReceiveInput():
            return ("output", (stage - 1) % stages, stage), (m, chunk - 1)
        case StartSendGradient():
            return ("gradient", stage, (stage - 1) % stages), (m, chunk)
        case StartReceiveGradient():
            return ("gradient", (stage + 1) % stages, stage), (m, chunk + 1)


@every_pipeline
def test_every_send_has_one_receive_and_messages_of_a_kind_never_overtake(schedule):
    """Between two stages, those of one kind are received in the order in which they are sent."""
    for stages, micro_batches in CASES:
        sent, received = {}, {}
        for stage in range(stages):
            for instruction in program(schedule, stages, micro_batches, stage):
                if isinstance(instruction, Transfer):
                    road, what = ends_at(stages, stage, instruction)
                    side = sent if isinstance(instruction, SENDS) else received
                    side.setdefault(road, []).append(what)
        assert sent == received, (stages, micro_batches)
        boundaries = stages * schedule.chunks - 1 if stages > 1 else 0
        arrays = [(kind, *what) for (kind, *_), on_road in sent.items() for what in on_road]
        assert len(arrays) == len(set(arrays)) == 2 * boundaries * micro_batches


@every_pipeline
def test_transfers_stand_where_their_arrays_are_there(schedule):
    for stages, _, _, instructions in programs(schedule):
        if stages == 1:
            continue
        place = {instruction: i for i, instruction in enumerate(instructions)}
        for instruction, i in place.items():
            match instruction:
                case Forward(m, chunk) if chunk > 0:
                    assert place[StartReceiveInput(m, chunk)] < place[Wait(StartReceiveInput(m, chunk))] < i
                case Backward(m, chunk) | BackwardInput(m, chunk) if chunk < stages * schedule.chunks - 1:
                    assert place[StartReceiveGradient(m, chunk)] < place[Wait(StartReceiveGradient(m, chunk))] < i
                case StartSendOutput(m, chunk):
                    assert instructions[i - 1] == Forward(m, chunk)
                case StartSendGradient(m, chunk):
                    assert instructions[i - 1] in (Backward(m, chunk), BackwardInput(m, chunk))


@every_pipeline
def test_every_transfer_is_waited_for_once(schedule):
    for *_, instructions in programs(schedule):
        started = set()
        for instruction in instructions:
            if isinstance(instruction, Transfer):
                started.add(instruction)
            elif isinstance(instruction, Wait):
                started.remove(instruction.started)
        assert not started


@every_pipeline
def test_receives_overlap_with_one_computation_and_few_sends_are_unfinished(schedule):
    for stages, micro_batches, _, instructions in programs(schedule):
        under_way, computed = Counter(), 0
        begun = {}
        for instruction in instructions:
            if isinstance(instruction, Compute):
                computed += 1
                most = schedule.sends_unfinished(stages, micro_batches)
                assert under_way[StartSendOutput] <= most and under_way[StartSendGradient] <= most
                assert under_way[StartReceiveInput] + under_way[StartReceiveGradient] <= 1
            elif isinstance(instruction, Transfer):
                under_way[type(instruction)] += 1
                begun[instruction] = computed
            else:
                under_way[type(instruction.started)] -= 1
                if isinstance(instruction.started, RECEIVES):
                    assert computed - begun[instruction.started] == (computed > 0)


def test_a_program_in_full():
    expected = [
        *(StartReceiveInput(0, 1), StartReceiveGradient(0, 1), Wait(StartReceiveInput(0, 1))),
        *(Forward(0, 1), StartSendOutput(0, 1)),
        *(StartReceiveInput(1, 1), Wait(StartReceiveGradient(0, 1))),
        *(Backward(0, 1), StartSendGradient(0, 1)),
        *(StartReceiveGradient(1, 1), Wait(StartReceiveInput(1, 1))),
        *(Forward(1, 1), StartSendOutput(1, 1)),
        Wait(StartReceiveGradient(1, 1)),
        *(Backward(1, 1), StartSendGradient(1, 1)),
        *(Wait(StartSendOutput(0, 1)), Wait(StartSendOutput(1, 1))),
        *(Wait(StartSendGradient(0, 1)), Wait(StartSendGradient(1, 1))),
    ]
    assert named("naive").program(3, 2, 1) == expected


def test_the_oldest_send_is_waited_for_when_too_many_are_unfinished():
    instructions = with_transfers([Forward(m) for m in range(3)], last_chunk=1, sends_unfinished=1)
    sends = [i for i in instructions if not isinstance(i, Compute)]
    first, second, third = (StartSendOutput(m) for m in range(3))
    assert sends == [first, second, Wait(first), third, Wait(second), Wait(third)]


def test_the_other_end_of_the_other_end():
    for kind in (*SENDS, *RECEIVES):
        assert other_end(other_end(kind(3, 2))) == kind(3, 2)
    assert other_end(StartSendOutput(3, 2)) == StartReceiveInput(3, 3)
    assert other_end(StartSendGradient(3, 2)) == StartReceiveGradient(3, 1)


@every_pipeline
def test_one_stage_hands_over_by_itself(schedule):
    assert all(isinstance(i, Compute) for i in schedule.program(1, 5, 0))


# --- values and names


def test_instructions_are_values():
    assert Forward(1) == Forward(1, 0) != Backward(1, 0)
    assert len({Forward(1), Forward(1, 0), Backward(1), Wait(StartSendOutput(1)), Wait(StartSendOutput(1, 0))}) == 3
    assert hash(Forward(1, 2)) != hash(Backward(1, 2))


@pytest.mark.parametrize("name", SCHEDULES)
def test_names(name):
    schedule = named(name)
    assert schedule == SCHEDULES[name]() and schedule.name == name
    assert schedule.chunks == (2 if name == "interleaved" else 1)
    assert schedule != named("gpipe" if name == "naive" else "naive")


def test_the_names_that_there_are():
    assert list(SCHEDULES) == ["sequential", "naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-h2"]
    with pytest.raises(UsageError, match="no schedule 'zigzag'; there are: sequential, naive, gpipe, 1f1b, inter"):
        named("zigzag")


def test_chunks_by_name():
    assert named("interleaved", chunks=3) == Interleaved(3)
    assert named("gpipe", chunks=1) == named("gpipe")
    with pytest.raises(UsageError, match="1f1b: one chunk of layers a stage, not 2; interleaved has several"):
        named("1f1b", chunks=2)
    with pytest.raises(UsageError, match="interleaved: at least 2 chunks of layers a stage, not 1; 1f1b has one"):
        named("interleaved", chunks=1)


def test_sequential_is_no_pipeline_and_says_what_is():
    others = ", ".join(name for name in SCHEDULES if name != "sequential")
    with pytest.raises(UsageError, match=f"runs on 1 stage, not 2; schedules of pipelines are: {others}$"):
        named("sequential").program(2, 4, 0)


@pytest.mark.parametrize("stages, micro_batches, stage", [(2, 4, 2), (2, 4, -1), (0, 4, 0), (2, 0, 1)])
def test_no_such_stage(stages, micro_batches, stage):
    with pytest.raises(UsageError, match=f"no stage {stage} of {stages} with {micro_batches} micro-batches"):
        named("gpipe").program(stages, micro_batches, stage)
