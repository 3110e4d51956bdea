"""A model beside activations that another program made: which layer is the first whose output differs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from spmd_engine.arrays.backend import backend_of
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import UsageError, one_of
from spmd_engine.layers import Layer

INPUTS = "tokens"
_HIDDEN = re.compile(r"hidden_states\.(\d+)")


@dataclass(frozen=True)
class LayerDistance:
    """How far a layer's output is from its reference."""

    layer: str
    distance: float  #: the largest difference, relative to the reference's largest element
    place: tuple[int, int] | None  #: sample and position of the first token that is off; None: none is


def compare_activations(
    engine: LayeredEngine, reference: Mapping[str, np.ndarray], tolerance: float
) -> list[LayerDistance]:
    """Distances of the layers of which ``reference`` has the outputs for ``tokens``[b s], in the order of the forward.

    Arrays are called as layers are, or, as transformers does it, ``hidden_states.N``, after N blocks (the last after
    the final norm), and ``logits``. Every rank compares its own block. Collective. Raises UsageError for arrays that
    are no layer's, or of another shape than its output.
    """
    if INPUTS not in reference:
        raise UsageError(f"the reference has no array {INPUTS!r}; it has: {', '.join(sorted(reference))}")
    names = [name for name, _ in engine.model.layers]
    expected = {_layer(name, names): array for name, array in reference.items() if name != INPUTS}
    if not expected:
        raise UsageError(f"the reference has nothing but {INPUTS!r}: name arrays as layers are, {names[0]}, {names[1]}")
    found: dict[str, tuple[float, int]] = {}
    tokens = reference[INPUTS]
    (x,) = engine.cut_rows(tokens[engine.batch_span(len(tokens))], None)[:1]
    with engine.inference(), engine.wrapped(partial(_Compared, engine, expected, tolerance, found)):
        engine.forward(np.ascontiguousarray(x))
    compared = [name for name in names if name in expected]
    return _of_all_ranks(engine, compared, found, expected, tokens.shape[1])


def _of_all_ranks(
    engine: LayeredEngine,
    names: Sequence[str],
    found: Mapping[str, tuple[float, int]],
    expected: Mapping[str, np.ndarray],
    length: int,
) -> list[LayerDistance]:
    never = np.iinfo(np.int64).max
    mine = [found.get(name, (0.0, never)) for name in names]
    group = engine.group()
    furthest = group.all_reduce(np.array([distance for distance, _ in mine]), "max", label="verify")
    firsts = group.all_reduce(np.array([first for _, first in mine]), "min", label="verify")
    distances = []
    for name, distance, first in zip(names, furthest.tolist(), firsts.tolist(), strict=True):
        scale = float(abs(expected[name]).max()) or 1.0
        place = None if first == never else divmod(first, length)
        distances.append(LayerDistance(name, distance / scale, place))
    return distances


def _layer(name: str, names: Sequence[str]) -> str:
    """The layer that an array is the output of."""
    if name == "logits":
        return names[-1]
    if (hidden := _HIDDEN.fullmatch(name)) is not None:
        number = int(hidden[1])
        ends = [each for each in names if each.startswith(f"block{number - 1}/")]
        blocks = max(int(each[5 : each.index("/")]) for each in names if each.startswith("block")) + 1
        if number == 0:
            return names[next(at for at, each in enumerate(names) if each.startswith("block0/")) - 1]
        if number <= blocks:
            return ends[-1] if number < blocks else "norm"
    if name not in names:
        raise UsageError(f"the reference has {name!r}, which no layer is called; {one_of(name, names)}")
    return name


class _Compared(Layer):
    """A layer whose output is compared with the reference's, on this rank."""

    def __init__(
        self,
        engine: LayeredEngine,
        expected: Mapping[str, np.ndarray],
        tolerance: float,
        found: dict[str, tuple[float, int]],
        name: str,
        layer: Layer,
    ) -> None:
        self._engine, self._expected, self._tolerance, self._found = engine, expected, tolerance, found
        self._name, self._layer = name, layer

    def forward(self, sh, p, x, ctx):
        y, *rest = self._layer.forward(sh, p, x, ctx)
        if self._name in self._expected:
            self._compare(backend_of(y).to_host(y))
        return y, *rest

    def _compare(self, y: np.ndarray) -> None:
        whole, declared = self._expected[self._name], self._layer.outputs
        layout, mesh, letters = self._engine.layout, self._engine.mesh, declared.dims.split()
        if whole.ndim != len(letters):
            raise UsageError(f"the reference has {self._name} of shape {whole.shape}, its output is [{declared.dims}]")
        places = [
            layout.positions(length, mesh, declared.where, letter)
            for letter, length in zip(letters, whole.shape, strict=True)
        ]
        if tuple(map(len, places)) != y.shape:
            raise UsageError(f"the reference has {self._name} of shape {whole.shape}: other samples, lengths or widths")
        expected = whole[np.ix_(*places)]
        difference = abs(y.astype(np.float64) - expected)
        never = np.iinfo(np.int64).max
        furthest, first = 0.0, never
        if difference.size:
            furthest = float(np.nan_to_num(difference, nan=np.inf).max())
            off = ~(difference <= self._tolerance * (abs(whole).max() or 1.0)).all(axis=2)
            if off.any():
                numbers = places[0][:, None] * whole.shape[1] + places[1]
                first = int(numbers[off].min())
        self._found[self._name] = furthest, first

    def backward_input(self, sh, p, saved, dy, *side):
        return self._layer.backward_input(sh, p, saved, dy, *side)

    def backward_weight(self, sh, rest, g):
        self._layer.backward_weight(sh, rest, g)
