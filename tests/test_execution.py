"""How a rank carries out a schedule: chunks of layers forward and backward, what leaves when, what is kept."""

import weakref
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

import tiny
from spmd_engine import Mesh, run
from spmd_engine.arrays.backend import CPU
from spmd_engine.comm.pending import Pending
from spmd_engine.engine import schedules
from spmd_engine.engine.chunk import Chunk, Segment
from spmd_engine.engine.execution import Execution, Neighbours
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.recompute import Recompute, segments
from spmd_engine.engine.schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    StartReceiveGradient,
    StartReceiveInput,
    StartSendGradient,
    StartSendOutput,
    Wait,
)
from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import ForwardContext, Layer
from spmd_engine.models import deep_mlp, gpt, mlp

TRAINING, SERVING = (ForwardContext(None, None, training=training) for training in (True, False))


class Box:
    """What a layer keeps of a micro-batch; weak references to it tell how long it is kept."""

    def __init__(self, number, x):
        self.number, self.x = number, x


class Toy(Layer):
    """y = 2 x + its number. Writes down what it is asked for."""

    def __init__(self, number, stand):
        self.number, self.stand = number, stand

    def forward(self, sh, p, x, ctx):
        assert p == f"parameters {self.number}" and sh == f"shards {self.number}"
        self.stand.say("forward" if ctx.saving else "forward without saving", self.number)
        return 2 * x + self.number, self.stand.keep(Box(self.number, x))

    def backward_input(self, sh, p, saved, dy):
        assert p == f"parameters {self.number}" and sh == f"shards {self.number}" and saved.number == self.number
        self.stand.say("input", self.number)
        return 2 * dy, saved

    def backward_weight(self, sh, rest, g):
        assert g == f"sums {self.number}" and rest.number == self.number
        self.stand.say("weight", self.number)


class Stand:
    """Toy layers, and what plays the parameters and the reducer for them."""

    def __init__(self, count):
        self.log, self.opened, self._kept = [], [], []
        self.layers = [(f"layer{n}", Toy(n, self)) for n in range(count)]
        self.shards = [f"shards {n}" for n in range(count)]

    def chunk(self, *parts):
        return Chunk(parts, self.layers, self.shards, self, self)

    def say(self, what, number):
        self.log.append(f"{what} {number}")

    def keep(self, box):
        self._kept.append(weakref.ref(box))
        return box

    @property
    def kept(self):
        return sum(ref() is not None for ref in self._kept)

    def take_log(self):
        log, self.log = self.log, []
        return log

    # as OpenParameters

    def open(self, number, *, keep=(), ahead=()):
        self.opened.append((number, list(keep), list(ahead)))
        return f"parameters {number}"

    # as Reducer

    def sums(self, number):
        return f"sums {number}"

    def layer_done(self, number):
        self.say("done", number)


def words(text):
    return [event.strip() for event in text.split(",")]


def through(layers, x):
    for number in layers:
        x = 2 * x + number
    return x


# --- a chunk of layers


def test_a_forward_opens_each_layer_and_looks_ahead_in_its_chunk():
    stand = Stand(6)
    y, saved = stand.chunk(Segment(range(2, 5))).forward(np.ones(2), TRAINING)
    assert y.tolist() == [through((2, 3, 4), 1.0)] * 2
    assert stand.log == words("forward 2, forward 3, forward 4")
    assert stand.opened == [(2, [], [3, 4]), (3, [], [4]), (4, [], [])]
    assert [box.number for part in saved for box in part.of_layers] == [2, 3, 4]


def test_a_backward_makes_each_layer_s_weights_while_what_they_need_is_at_hand():
    stand = Stand(6)
    chunk = stand.chunk(Segment(range(2, 5)))
    _, saved = chunk.forward(np.ones(2), TRAINING)
    stand.log, stand.opened = [], []
    chunk.backward(saved, np.ones(2), lambda dx: stand.say("left", int(dx[0])))
    assert stand.log == words("input 4, weight 4, done 4, input 3, weight 3, done 3, input 2, left 8, weight 2, done 2")
    assert stand.opened == [(4, [], [3, 2]), (3, [], [2]), (2, [], [])]
    assert stand.kept == 0


