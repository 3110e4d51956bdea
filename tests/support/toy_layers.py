"""Layers that record their calls, and stand-ins for parameters and reducer."""

import weakref

import numpy as np

from spmd_engine.engine.pipeline import Chunk, Execution
from spmd_engine.layers import Activation
from spmd_engine.layers.layer import ForwardContext, Layer

TRAINING, SERVING = (ForwardContext(None, None, training=training) for training in (True, False))


class Box:
    """What a layer saves of a micro-batch; weak references to it show how long it is kept."""

    def __init__(self, number, x):
        self.number, self.x = number, x


class Toy(Layer):
    """y = 2 x + the number of the layer. Records its calls."""

    inputs = outputs = Activation("b")

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


class Named(str):
    """A stand-in for the shards of a layer."""

    @property
    def checked(self):
        return set()


class Stand:
    """Toy layers, and stand-ins for their parameters and reducer."""

    def __init__(self, count):
        self.log, self.opened, self._kept = [], [], []
        self.layers = [(f"layer{n}", Toy(n, self)) for n in range(count)]
        self.shards = [Named(f"shards {n}") for n in range(count)]

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

    # like Unsharder

    def unshard(self, number, *, keep=(), prefetch=()):
        self.opened.append((number, list(keep), list(prefetch)))
        return f"parameters {number}"

    # like Reducer

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


def execution_of(stand, neighbours, chunks, micro_batches=1, lose=lambda m, y: y):
    inputs = [np.full(1, 1.0 + m) for m in range(micro_batches)]
    return Execution(chunks, neighbours, [TRAINING] * micro_batches, inputs, lose)
