"""A frozen layer with weights that are adapted by products of two thin matrices (LoRA)."""

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

A, B = "_lora_a", "_lora_b"  #: suffixes of the names of the two matrices
_SIDE_BY_SIDE = re.compile(r"(^|/)shared\d+/$")


class Adapted(NamedTuple):
    """An adapted weight: the names of its a and its b, and the letters of its inputs and of its outputs."""

    a: str
    b: str
    into: str
    out: str


class LowRank(Layer):
    """``layer`` with w + scale · a · b in the place of each weight w in ``adapted``: w[d f], a[d q], b[q f]

    ``adapted`` names the a and the b of each weight. Weights may share an a, as if concatenated along their outputs, or
    a b, as if concatenated along their inputs. Weights in ``doubled`` have twice the rank. The weights of experts are
    adapted expert by expert, on the ranks that hold them.

    The weights are frozen buffers, without gradients and optimizer state. a is sharded as the inputs of w, b as its
    outputs. A weight has the letter d first or last: its other letters are the outputs, or the inputs. The gradient of
    w is never computed: with x and dz of a product, and t = dz · bᵀ, da is xᵀ · t. t is unreduced over the outputs'
    letters, and x · a, which gives db, over the inputs'.

    b is 0 at first, so that the layer is unchanged. Hu et al., "LoRA" (2021).
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
        self.buffers = {**layer.buffers, **{name: _frozen(parameter) for name, parameter in layer.parameters.items()}}
        self.parameters = {}
        with_b = Counter(weight.b for weight in self.adapted.values())
        for name, (a, b, into, out) in self.adapted.items():
            weight = layer.parameters[name]
            std = (3 * with_b[b] * prod(layer.sizes[letter] for letter in into)) ** -0.5
            q = "Q" if name in doubled else "q"
            for key, dims, deviation, summed in ((a, into + q, std, out), (b, q + out, 0.0, into)):
                others = self.parameters[key].summed if key in self.parameters else ""
                self.parameters[key] = Parameter(
                    " ".join(dims), std=deviation, summed=_union(others, weight.summed, summed), element=weight.element
                )

    def cost(self, length):
        return self.layer.cost(length)

    def forward(self, sh, p, x, ctx):
        return self.layer.forward(sh, _AdaptedArrays(self, p), x, ctx)

    def backward_input(self, sh, p, saved, dy, *side):
        dx, rest = self.layer.backward_input(sh, _AdaptedArrays(self, p), saved, dy, *side)
        # p may be freed before backward_weight
        factors = {name: (_lookup(p, weight.a), _lookup(p, weight.b)) for name, weight in self.adapted.items()}
        thin = {name: (a.copy(), b.copy()) for name, (a, b) in factors.items() if a is not None and b is not None}
        return dx, (rest, thin)

    def backward_weight(self, sh, rest, g):
        rest, thin = rest
        if thin:
            self.layer.backward_weight(sh, rest, _FactorGradients(self, thin, g))


class _AdaptedArrays(Mapping):
    """A layer's arrays; an adapted weight is computed on access, so that only one exists at a time."""

    def __init__(self, layer: LowRank, p: Mapping[str, Any], folder: str = "") -> None:
        self._layer, self._p, self._folder = layer, p, folder
        self._node = p if not folder else _lookup(p, folder.rstrip("/"))

    def __getitem__(self, name: str) -> Any:
        value, full = self._node[name], self._folder + name
        if isinstance(value, Mapping):
            return _AdaptedArrays(self._layer, self._p, f"{full}/")
        if full not in self._layer.adapted:
            return value
        a, b, into, out = self._layer.adapted[full]
        change = einsum(f"{into}q,q{out}->{into}{out}", _lookup(self._p, a), _lookup(self._p, b))
        change *= self._layer.scale
        change += value
        return change

    def __iter__(self) -> Iterator[str]:
        return iter(self._node)

    def __len__(self) -> int:
        return len(self._node)


class _FactorGradients(GradientSums):
    """Takes the products that give a frozen layer's gradients, and adds the gradients of a and b to ``g``."""

    def __init__(
        self, layer: LowRank, thin: Mapping[str, tuple[Array, Array]], g: GradientSums, folder: str = ""
    ) -> None:
        self._layer, self._thin, self._g, self._folder = layer, thin, g, folder

    def __getitem__(self, folder: str) -> GradientSums:
        return _FactorGradients(self._layer, self._thin, self._g, f"{self._folder}{folder}/")

    def einsum(self, name: str, pattern: str, *operands: Array) -> None:
        name = self._folder + name
        if name not in self._thin:
            return
        (a, b), (a_name, b_name, into, out) = self._thin[name], self._layer.adapted[name]
        terms = pattern.partition("->")[0].split(",")
        (x_term, x), (dz_term, dz) = sorted(zip(terms, operands, strict=True), key=lambda operand: out in operand[0])
        shared = "".join(letter for letter in x_term if letter not in into)
        t = einsum(f"{dz_term},q{out}->{shared}q", dz, b)
        t *= self._layer.scale
        self._g.einsum(a_name, f"{x_term},{shared}q->{into}q", x, t)
        u = einsum(f"{x_term},{into}q->{shared}q", x, a)
        u *= self._layer.scale
        self._g.einsum(b_name, f"{shared}q,{dz_term}->q{out}", u, dz)

    def add(self, name: str, value: Array) -> None:
        """Ignore gradients that are not products: these weights are frozen."""

    def untouched(self, names: Iterable[str]) -> list[str]:
        """None: frozen weights need no gradient."""
        return []


def names_of_adapter(name: str, group: Sequence[str], dims: str) -> tuple[str, str]:
    """The names of the a and the b of a weight with these dims, if the weights of a ``group`` share an a.

    Shared experts, which other libraries concatenate in one weight, share an a if they have the same inputs, and a b if
    they have the same outputs: ``shared2/gate`` has the a of ``shared/gate``.
    """
    folder, slash, weight = name.rpartition("/")
    path, merged_path = folder + slash, _SIDE_BY_SIDE.sub(r"\1shared/", folder + slash)
    a_folder, b_folder = (merged_path, path) if sides(dims)[0] == "d" else (path, merged_path)
    return a_folder + "_".join(group) + A, b_folder + weight + B


def _lookup(p: Mapping[str, Any], path: str) -> Any:
    """The entry at a path; None if there is none, as for experts on other ranks."""
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
