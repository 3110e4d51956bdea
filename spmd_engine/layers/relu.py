"""The rectifier as a layer of its own, on images."""

from spmd_engine.arrays.backend import backend_of
from spmd_engine.layers.declarations import Activation
from spmd_engine.layers.layer import Layer


class ReLU(Layer):
    """y = max(x, 0) of x with any ``letters``, such as "bhwc"; its slope at 0 is 0

    Keeps a byte an element for the backward: whether it is positive.
    """

    def __init__(self, letters: str = "bhwc") -> None:
        self.inputs = self.outputs = Activation(" ".join(letters), where="inside")
        self.may_cut = letters

    def forward(self, sh, p, x, ctx):
        return backend_of(x).xp.maximum(x, 0), x > 0 if ctx.training and ctx.saving else None

    def backward_input(self, sh, p, positive, dy):
        return dy * positive, None
