"""A chunk of layers forward and backward: in which order, what is kept, what is computed again."""

import weakref

import numpy as np
import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.engine.pipeline import LayerSegment, Recompute, segments
from spmd_engine.errors import UsageError
from spmd_engine.models import deep_mlp, gpt, mlp
from support import tiny
from support.toy_layers import SERVING, TRAINING, Box, Stand, Toy, through, words

# --- a chunk of layers


def test_a_forward_opens_each_layer_and_looks_ahead_in_its_chunk():
    stand = Stand(6)
    y, saved = stand.chunk(LayerSegment(range(2, 5))).forward(np.ones(2), TRAINING)
    assert y.tolist() == [through((2, 3, 4), 1.0)] * 2
    assert stand.log == words("forward 2, forward 3, forward 4")
    assert stand.opened == [(2, [], [3, 4]), (3, [], [4]), (4, [], [])]
    assert [box.number for part in saved for box in part.of_layers] == [2, 3, 4]


def test_a_backward_makes_each_layer_s_weights_while_what_they_need_is_at_hand():
    stand = Stand(6)
    chunk = stand.chunk(LayerSegment(range(2, 5)))
    _, saved = chunk.forward(np.ones(2), TRAINING)
    stand.log, stand.opened = [], []
    chunk.backward(saved, np.ones(2), lambda dx: stand.say("left", int(dx[0])))
    assert stand.log == words("input 4, weight 4, done 4, input 3, weight 3, done 3, input 2, left 8, weight 2, done 2")
    assert stand.opened == [(4, [], [3, 2]), (3, [], [2]), (2, [], [])]
    assert stand.kept == 0


def test_a_backward_in_two_parts_leaves_all_weights_for_later():
    stand = Stand(3)
    chunk = stand.chunk(LayerSegment(range(3)))
    _, saved = chunk.forward(np.ones(2), TRAINING)
    stand.take_log()
    dx, rests = chunk.backward_input(saved, np.ones(2))
    assert dx.tolist() == [8.0, 8.0] and stand.take_log() == words("input 2, input 1, input 0")
    assert stand.kept == 3
    chunk.backward_weight(rests)
    assert stand.log == words("weight 2, done 2, weight 1, done 1, weight 0, done 0")
    assert stand.kept == 0


PARTS = [LayerSegment(range(1)), LayerSegment(range(1, 3), recomputed=True), LayerSegment(range(3, 4))]


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
        chunk = stand.chunk(LayerSegment(range(3), recomputed))
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
    chunk = stand.chunk(LayerSegment(range(2), recomputed=True))
    chunk.backward(chunk.forward(np.ones(1), TRAINING)[1], np.ones(1), lambda dx: None)
    assert len(inputs) == 2


@pytest.mark.parametrize("parts", [PARTS, [LayerSegment(range(4))]], ids=["recomputed", "kept"])
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
    chunk = stand.chunk(LayerSegment(range(3)))
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
        run_threads(lambda: LayeredEngine(model, Mesh(), recompute=recompute), 1)


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
    assert found == [LayerSegment(range(first, end), recomputed) for first, end, recomputed in expected]
