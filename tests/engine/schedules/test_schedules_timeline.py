"""Schedules executed on paper: no stage waits for ever, and time, idle time and memory are what they should be."""

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import ceil
from typing import ClassVar

import pytest

from spmd_engine.engine.schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    GPipe,
    Interleaved,
    Naive,
    OneForwardOneBackward,
    Schedule,
    Sequential,
    Slot,
    StartReceiveInput,
    StartSendOutput,
    Wait,
    ZeroBubble,
    ZeroBubbleH2,
    idle_fraction,
    idle_inside,
    makespan,
    peak_activations,
    timeline,
)
from spmd_engine.engine.schedules.transfers import with_transfers
from spmd_engine.errors import UsageError

INTERLEAVED = [Interleaved(2), Interleaved(3)]
ZERO_BUBBLE = [ZeroBubble(), ZeroBubbleH2()]
PIPELINES = [Naive(), GPipe(), OneForwardOneBackward(), *INTERLEAVED, *ZERO_BUBBLE]
CASES = list(product(range(1, 9), range(1, 17)))

every_pipeline = pytest.mark.parametrize("schedule", PIPELINES, ids=str)
equal = pytest.approx


@cache
def executed(schedule, stages, micro_batches):
    """Also the proof that it does not deadlock: transfers are synchronous."""
    return timeline(schedule, stages, micro_batches)


# --- order


@every_pipeline
def test_nobody_deadlocks_or_runs_before_what_it_needs(schedule):
    for stages, micro_batches in CASES:
        slots = executed(schedule, stages, micro_batches)
        start = {slot.instruction: slot.start for slot in slots}
        end = {slot.instruction: slot.end for slot in slots}
        split = BackwardInput(0, 0) in start
        assert len(start) == len(slots) == stages * schedule.chunks * micro_batches * (3 if split else 2)
        for instruction, begins in start.items():
            m, chunk = instruction.m, instruction.chunk
            if isinstance(instruction, BackwardWeight):
                needs = [BackwardInput(m, chunk)]
            elif isinstance(instruction, Forward):
                needs = [Forward(m, chunk - 1)]
            else:
                needs = [Forward(m, chunk), type(instruction)(m, chunk + 1)]
            inside = [need for need in needs if 0 <= need.chunk < stages * schedule.chunks]
            assert all(end[need] <= begins for need in inside), (stages, micro_batches, instruction)


@every_pipeline
def test_a_stage_does_one_thing_at_a_time(schedule):
    for stages, micro_batches in CASES:
        slots = executed(schedule, stages, micro_batches)
        for before, after in zip(slots, slots[1:], strict=False):
            assert before.stage < after.stage or before.end <= after.start
        assert all(slot.stage == slot.instruction.chunk % stages for slot in slots)


@pytest.mark.parametrize("stages, micro_batches", [(11, 26), (16, 31)])
@pytest.mark.parametrize("schedule", [*PIPELINES, Interleaved(5)], ids=str)
def test_larger_pipelines(schedule, stages, micro_batches):
    expected = schedule.expected_bubble(stages, micro_batches)
    assert idle_fraction(executed(schedule, stages, micro_batches)) == equal(expected)


# --- deadlocks are found and told


@dataclass(frozen=True)
class Blocking(OneForwardOneBackward):
    """1F1B with plain blocking messages: each receive just before its use, each send finished at once."""

    def program(self, stages, micro_batches, stage):
        order = self.order(stages, micro_batches, stage)
        return with_transfers(order, stages - 1, sends_unfinished=0, receive_ahead=0)


def test_blocking_sends_deadlock_and_both_stages_are_named():
    output = "StartSendOutput(m=1, chunk=0)), until stage 1 begins StartReceiveInput(m=1, chunk=1)"
    gradient = "StartSendGradient(m=0, chunk=1)), until stage 0 begins StartReceiveGradient(m=0, chunk=0)"
    with pytest.raises(UsageError) as error:
        timeline(Blocking(), 2, 2)
    expected = f"deadlock: stage 0 stands at Wait(started={output}; stage 1 stands at Wait(started={gradient}"
    assert str(error.value) == expected


@dataclass(frozen=True)
class Written(Schedule):
    """Programs written by hand."""

    name: ClassVar[str] = "written"
    programs: tuple = ()

    def __post_init__(self):
        """Any number of chunks."""

    def order(self, stages, micro_batches, stage):
        raise NotImplementedError

    def program(self, stages, micro_batches, stage):
        return list(self.programs[stage])


SEND, RECEIVE = StartSendOutput(0, 0), StartReceiveInput(0, 1)


def test_a_receive_that_is_missing_is_said_to_be():
    with pytest.raises(UsageError, match=r"stage 1 begins StartReceiveInput\(m=0, chunk=1\), which it never does$"):
        timeline(Written(programs=((Forward(0, 0), SEND, Wait(SEND)), ())), 2, 1)


@pytest.mark.parametrize(
    "program, message",
    [
        ((Forward(0, 1),), "stage 1: Forward(m=0, chunk=1) comes before Wait(started=StartReceiveInput(m=0, chunk=1))"),
        ((Wait(RECEIVE),), "stage 1: Wait(started=StartReceiveInput(m=0, chunk=1)) comes before StartReceiveInput"),
        ((Backward(0, 1),), "stage 1: Backward(m=0, chunk=1) comes before Forward(m=0, chunk=1), which it needs"),
        ((BackwardWeight(0, 1),), "stage 1: BackwardWeight(m=0, chunk=1) comes before BackwardInput(m=0, chunk=1)"),
        ((StartSendOutput(0, 1),), "stage 1: StartSendOutput(m=0, chunk=1) comes before Forward(m=0, chunk=1)"),
        ((RECEIVE, Wait(RECEIVE), Forward(0, 1), Forward(0, 1)), "stage 1: Forward(m=0, chunk=1) comes twice"),
    ],
)
def test_programs_that_are_wrong_are_refused(program, message):
    with pytest.raises(UsageError) as error:
        timeline(Written(programs=((Forward(0, 0), SEND, Wait(SEND)), program)), 2, 1)
    assert message in str(error.value)


def test_on_one_stage_chunks_are_handed_over_in_order():
    chunks = (Forward(0, 0), Forward(0, 1), Backward(0, 1), Backward(0, 0))
    assert makespan(timeline(Written(2, (chunks,)), 1, 1)) == 3
    with pytest.raises(UsageError, match=r"stage 0: Forward\(m=0, chunk=1\) comes before Forward\(m=0, chunk=0\)"):
        timeline(Written(2, ((chunks[1], chunks[0]),)), 1, 1)
    with pytest.raises(UsageError, match=r"Backward\(m=0, chunk=0\) comes before BackwardInput\(m=0, chunk=1\)"):
        timeline(Written(2, (chunks[:2] + chunks[3:],)), 1, 1)


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


@every_pipeline
def test_bubbles_are_those_of_the_formulas(schedule):
    known = 0
    for stages, micro_batches in CASES:
        expected = schedule.expected_bubble(stages, micro_batches)
        if expected is not None:
            known += 1
            assert idle_fraction(executed(schedule, stages, micro_batches)) == equal(expected, abs=1e-12)
    assert known >= sum(m >= p for p, m in CASES)


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