def test_a_backward_in_two_parts_leaves_all_weights_for_later():
    stand = Stand(3)
    chunk = stand.chunk(Segment(range(3)))
    _, saved = chunk.forward(np.ones(2), TRAINING)
    stand.take_log()
    dx, rests = chunk.backward_input(saved, np.ones(2))
    assert dx.tolist() == [8.0, 8.0] and stand.take_log() == words("input 2, input 1, input 0")
    assert stand.kept == 3
    chunk.backward_weight(rests)
    assert stand.log == words("weight 2, done 2, weight 1, done 1, weight 0, done 0")
    assert stand.kept == 0


PARTS = [Segment(range(1)), Segment(range(1, 3), recomputed=True), Segment(range(3, 4))]


def test_what_is_recomputed_keeps_only_its_input():
    stand = Stand(4)
    chunk = stand.chunk(*PARTS)
    y, saved = chunk.forward(np.ones(2), TRAINING)
    assert y.tolist() == [through(range(4), 1.0)] * 2
    assert stand.take_log() == words("forward 0, forward without saving 1, forward without saving 2, forward 3")
    assert stand.kept == 2
    assert [part.x is not None for part in saved] == [False, True, False]

    stand.opened = []
    chunk.backward(saved, np.ones(2), lambda dx: stand.say("left", int(dx[0])))
    assert stand.log == words(
        "input 3, weight 3, done 3, forward 1, forward 2, input 2, weight 2, done 2, input 1, weight 1, done 1, "
        "input 0, left 16, weight 0, done 0"
    )
    in_segment = [(number, keep) for number, keep, _ in stand.opened]
    assert in_segment == [(3, []), (1, [1, 2]), (2, [1, 2]), (2, [1, 2]), (1, [1, 2]), (0, [])]
    assert [ahead for _, _, ahead in stand.opened] == [[2, 1, 0], [0], [0], [1, 0], [0], []]
    assert stand.kept == 0


def test_recomputation_gives_the_backward_the_same():
    """Of the repeated forward's input, and so of what it saves."""
    seen = {}
    for recomputed in (False, True):
        stand = Stand(3)
        chunk = stand.chunk(Segment(range(3), recomputed))
        _, saved = chunk.forward(np.ones(1), TRAINING)
        dx, rests = chunk.backward_input(saved, np.ones(1))
        seen[recomputed] = dx.tolist(), [(number, rest.x.tolist()) for number, rest in rests]
    assert seen[True] == seen[False] == ([8.0], [(2, [5.0]), (1, [2.0]), (0, [1.0])])


def test_a_segment_s_input_is_given_up_once_it_has_been_used_again():
    stand, inputs = Stand(2), []

    class Frugal(Toy):
        """Saves nothing of its input."""

        def forward(self, sh, p, x, ctx):
            assert not ctx.saving or not any(ref() is not None for ref in inputs)
            if ctx.saving:
                inputs.append(weakref.ref(x))
            y, _ = super().forward(sh, p, x, ctx)
            return y, Box(self.number, None)

    stand.layers = [(name, Frugal(layer.number, stand)) for name, layer in stand.layers]
    chunk = stand.chunk(Segment(range(2), recomputed=True))
    chunk.backward(chunk.forward(np.ones(1), TRAINING)[1], np.ones(1), lambda dx: None)
    assert len(inputs) == 2


@pytest.mark.parametrize("parts", [PARTS, [Segment(range(4))]], ids=["recomputed", "kept"])
def test_serving_keeps_nothing(parts):
    stand = Stand(4)
    y, saved = stand.chunk(*parts).forward(np.ones(2), SERVING)
    assert y.tolist() == [through(range(4), 1.0)] * 2
    assert stand.log == words("forward 0, forward 1, forward 2, forward 3")
    assert stand.kept == 0 and all(part.x is None and not part.of_layers for part in saved)


