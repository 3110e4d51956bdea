"""A frozen layer whose weights are adapted by products of two thin matrices (LoRA)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import Array
from spmd_engine.layers.declarations import Buffer, Parameter
from spmd_engine.layers.gradients import GradientSums
from spmd_engine.layers.layer import Layer

A, B = "_lora_a", "_lora_b"  #: endings of the names of the two


class Adapted(NamedTuple):
    """A weight: the names of its a and its b, and the letters of its inputs and of its outputs."""

    a: str
    b: str
    into: str
    out: str


class LowRank(Layer):
    """``layer`` with w + scale · a · b in the place of each weight w that is ``adapted``: w[d f], a[d q], b[q f]

    Weights are adapted by groups, in each of which all have the same inputs, and share a: as if they were one weight
    with the outputs of all.

    The weights are buffers: they have no gradient and no optimizer's state, and ZeRO does not cut them. a is cut as
    w's inputs are, b as its outputs. Weights are those of products with d, first or last: the other letters are the
    outputs, or the inputs. The gradient of w is never made: with x and dz of a product, and t = dz · bᵀ, da is xᵀ · t.
    t is unreduced over the outputs' letters, and x · a, of which db is made, over the inputs'.

    b begins as zeros, so that nothing is changed at first. Hu et al., "LoRA" (2021).
    """

    def __init__(
        self, layer: Layer, adapted: Sequence[Sequence[str]] = (), rank: int = 8, scale: float = 1.0
    ) -> None:
        self.layer, self.scale = layer, scale
        self.adapted = {
            name: Adapted(name_of_a(group), name + B, *sides(layer.parameters[name].dims))
            for group in adapted
            for name in group
        }
        self.sizes = {**layer.sizes, "q": rank}
        self.inputs, self.outputs = layer.inputs, layer.outputs
        self.may_cut, self.across, self.attends = layer.may_cut, layer.across, layer.attends
        self.side_outputs = layer.side_outputs
        self.buffers = {**layer.buffers, **{own: _frozen(each) for own, each in layer.parameters.items()}}
        self.parameters = {}
        for name, (a, b, into, out) in self.adapted.items():
            summed = layer.parameters[name].summed
            others = self.parameters[a].summed if a in self.parameters else ""
            std = (3 * prod(layer.sizes[letter] for letter in into)) ** -0.5
            self.parameters[a] = Parameter(" ".join(into + "q"), std=std, summed=_union(others, summed, out))
            self.parameters[b] = Parameter(" ".join("q" + out), summed=_union(summed, into))

    def cost(self, length):
        return self.layer.cost(length)

    def forward(self, sh, p, x, ctx):
        return self.layer.forward(sh, self._adapted(p), x, ctx)

    def backward_input(self, sh, p, saved, dy, *side):
        dx, rest = self.layer.backward_input(sh, self._adapted(p), saved, dy, *side)
        # p may be gone by then
        thin = {name: (p[each.a].copy(), p[each.b].copy()) for name, each in self.adapted.items()}
        return dx, (rest, thin)

    def backward_weight(self, sh, rest, g):
        rest, thin = rest
        if thin:
            self.layer.backward_weight(sh, rest, _OfThin(self, thin, g))

    def _adapted(self, p: Mapping[str, Any]) -> Mapping[str, Any]:
        adapted = dict(p)
        for name, (a, b, into, out) in self.adapted.items():
            change = einsum(f"{into}q,q{out}->{into}{out}", p[a], p[b])
            change *= self.scale
            change += p[name]
            adapted[name] = change
        return adapted


class _OfThin(GradientSums):
    """Takes a frozen layer's products, and adds the gradients of a and b to those of the layer around it."""

    def __init__(self, layer: LowRank, thin: Mapping[str, tuple[Array, Array]], g: GradientSums) -> None:
        self._layer, self._thin, self._g = layer, thin, g

    def __getitem__(self, folder: str) -> GradientSums:
        return _OfThin(self._layer, {}, self._g)  # a norm's: frozen

    def einsum(self, name: str, pattern: str, *operands: Array) -> None:
        if name not in self._thin:
            return
        (a, b), (name_of_own_a, name_of_own_b, into, out) = self._thin[name], self._layer.adapted[name]
        terms = pattern.partition("->")[0].split(",")
        (of_x, x), (of_dz, dz) = sorted(zip(terms, operands, strict=True), key=lambda each: out in each[0])
        shared = "".join(letter for letter in of_x if letter not in into)
        t = einsum(f"{of_dz},q{out}->{shared}q", dz, b)
        t *= self._layer.scale
        self._g.einsum(name_of_own_a, f"{of_x},{shared}q->{into}q", x, t)
        u = einsum(f"{of_x},{into}q->{shared}q", x, a)
        u *= self._layer.scale
        self._g.einsum(name_of_own_b, f"{shared}q,{of_dz}->q{out}", u, dz)

    def add(self, name: str, value: Array) -> None:
        """What is no product is frozen."""


def name_of_a(group: Sequence[str]) -> str:
    """What the a is called that these weights share."""
    return "_".join(group) + A


def sides(dims: str) -> tuple[str, str]:
    """The letters of a weight's inputs and of its outputs."""
    letters = dims.replace(" ", "")
    return ("d", letters[1:]) if letters[0] == "d" else (letters[:-1], "d")


def _frozen(parameter: Parameter) -> Buffer:
    return Buffer(
        parameter.dims,
        _keep,
        initial=parameter.mean,
        where=parameter.where,
        shape=parameter.shape,
        element=parameter.element,
    )


def _keep(before: Array, update: Array) -> Array:
    return before


def _union(*letters: str) -> str:
    return "".join(dict.fromkeys("".join(letters)))
