"""Schedules executed on paper: no stage waits for ever, and deadlocks are found and told."""

from dataclasses import dataclass

import pytest

from spmd_engine.engine.schedules.orders import Interleaved, OneForwardOneBackward
from spmd_engine.engine.schedules.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    StartSendOutput,
    Wait,
    idle_fraction,
    makespan,
    timeline,
    with_transfers,
)
from spmd_engine.errors import UsageError
from support.pipelines import CASES, PIPELINES, RECEIVE, SEND, Written, each_case, equal, every_pipeline, executed

# --- order


@each_case
@every_pipeline
def test_nobody_deadlocks_or_runs_before_what_it_needs(schedule, cases):
    for stages, micro_batches in cases:
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


@pytest.mark.parametrize("stages, micro_batches", [(11, 26), pytest.param(16, 31, marks=pytest.mark.soak)])
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
