"""Schedules executed on paper: time, idle time and memory are what they should be."""

from itertools import product
from math import ceil

import pytest

from spmd_engine.engine.schedules.orders import (
    GPipe,
    Interleaved,
    Naive,
    OneForwardOneBackward,
    Sequential,
    ZeroBubble,
    ZeroBubbleH2,
)
from spmd_engine.engine.schedules.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Slot,
    StartReceiveInput,
    StartSendOutput,
    Wait,
    idle_fraction,
    idle_inside,
    makespan,
    peak_activations,
    timeline,
)
from support.pipelines import (
    CASES,
    INTERLEAVED,
    RECEIVE,
    SEND,
    ZERO_BUBBLE,
    Written,
    each_case,
    equal,
    every_pipeline,
    executed,
)

# --- time


def drawn(slots, unit=1.0):
    """A row a stage: in each unit of time what it does, or dots."""
    names = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}
    stages = 1 + max(slot.stage for slot in slots)
    rows = [[".."] * round(makespan(slots) / unit) for _ in range(stages)]
    for slot in slots:
        for at in range(round(slot.start / unit), round(slot.end / unit)):
            rows[slot.stage][at] = f"{names[type(slot.instruction)]}{slot.instruction.m}"
    return [" ".join(row) for row in rows]


def test_timelines_drawn_by_hand():
    assert drawn(timeline(OneForwardOneBackward(), 2, 2)) == [
        "F0 F1 .. .. B0 B0 .. B1 B1",
        ".. F0 B0 B0 F1 B1 B1 .. ..",
    ]
    assert drawn(timeline(ZeroBubble(), 2, 3)) == [
        "F0 F1 .. I0 W0 F2 I1 W1 I2 W2",
        ".. F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]
    assert drawn(timeline(Interleaved(), 2, 2), unit=0.5) == [
        "F0 F1 F0 F1 .. .. B0 B0 .. B1 B1 B0 B0 B1 B1",
        ".. F0 F1 F0 B0 B0 F1 B1 B1 B0 B0 B1 B1 .. ..",
    ]


def test_a_sender_waits_for_a_receiver_that_comes_late():
    second, received = StartSendOutput(1, 0), StartReceiveInput(1, 1)
    sender = (Forward(0, 0), SEND, Forward(1, 0), second, Wait(SEND), Wait(second), Forward(2, 0))
    receiver = (RECEIVE, Wait(RECEIVE), Forward(0, 1), received, Wait(received), Forward(1, 1))
    slots = timeline(Written(programs=(sender, receiver)), 2, 3, {Forward: 10})
    assert slots[2] == Slot(0, 20, 30, Forward(2, 0))  # asked for at 20, when it began
    slow = (RECEIVE, Wait(RECEIVE), Forward(0, 1), Backward(0, 1), received, Wait(received), Forward(1, 1))
    slots = timeline(Written(programs=(sender, slow)), 2, 3, {Forward: 10, Backward: 25})
    assert slots[2] == Slot(0, 45, 55, Forward(2, 0))


def test_costs():
    one = {Forward: 1, BackwardInput: 2, BackwardWeight: 4}
    assert makespan(timeline(Sequential(), 1, 3, one)) == 3 * 7
    assert makespan(timeline(Sequential(), 1, 3, {**one, Backward: 5})) == 3 * 6
    assert makespan(timeline(Interleaved(4), 1, 3, one)) == 3 * 7


@each_case
@every_pipeline
def test_bubbles_are_those_of_the_formulas(schedule, cases):
    known = 0
    for stages, micro_batches in cases:
        expected = schedule.expected_bubble(stages, micro_batches)
        if expected is not None:
            known += 1
            assert idle_fraction(executed(schedule, stages, micro_batches)) == equal(expected, abs=1e-12)
    assert known >= sum(m >= p for p, m in cases)


@pytest.mark.parametrize("p, m", CASES)
def test_the_formulas(p, m):
    """As published, for forward, input part and weight part of equal cost."""
    pipeline = equal((p - 1) / (m + p - 1))
    assert GPipe().expected_bubble(p, m) == OneForwardOneBackward().expected_bubble(p, m) == pipeline
    assert Naive().expected_bubble(p, m) == equal(1 - 1 / p)
    if m % p == 0:
        assert Interleaved(3).expected_bubble(p, m) == equal((p - 1) / (3 * m + p - 1))
    if m >= p:
        assert ZeroBubble().expected_bubble(p, m) == equal((p - 1) / (3 * m + p - 1))
    else:
        assert ZeroBubble().expected_bubble(p, m) is Interleaved().expected_bubble(p, m) is None


@pytest.mark.parametrize("schedule", [GPipe(), OneForwardOneBackward()], ids=str)
def test_these_bubbles_do_not_depend_on_what_a_backward_costs(schedule):
    for (stages, micro_batches), backward in product(CASES[::7], (0.5, 1, 3)):
        slots = timeline(schedule, stages, micro_batches, {Backward: backward})
        assert idle_fraction(slots) == equal(schedule.expected_bubble(stages, micro_batches), abs=1e-12)


@pytest.mark.parametrize("schedule", [GPipe(), *INTERLEAVED, *ZERO_BUBBLE], ids=str)
def test_never_slower_than_1f1b(schedule):
    for stages, micro_batches in CASES:
        least = makespan(executed(OneForwardOneBackward(), stages, micro_batches))
        assert least == 3 * (micro_batches + stages - 1)
        time = makespan(executed(schedule, stages, micro_batches))
        assert time <= least + 1e-9, (stages, micro_batches)
        if stages > 1 and micro_batches > 1 and not isinstance(schedule, GPipe):
            assert time < least - 1e-9, (stages, micro_batches)


@pytest.mark.parametrize("schedule", ZERO_BUBBLE, ids=str)
def test_with_few_micro_batches_zero_bubble_takes_only_the_way_there_and_back(schedule):
    for stages, micro_batches in CASES:
        if micro_batches < stages:
            way, last_weight = 2 * (stages - 1), 1
            time = makespan(executed(schedule, stages, micro_batches))
            assert time == way + 2 * micro_batches + last_weight


def test_h2_leaves_no_stage_idle_between_its_first_instruction_and_its_last():
    for p, m in CASES:
        if m >= 2 * p - 1:
            assert idle_inside(executed(ZeroBubbleH2(), p, m)) == [0] * p
            assert idle_inside(executed(ZeroBubble(), p, m)) == [p - 1 - i for i in range(p)]


# --- memory


def peaks(schedule, expected):
    """Compare with ``expected(p, m, i)`` of stage i."""
    for p, m in CASES:
        assert peak_activations(executed(schedule, p, m)) == [expected(p, m, i) for i in range(p)], (p, m)


def test_peak_activations():
    peaks(Naive(), lambda p, m, i: 1)
    peaks(GPipe(), lambda p, m, i: m)
    peaks(OneForwardOneBackward(), lambda p, m, i: min(m, p - i))
    peaks(ZeroBubble(), lambda p, m, i: min(m, p))
    peaks(ZeroBubbleH2(), lambda p, m, i: min(m, 2 * p - 1))


@pytest.mark.parametrize("schedule", INTERLEAVED, ids=str)
def test_peak_activations_of_interleaved(schedule):
    v = schedule.chunks

    def expected(p, m, i):
        largest_group = ceil(m / max(m // p, 1))
        return min(v * m, 2 * (p - 1 - i) + (v - 1) * largest_group + 1) / v

    peaks(schedule, expected)
    for p, m in CASES:
        if m % p == 0:
            assert max(peak_activations(executed(schedule, p, m))) <= p + (p - 1) / v + 1e-9


def test_measures_of_slots_written_by_hand():
    slots = [
        *(Slot(0, 0, 1, Forward(0, 0)), Slot(0, 1, 2, Forward(1, 0)), Slot(0, 4, 5, BackwardInput(0, 0))),
        *(Slot(0, 5, 6, BackwardInput(1, 0)), Slot(0, 6, 7, BackwardWeight(0, 0))),
        *(Slot(1, 1, 4, Forward(0, 1)), Slot(1, 4, 8, Backward(0, 1))),
    ]
    assert makespan(slots) == 8
    assert idle_fraction(slots) == equal(1 - (5 + 7) / 16)
    assert idle_inside(slots) == [2, 0]
    assert peak_activations(slots) == [2, 1]
