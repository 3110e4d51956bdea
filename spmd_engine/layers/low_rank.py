"""A frozen layer whose weights are adapted by products of two thin matrices (LoRA)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import Array
from spmd_engine.layers.declarations import Buffer, Parameter
from spmd_engine.layers.layer import GradientSums, Layer

A, B = "_lora_a", "_lora_b"  #: endings of the names of the two
_SIDE_BY_SIDE = re.compile(r"(^|/)shared\d+/$")


class Adapted(NamedTuple):
    """A weight: the names of its a and its b, and the letters of its inputs and of its outputs."""

    a: str
    b: str
    into: str
    out: str


class LowRank(Layer):
    """``layer`` with w + scale · a · b in the place of each weight w that is ``adapted``: w[d f], a[d q], b[q f]

    ``adapted`` names the a and the b of each. Weights may share an a, as if they were one with the outputs of all, or
    a b, as if they were one with the inputs of all. What is ``doubled`` has twice the rank. Those of experts are
    adapted expert by expert, each where it is.

    The weights are frozen buffers: they have no gradient and no optimizer's state. a is sharded as the inputs of w, b
    as its outputs. Weights are those of products with d, first or last: the other letters are the outputs, or the
    inputs. The gradient of w is never made: with x and dz of a product, and t = dz · bᵀ, da is xᵀ · t. t is unreduced
    over the outputs' letters, and x · a, of which db is made, over the inputs'.

    b begins as zeros, so that nothing is changed at first. Hu et al., "LoRA" (2021).
    """

    def __init__(
        self, layer: Layer, adapted: Mapping[str, tuple[str, str]] = MappingProxyType({}), rank: int = 8,
        scale: float = 1.0, doubled: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.layer, self.scale = layer, scale
        self.adapted = {name: Adapted(a, b, *sides(layer.parameters[name].dims)) for name, (a, b) in adapted.items()}
        self.sizes = {**layer.sizes, "q": rank, **({"Q": 2 * rank} if doubled else {})}
        self.inputs, self.outputs = layer.inputs, layer.outputs
        self.may_cut, self.across, self.attends = layer.may_cut, layer.across, layer.attends
        self.side_outputs = layer.side_outputs
        self.buffers = {**layer.buffers, **{own: _frozen(parameter) for own, parameter in layer.parameters.items()}}
        self.parameters = {}
        with_b = Counter(weight.b for weight in self.adapted.values())
        for name, (a, b, into, out) in self.adapted.items():
            weight = layer.parameters[name]
            std = (3 * with_b[b] * prod(layer.sizes[letter] for letter in into)) ** -0.5
            q = "Q" if name in doubled else "q"
            for own, dims, deviation, summed in ((a, into + q, std, out), (b, q + out, 0.0, into)):
                others = self.parameters[own].summed if own in self.parameters else ""
                self.parameters[own] = Parameter(
                    " ".join(dims), std=deviation, summed=_union(others, weight.summed, summed), element=weight.element
                )

    def cost(self, length):
        return self.layer.cost(length)

    def forward(self, sh, p, x, ctx):
        return self.layer.forward(sh, _AdaptedArrays(self, p), x, ctx)

    def backward_input(self, sh, p, saved, dy, *side):
        dx, rest = self.layer.backward_input(sh, _AdaptedArrays(self, p), saved, dy, *side)
        # p may be gone by then
        here = {name: (_at(p, weight.a), _at(p, weight.b)) for name, weight in self.adapted.items()}
        thin = {name: (a.copy(), b.copy()) for name, (a, b) in here.items() if a is not None and b is not None}
        return dx, (rest, thin)

    def backward_weight(self, sh, rest, g):
        rest, thin = rest
        if thin:
            self.layer.backward_weight(sh, rest, _OfThin(self, thin, g))


class _AdaptedArrays(Mapping):
    """A layer's arrays; an adapted weight is computed on access, so that one exists at a time."""

    def __init__(self, layer: LowRank, p: Mapping[str, Any], folder: str = "") -> None:
        self._layer, self._p, self._folder = layer, p, folder
        self._node = p if not folder else _at(p, folder.rstrip("/"))

    def __getitem__(self, name: str) -> Any:
        value, full = self._node[name], self._folder + name
        if isinstance(value, Mapping):
            return _AdaptedArrays(self._layer, self._p, f"{full}/")
        if full not in self._layer.adapted:
            return value
        a, b, into, out = self._layer.adapted[full]
        change = einsum(f"{into}q,q{out}->{into}{out}", _at(self._p, a), _at(self._p, b))
        change *= self._layer.scale
        change += value
        return change

    def __iter__(self) -> Iterator[str]:
        return iter(self._node)

    def __len__(self) -> int:
        return len(self._node)


