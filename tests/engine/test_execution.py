"""How a stage carries out its instructions: what leaves when, and what is refused."""

import weakref
from itertools import product

import numpy as np
import pytest

from spmd_engine.comm.pending import Pending
from spmd_engine.engine.pipeline import LayerSegment
from spmd_engine.engine.schedules.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    StartReceiveGradient,
    StartReceiveInput,
    StartSendGradient,
    StartSendOutput,
    Transfer,
    Wait,
)
from spmd_engine.errors import UsageError
from support.toy_layers import Stand, Toy, execution_of, through, words


class Bystander:
    """Neighbours who take everything at once, and give what ``coming`` has."""

    def __init__(self, stand, *, chunks, here, coming=()):
        self.stand, self.chunks, self._here, self.coming = stand, chunks, here, dict(coming)
        self.sent = {}

    first = 0

    def here(self, chunk):
        return chunk in self._here

    def start_send(self, x, m, chunk, to, ctx):
        self.stand.log.append(f"send {m} from {chunk} to {to}")
        self.sent[m, chunk, to] = x
        return Pending.completed(None)

    def start_receive(self, m, chunk, source, ctx):
        self.stand.log.append(f"receive {m} for {chunk} from {source}")
        return Pending.completed(self.coming[m, chunk, source])


def middle_stage(*, coming):
    stand = Stand(6)
    neighbours = Bystander(stand, chunks=3, here={1}, coming=coming)
    return stand, neighbours, execution_of(stand, neighbours, {1: stand.chunk(LayerSegment(range(2, 4)))})


INPUT, GRADIENT = np.full(1, 5.0), np.full(1, 7.0)
BEFORE = [StartReceiveInput(0, 1), Wait(StartReceiveInput(0, 1)), Forward(0, 1), StartSendOutput(0, 1)]
BEFORE += [Wait(StartSendOutput(0, 1)), StartReceiveGradient(0, 1), Wait(StartReceiveGradient(0, 1))]


def test_the_input_s_gradient_leaves_before_the_weights_are_made():
    stand, neighbours, execution = middle_stage(coming={(0, 1, 0): INPUT, (0, 1, 2): GRADIENT})
    execution.run([*BEFORE, Backward(0, 1), StartSendGradient(0, 1), Wait(StartSendGradient(0, 1))])
    assert stand.log == words(
        "receive 0 for 1 from 0, forward 2, forward 3, send 0 from 1 to 2, receive 0 for 1 from 2, "
        "input 3, weight 3, done 3, input 2, send 0 from 1 to 0, weight 2, done 2"
    )
    assert neighbours.sent[0, 1, 2] == through((2, 3), 5.0) and neighbours.sent[0, 1, 0] == 28.0
    assert stand.kept == 0


def test_so_it_does_where_the_backward_has_two_parts():
    stand, neighbours, execution = middle_stage(coming={(0, 1, 0): INPUT, (0, 1, 2): GRADIENT})
    execution.run([*BEFORE, BackwardInput(0, 1), StartSendGradient(0, 1), BackwardWeight(0, 1)])
    execution.run([Wait(StartSendGradient(0, 1))])
    assert stand.log[-7:] == words("input 3, input 2, send 0 from 1 to 0, weight 3, done 3, weight 2, done 2")
    assert stand.kept == 0


def test_chunks_of_one_stage_hand_over_without_messages():
    stand, lost = Stand(4), []
    neighbours = Bystander(stand, chunks=2, here={0, 1})
    chunks = {0: stand.chunk(LayerSegment(range(2))), 1: stand.chunk(LayerSegment(range(2, 4)))}

    def lose(m, y):
        lost.append((m, float(y[0])))
        return np.ones(1)

    execution = execution_of(stand, neighbours, chunks, 2, lose)
    execution.run([Forward(m, c) for m, c in product(range(2), range(2))])
    execution.run([Backward(m, c) for m, c in product(range(2), (1, 0))])
    assert lost == [(m, through(range(4), 1.0 + m)) for m in range(2)]
    assert not neighbours.sent and stand.kept == 0
    assert {key: dx.tolist() for key, dx in execution.input_gradients.items()} == {(0, 0): [16.0], (1, 0): [16.0]}


def test_the_loss_s_gradient_is_gone_when_the_next_layer_begins():
    """It may be larger than all that the layers save: of every token, a number for each word."""
    stand, given, alive = Stand(3), [], []

    class Watchful(Toy):
        def forward(self, *args):
            alive.append(sum(ref() is not None for ref in given))
            return super().forward(*args)

        def backward_input(self, *args):
            alive.append(sum(ref() is not None for ref in given))
            return super().backward_input(*args)

    def lose(m, y):
        given.append(weakref.ref(gradient := np.ones(1)))
        return gradient

    stand.layers = [(name, Watchful(layer.number, stand)) for name, layer in stand.layers]
    chunks = {0: stand.chunk(LayerSegment(range(3)))}
    execution = execution_of(stand, Bystander(stand, chunks=1, here={0}), chunks, 2, lose)
    execution.run([Forward(0), Backward(0), Forward(1), Backward(1)])
    assert alive == [0, 0, 0, 1, 0, 0] * 2


def test_a_stage_that_is_not_first_takes_no_inputs():
    stand = Stand(2)
    execution = execution_of(stand, Bystander(stand, chunks=2, here={1}), {1: stand.chunk(LayerSegment(range(1, 2)))})
    assert not execution.inputs


@pytest.mark.parametrize("instruction", [Instruction(0), Transfer(0, 0), Compute(0)])
def test_an_instruction_that_is_not_known_is_refused(instruction):
    stand = Stand(1)
    execution = execution_of(stand, Bystander(stand, chunks=1, here={0}), {0: stand.chunk(LayerSegment(range(1)))})
    with pytest.raises(UsageError, match=f"this engine cannot execute {type(instruction).__name__}"):
        execution.run([instruction])
