"""A dense layer with the letters of its caller, so that any of its dims can be sharded."""

from __future__ import annotations

from math import sqrt

from spmd_engine.arrays import einsum
from spmd_engine.arrays.activations import relu
from spmd_engine.arrays.elementwise import kept_where
from spmd_engine.comm.pending import then
from spmd_engine.errors import UsageError, one_of
from spmd_engine.layers.declarations import Activation, Parameter, Sized
from spmd_engine.layers.layer import Layer
from spmd_engine.layers.mlp import ACTIVATIONS


class Linear(Layer):
    """y[b o] = activation(x[b i] · weights[i o] + bias[o]), with the caller's letters i and o

    With i sharded over the mesh axes R and o over C (the rows and columns of a mesh of weights):

    Forward
        1. z[b o/C] {U_R} = x[b i/R] · weights[i/R o/C],      z[b o/C] = AllReduce_R(...)
        2. y[b o/C] = activation(z[b o/C] + bias[o/C])        the bias is added once
    Backward
        3. dz[b o/C] = dy[b o/C] · slope[b o/C]
        4. dx[b i/R] {U_C} = dz[b o/C] · weights[i/R o/C],    dx[b i/R] = AllReduce_C(...)
        5. dweights[i/R o/C] = x[b i/R] · dz[b o/C],          dbias[o/C] = sum over b of dz[b o/C]

    Without R this is column-parallel, without C row-parallel, with both a 2-D mesh of weights. If the input of the
    next layer has the letter o, it has the sharding of y: layers d -> f, f -> d, ... alternate between R and C without
    communication between them. Two options, each the adjoint of the other, join layers with different letters:

    gather_output   y[b o] = AllGather_C(y[b o/C]), replicated; backward, each rank takes its shard of dy
    slice_input     x[b i] is replicated, each rank takes its shard; backward, dx[b i] = AllGather_R(dx[b i/R])

    On a mesh of R x C ranks each sends 2 b o (R-1) / (R C) elements forward, 2 b i (C-1) / (R C) backward, and
    for the options once b o (C-1) / C and b i (R-1) / R. It holds i o / (R C) weights.

    ``inputs`` and ``outputs`` are a letter and its global size each. ``std`` is the standard deviation of the initial
    weights, by default 1 / sqrt(i), times sqrt(2) before an activation (He et al., 2015). ``input_gradient=False``
    omits step 4, for a first layer. ``batch`` is the letter of the samples. Raises UsageError for equal or reserved
    letters and for unknown activations. After Shoeybi et al., "Megatron-LM" (2019), section 3, and, with 2-D weights
    that alternate, Pope et al., "Efficiently scaling transformer inference" (2022), section 3.2.
    """

    def __init__(
        self,
        inputs: Sized,
        outputs: Sized,
        *,
        activation: str | None = None,
        bias: bool = True,
        std: float | None = None,
        slice_input: bool = False,
        gather_output: bool = False,
        input_gradient: bool = True,
        batch: str = "b",
    ) -> None:
        i, o = self.letters = inputs[0], outputs[0]
        if not (len(i) == len(o) == 1 and (i + o).isalpha()) or i == o or {i, o} & {*"bs", batch}:
            raise UsageError(
                f"Linear from {i!r} to {o!r}: take two different letters, neither b nor s (batch and sequence)"
            )
        if activation is not None and activation not in ACTIVATIONS:
            raise UsageError(f"unknown activation {activation!r}; {one_of(activation, ACTIVATIONS)}, or None")
        self.sizes = {i: inputs[1], o: outputs[1]}
        self.may_cut = batch + i + o
        self.activation = ACTIVATIONS[activation] if activation else None
        self.slice_input, self.gather_output, self.input_gradient = slice_input, gather_output, input_gradient
        self.inputs = Activation(f"{batch} {i}", where="inside", whole=i if slice_input else "")
        self.outputs = Activation(f"{batch} {o}", where="inside", whole=o if gather_output else "")
        if std is None:
            std = sqrt((1.0 if activation is None else 2.0) / inputs[1])
        self.parameters = {"weights": Parameter(f"{i} {o}", std=std, summed=batch)}
        if bias:
            self.parameters["bias"] = Parameter(o, decay=False, summed=batch)

    def forward(self, sh, p, x, ctx):
        i, o = self.letters
        if self.slice_input:
            x = x[:, sh.span(i, self.sizes[i])]
        y = sh.all_reduce(einsum(f"b{i},{i}{o}->b{o}", x, p["weights"]), over=i)
        if "bias" in p:
            y += p["bias"]
        slope = None
        if self.activation:
            y, slope = self.activation(y, want_slope=ctx.training and ctx.saving)
        if self.gather_output:
            y = sh.gather_whole(y, self.outputs.dims, o)
        return y, (x, slope)

    def backward_input(self, sh, p, saved, dy):
        i, o = self.letters
        x, slope = saved
        if self.gather_output:
            dy = dy[:, sh.span(o, self.sizes[o])]
        dz = dy if slope is None else dy * slope
        if not self.input_gradient:
            return None, (x, dz)
        dx = sh.start_all_reduce(einsum(f"b{o},{i}{o}->b{i}", dz, p["weights"]), over=o)
        if self.slice_input:
            dx = then(dx, lambda dx: sh.gather_whole(dx, self.inputs.dims, i))
        return dx, (x, dz)

    def backward_weight(self, sh, rest, g):
        i, o = self.letters
        x, dz = rest
        g.einsum("weights", f"b{i},b{o}->{i}{o}", x, dz)
        if "bias" in self.parameters:
            g.einsum("bias", f"b{o}->{o}", dz)


# --- The rectifier as a separate layer, for images


class ReLU(Layer):
    """y = max(x, 0) of x with any ``letters``, such as "bhwc"; its slope at 0 is 0

    Saves one byte per element for the backward: whether it is positive.
    """

    def __init__(self, letters: str = "bhwc") -> None:
        self.inputs = self.outputs = Activation(" ".join(letters), where="inside")
        self.may_cut = letters

    def forward(self, sh, p, x, ctx):
        return relu(x, want_slope=ctx.training and ctx.saving)

    def backward_input(self, sh, p, positive, dy):
        return kept_where(dy, positive), None