class _OfThin(GradientSums):
    """Takes a frozen layer's products, and adds the gradients of a and b to those of the layer around it."""

    def __init__(
        self, layer: LowRank, thin: Mapping[str, tuple[Array, Array]], g: GradientSums, folder: str = ""
    ) -> None:
        self._layer, self._thin, self._g, self._folder = layer, thin, g, folder

    def __getitem__(self, folder: str) -> GradientSums:
        return _OfThin(self._layer, self._thin, self._g, f"{self._folder}{folder}/")

    def einsum(self, name: str, pattern: str, *operands: Array) -> None:
        name = self._folder + name
        if name not in self._thin:
            return
        (a, b), (name_of_own_a, name_of_own_b, into, out) = self._thin[name], self._layer.adapted[name]
        terms = pattern.partition("->")[0].split(",")
        (of_x, x), (of_dz, dz) = sorted(zip(terms, operands, strict=True), key=lambda operand: out in operand[0])
        shared = "".join(letter for letter in of_x if letter not in into)
        t = einsum(f"{of_dz},q{out}->{shared}q", dz, b)
        t *= self._layer.scale
        self._g.einsum(name_of_own_a, f"{of_x},{shared}q->{into}q", x, t)
        u = einsum(f"{of_x},{into}q->{shared}q", x, a)
        u *= self._layer.scale
        self._g.einsum(name_of_own_b, f"{shared}q,{of_dz}->q{out}", u, dz)

    def add(self, name: str, value: Array) -> None:
        """What is no product is frozen."""

    def untouched(self, names: Iterable[str]) -> list[str]:
        """What is frozen needs no gradient."""
        return []


def names_of_adapter(name: str, group: Sequence[str], dims: str) -> tuple[str, str]:
    """What the a and the b of a weight of these dims are called, if weights of this ``group`` share an a.

    Of experts for all tokens, which lie side by side in one weight of others, those with the same inputs share an a,
    and those with the same outputs a b: ``shared2/gate`` has the a of ``shared/gate``.
    """
    folder, slash, own = name.rpartition("/")
    path, together = folder + slash, _SIDE_BY_SIDE.sub(r"\1shared/", folder + slash)
    of_a, of_b = (together, path) if sides(dims)[0] == "d" else (path, together)
    return of_a + "_".join(group) + A, of_b + own + B


def _at(p: Mapping[str, Any], path: str) -> Any:
    """What stands there; None where nothing does, as of experts on other ranks."""
    for name in path.split("/"):
        if name not in p:
            return None
        p = p[name]
    return p


def sides(dims: str) -> tuple[str, str]:
    """The letters of a weight's inputs and of its outputs."""
    letters = dims.replace(" ", "")
    return ("d", letters[1:]) if letters[0] == "d" else (letters[:-1], "d")


def _frozen(parameter: Parameter) -> Buffer:
    same = {name: getattr(parameter, name) for name in ("where", "shape", "element", "summed", "std")}
    return Buffer(parameter.dims, _keep, initial=parameter.mean, frozen=True, **same)


def _keep(before: Array, update: Array) -> Array:
    return before


def _union(*letters: str) -> str:
    return "".join(dict.fromkeys("".join(letters)))