def test_of_a_layer_s_backward_nothing_is_left_when_the_next_one_begins():
    stand, left = Stand(3), []

    class Watchful(Toy):
        def backward_input(self, *args):
            left.append(stand.kept)
            return super().backward_input(*args)

    stand.layers = [(name, Watchful(layer.number, stand)) for name, layer in stand.layers]
    chunk = stand.chunk(Segment(range(3)))
    chunk.backward(chunk.forward(np.ones(1), TRAINING)[1], np.ones(1), lambda dx: None)
    assert left == [3, 2, 1]


# --- which layers are recomputed together


@pytest.mark.parametrize(
    ("recompute", "model", "nearest"),
    [
        (Recompute.BLOCK, mlp(), "mlp has no block; choose none"),
        (Recompute.ATTENTION, mlp(), "mlp has no attention; choose none"),
        (Recompute.ATTENTION, deep_mlp(2, 4), "deep-mlp has no attention; choose block or none"),
    ],
)
def test_what_a_model_does_not_have_is_not_recomputed(recompute, model, nearest):
    with pytest.raises(UsageError, match=nearest):
        run(lambda: LayeredEngine(model, Mesh(), recompute=recompute), 1)


MODEL = gpt(tiny.GPTSize(layers=2, width=4, heads=1, context=4, vocabulary=5))
# embedding, positions, block0/attention, block0/mlp, block1/attention, block1/mlp, norm, head


@pytest.mark.parametrize(
    "recompute, layers, expected",
    [
        (Recompute.NONE, range(8), [(0, 8, False)]),
        (Recompute.BLOCK, range(8), [(0, 2, False), (2, 4, True), (4, 6, True), (6, 8, False)]),
        (Recompute.BLOCK, range(3, 5), [(3, 4, True), (4, 5, True)]),  # a chunk that begins within a block
        (Recompute.BLOCK, range(6, 8), [(6, 8, False)]),
        (
            Recompute.ATTENTION,
            range(8),
            [(0, 2, False), (2, 3, True), (3, 4, False), (4, 5, True), (5, 8, False)],
        ),
        (Recompute.ATTENTION, range(5, 8), [(5, 8, False)]),
    ],
)
def test_segments(recompute, layers, expected):
    found = segments(MODEL, layers, recompute)
    assert found == [Segment(range(first, end), recomputed) for first, end, recomputed in expected]


# --- one stage's instructions


class Bystander:
    """Neighbours who take everything at once, and give what ``coming`` has."""

    def __init__(self, stand, *, chunks, here, coming=()):
        self.stand, self.chunks, self._here, self.coming = stand, chunks, here, dict(coming)
        self.sent = {}

    def is_last(self, chunk):
        return chunk == self.chunks - 1

    def here(self, chunk):
        return chunk in self._here

    def start_send(self, x, m, chunk, to):
        self.stand.log.append(f"send {m} from {chunk} to {to}")
        self.sent[m, chunk, to] = x
        return Pending.completed(None)

    def start_receive(self, m, chunk, source):
        self.stand.log.append(f"receive {m} for {chunk} from {source}")
        return Pending.completed(self.coming[m, chunk, source])


def execution_of(stand, neighbours, chunks, micro_batches=1, lose=lambda m, y: y):
    inputs = [np.full(1, 1.0 + m) for m in range(micro_batches)]
    return Execution(chunks, neighbours, [TRAINING] * micro_batches, inputs, lose)


def middle_stage(*, coming):
    stand = Stand(6)
    neighbours = Bystander(stand, chunks=3, here={1}, coming=coming)
    return stand, neighbours, execution_of(stand, neighbours, {1: stand.chunk(Segment(range(2, 4)))})


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
    chunks = {0: stand.chunk(Segment(range(2))), 1: stand.chunk(Segment(range(2, 4)))}

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
    chunks = {0: stand.chunk(Segment(range(3)))}
    execution = execution_of(stand, Bystander(stand, chunks=1, here={0}), chunks, 2, lose)
    execution.run([Forward(0), Backward(0), Forward(1), Backward(1)])
    assert alive == [0, 0, 0, 1, 0, 0] * 2


def test_a_stage_that_is_not_first_takes_no_inputs():
    stand = Stand(2)
    execution = execution_of(stand, Bystander(stand, chunks=2, here={1}), {1: stand.chunk(Segment(range(1, 2)))})
    assert not execution.inputs


