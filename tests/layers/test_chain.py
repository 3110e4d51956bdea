"""Chains and residual blocks: what travels backwards does so while gradients of weights are made."""

import pytest

from spmd_engine.comm.pending import Deferred, wait_for
from spmd_engine.layers import BatchNorm, Chain, Conv2d, Gather, Layer, ReLU, ResidualBlock
from support.image_layers import IMAGE, Problem, assert_as_one_device, solve


class UnderWay:
    """A value that comes when somebody waits for it, who is told of."""

    def __init__(self, value, tell):
        self.value, self.tell = value, tell

    def wait(self):
        self.tell()
        return self.value


class Logged(Layer):
    """Passes everything on, its input's gradient under way, and says what is done when."""

    def __init__(self, name, events):
        self.name, self.say = name, lambda what: events.append(f"{what} {name}")

    def forward(self, sh, p, x, ctx):
        return x, None

    def backward_input(self, sh, p, saved, dy):
        self.say("begin")
        return Deferred(UnderWay(dy, lambda: self.say("wait")), lambda dy: dy), None

    def backward_weight(self, sh, rest, g):
        self.say("weights")


def backward(layer, *, weights_first):
    """What is done when, in a backward whose input's gradient is waited for after the weights', or before."""
    dx, rest = layer.backward_input(None, {"branch": {}}, [None, None], 1.0)
    if not weights_first:
        dx = wait_for(dx)
    layer.backward_weight(None, rest, {"first": None, "second": None})
    assert wait_for(dx) == 1.0


@pytest.mark.parametrize(
    ("weights_first", "expected"),
    [
        (True, "begin second, weights second, wait second, begin first, weights first, wait first"),
        (False, "begin second, wait second, begin first, wait first, weights second, weights first"),
    ],
)
def test_an_input_gradient_travels_while_the_weights_behind_it_get_theirs(weights_first, expected):
    events = []
    chain = Chain(*((name, Logged(name, events)) for name in ("first", "second")))
    backward(chain, weights_first=weights_first)
    assert ", ".join(events) == expected


# --- blocks whose channels are cut


def block(*, projected, channels=5, hidden=7):
    """As in residual networks: both ways leave their input gradients unreduced over f."""
    out = 6 if projected else channels
    stride = 2 if projected else 1
    half = tuple(-(-length // stride) for length in IMAGE)
    branch = [
        ("conv0", Conv2d(("c", channels), ("f", hidden), IMAGE, 3, stride=stride, padding=1, reduced=False)),
        ("norm0", BatchNorm(("f", hidden))),
        ("relu0", ReLU("bhwf")),
        ("conv1", Conv2d(("f", hidden), ("c", out), half, 3, padding=1)),
        ("norm1", BatchNorm(("c", out))),
    ]
    shortcut = [
        ("conv", Conv2d(("c", channels), ("f", out), IMAGE, 1, stride=2, reduced=False)),
        ("norm", BatchNorm(("f", out))),
        ("gather", Gather("bhwf", "bhwc")),
    ]
    return ResidualBlock(Chain(*branch), Chain(*shortcut) if projected else None, over="f")


CUTS = {
    "model": ({"model": 2}, {"f": ("model",)}),
    "more ranks than channels": ({"model": 8}, {"f": ("model",)}),
    "model, rows, columns": (
        {"model": 3, "rows": 2, "columns": 2},
        {"f": ("model",), "h": ("rows",), "w": ("columns",)},
    ),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("projected", [True, False])
def test_a_block_is_what_it_is_on_one_device(projected, cut):
    assert_as_one_device(Problem(block(projected=projected), 5), CUTS[cut])


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("projected", [True, False])
def test_a_block_sends_its_output_and_one_gradient_and_gathers_the_projection(projected, ranks):
    problem = Problem(block(projected=projected), 5)
    inputs, outputs = 8 * problem.x.size, 8 * problem.dy.size
    sent = sum(sent for _, sent in solve(problem, ({"model": ranks}, {"f": ("model",)})))
    assert sent == (ranks - 1) * (2 * outputs + 2 * inputs + projected * outputs)


def test_a_convolution_of_one_letter_gathers_its_inputs_and_scatters_their_gradient():
    problem = Problem(Conv2d(("f", 5), ("f", 7), IMAGE, 3, padding=1), 5)
    sent = sum(sent for _, sent in solve(problem, ({"model": 3}, {"f": ("model",)})))
    assert sent == 2 * 2 * 8 * problem.x.size
