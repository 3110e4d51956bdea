"""Compares a model's activations with those of another program, to find the first layer whose output differs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.engine.layered import LayeredEngine
from spmd_engine.errors import UsageError, one_of
from spmd_engine.layers import Activation
from spmd_engine.verification.comparison import on_host
from spmd_engine.verification.probe import OUTPUT, LayeredProbe, Probed, ProbedLayer, ProbePoint

INPUTS = "tokens"
NEVER = np.iinfo(np.int64).max  # the number of the first differing token, if no token differs
_HIDDEN = re.compile(r"hidden_states\.(\d+)")


@dataclass(frozen=True)
class LayerDistance:
    """How far a layer's output is from its reference."""

    layer: str
    distance: float  #: the largest difference, relative to the reference's largest element
    place: tuple[int, int] | None  #: sample and position of the first differing token; None: no token differs


def compare_activations(
    engine: LayeredEngine, reference: Mapping[str, np.ndarray], tolerance: float
) -> list[LayerDistance]:
    """Return the distances of the layers whose outputs ``reference`` has for its ``tokens``[b s], in forward order.

    Arrays have the names of layers or those of transformers: ``hidden_states.N`` after N blocks (the last one after
    the final norm), and ``logits``. Every rank compares its own block. Collective. Raises UsageError for an array that
    belongs to no layer, or whose shape is not that of the layer's output.
    """
    if INPUTS not in reference:
        raise UsageError(f"the reference has no array {INPUTS!r}; it has: {', '.join(sorted(reference))}")
    names = [name for name, _ in engine.model.layers]
    expected = {_layer(name, names): array for name, array in reference.items() if name != INPUTS}
    if not expected:
        raise UsageError(f"the reference has only {INPUTS!r}; add arrays named like layers: {names[0]}, {names[1]}")
    tokens, comparison = reference[INPUTS], _Comparison(engine, expected, tolerance)
    (x,) = engine.cut_rows(tokens[engine.batch_span(len(tokens))], None)[:1]
    with engine.inference(), engine.wrapped(partial(ProbedLayer, comparison)):
        engine.forward(np.ascontiguousarray(x))
    compared = [name for name in names if name in expected]
    local = [comparison.distances.get(name, (0.0, NEVER)) for name in compared]
    group = engine.group()
    furthest = group.all_reduce(np.array([distance for distance, _ in local]), "max", label="verify")
    firsts = group.all_reduce(np.array([first for _, first in local]), "min", label="verify")
    distances = []
    for name, distance, first in zip(compared, furthest.tolist(), firsts.tolist(), strict=True):
        place = None if first == NEVER else divmod(first, tokens.shape[1])
        distances.append(LayerDistance(name, distance / (float(abs(expected[name]).max()) or 1.0), place))
    return distances


def _layer(name: str, names: Sequence[str]) -> str:
    """Return the layer whose output an array is."""
    if name == "logits":
        return names[-1]
    if (hidden := _HIDDEN.fullmatch(name)) is not None:
        number = int(hidden[1])
        block_layers = [layer for layer in names if layer.startswith(f"block{number - 1}/")]
        blocks = max(int(layer[5 : layer.index("/")]) for layer in names if layer.startswith("block")) + 1
        if number == 0:
            return names[next(at for at, layer in enumerate(names) if layer.startswith("block0/")) - 1]
        if number <= blocks:
            return block_layers[-1] if number < blocks else "norm"
    if name not in names:
        raise UsageError(f"the reference has {name!r}, which no layer is called; {one_of(name, names)}")
    return name


class _Comparison(LayeredProbe):
    """Compares the outputs of layers with the reference on this rank."""

    def __init__(self, engine: LayeredEngine, expected: Mapping[str, np.ndarray], tolerance: float) -> None:
        super().__init__(engine)
        self._expected, self._tolerance = expected, tolerance
        self.distances: dict[str, tuple[float, int]] = {}  #: largest difference, number of the first differing token

    def take(self, point: ProbePoint, array: Array, declared: Activation, base: Array) -> None:
        """Compare an output with its shard of the reference."""
        if point.kind != OUTPUT or point.layer not in self._expected:
            return
        expected = self._expected[point.layer]
        part = Probed(on_host(array), partial(self._index_of, declared)).part(expected.shape)
        if part is None:
            raise UsageError(
                f"the reference has {point.layer} of shape {expected.shape} for [{declared.dims}]: the output has "
                "other lengths or widths"
            )
        difference = abs(part.found.astype(np.float64) - expected[part.index])
        furthest, first = 0.0, NEVER
        if difference.size:
            furthest = float(np.nan_to_num(difference, nan=np.inf).max())
            off = ~(difference <= self._tolerance * (abs(expected).max() or 1.0)).all(axis=2)
            if off.any():
                numbers = np.arange(expected.shape[0] * expected.shape[1]).reshape(expected.shape[:2])
                first = int(numbers[part.index[:2]][off].min())
        self.distances[point.layer] = furthest, first