@pytest.mark.parametrize("instruction", [schedules.Instruction(0), schedules.Transfer(0, 0), schedules.Compute(0)])
def test_an_instruction_that_is_not_known_is_refused(instruction):
    stand = Stand(1)
    execution = execution_of(stand, Bystander(stand, chunks=1, here={0}), {0: stand.chunk(Segment(range(1)))})
    with pytest.raises(UsageError, match=f"this engine cannot execute {type(instruction).__name__}"):
        execution.run([instruction])


# --- all stages together


@pytest.mark.parametrize("stages, per_stage, micro_batches", [(2, 1, 3), (3, 1, 5), (4, 2, 4), (2, 3, 5)])
def test_both_ends_of_a_transfer_agree_and_no_two_share_a_channel(stages, per_stage, micro_batches):
    said = {}

    def stage_of(rank):
        def note(way):
            def start(peer, *args, channel, label, like=None):
                said.setdefault((way, rank, peer), []).append((channel, label))

            return start

        pipe = SimpleNamespace(size=stages, rank=rank, start_send=note("send"), start_receive=note("receive"))
        return Neighbours(pipe, stages * per_stage, CPU)

    ranks = [stage_of(rank) for rank in range(stages)]
    last = stages * per_stage - 1
    for m, chunk in product(range(micro_batches), range(last)):
        for source, to in ((chunk, chunk + 1), (chunk + 1, chunk)):
            ranks[source % stages].start_send(None, m, source, to)
            ranks[to % stages].start_receive(m, to, source)
    for (way, rank, peer), calls in said.items():
        channels = [channel for channel, _ in calls]
        assert len(set(channels)) == len(channels)
        assert way == "receive" or calls == said["receive", peer, rank]
    assert {label for calls in said.values() for _, label in calls} == {"input", "gradient"}


def test_without_a_pipeline_all_chunks_are_here():
    alone = Neighbours(None, 3, CPU)
    assert (alone.stages, alone.stage) == (1, 0)
    assert [alone.here(chunk) for chunk in range(3)] == [True] * 3
    assert [alone.is_last(chunk) for chunk in range(3)] == [False, False, True]


NAMES = ["naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-h2"]


@pytest.mark.parametrize("stages, micro_batches", [(2, 1), (3, 5), (4, 4)])
@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_computes_what_one_stage_does_and_keeps_what_its_schedule_says(name, stages, micro_batches):
    schedule = schedules.named(name)
    layers_each = 2  # in a chunk
    count = stages * schedule.chunks
    peaks = schedules.peak_activations(schedules.timeline(schedule, stages, micro_batches))

    def program():
        with Mesh(pipe=stages) as mesh:
            stand = Stand(count * layers_each)
            stage, kept, lost = mesh.rank, [], {}
            chunks = {
                c: stand.chunk(Segment(range(c * layers_each, (c + 1) * layers_each)))
                for c in range(stage, count, stages)
            }
            neighbours = Neighbours(mesh.group("pipe"), count, CPU)
            execution = execution_of(stand, neighbours, chunks, micro_batches, lambda m, y: lost.setdefault(m, y))

            def watched(instructions):
                for instruction in instructions:
                    yield instruction
                    kept.append(stand.kept)

            execution.run(watched(schedule.program(stages, micro_batches, stage)))
            assert stand.kept == 0
            assert not (execution.saved or execution.outputs or execution.inputs or execution.output_gradients)
            assert max(kept) == peaks[stage] * layers_each * schedule.chunks
            assert stand.log.count("weight 0") == (micro_batches if stage == 0 else 0)
            return lost, execution.input_gradients

    results = run(program, stages)
    outputs = {m: [through(range(count * layers_each), 1.0 + m)] for m in range(micro_batches)}
    assert {m: y.tolist() for m, y in results[-1][0].items()} == outputs
    assert not any(lost for lost, _ in results[:-1])
    gradients = {(m, 0): [2.0 ** (count * layers_each) * y[0]] for m, y in outputs.items()}
    assert {key: dx.tolist() for key, dx in results[0][1].items()} == gradients
    assert not any(left for _, left in results[1:])
