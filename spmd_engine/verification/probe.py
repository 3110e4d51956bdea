"""Records outputs of layers and their gradients during a step of an engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.notation import Spec
from spmd_engine.comm.pending import wait_for
from spmd_engine.engine import Batch, LayeredEngine, ShardedEngine
from spmd_engine.engine.definition import Loss
from spmd_engine.errors import UsageError, one_of
from spmd_engine.layers import Activation, Layer
from spmd_engine.verification.comparison import Index, LocalPart, on_host

OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT = "output", "gradient of the outputs", "input gradient"
Place = Callable[[tuple[int, ...]], Index]  # the shape of a global array -> the index of this rank's part


@dataclass(frozen=True)
class ProbePoint:
    """The point of a step at which an array is recorded."""

    kind: str
    layer: str  #: empty: the whole engine
    micro_batch: int


@dataclass(frozen=True)
class Probed:
    """An array recorded on this rank."""

    array: Array
    place: Place
    base: Array | None = None

    def part(self, shape: tuple[int, ...]) -> LocalPart | None:
        """Return the array as part of a global array of this shape; None if its own shape does not fit."""
        if len(shape) != self.array.ndim:
            return None
        index = self.place(shape)
        lengths = tuple(len(np.arange(n)[places]) for n, places in zip(shape, index, strict=True))
        return LocalPart(self.array, index, base=self.base) if lengths == self.array.shape else None


class Probe:
    """Runs a step of an engine and records outputs, their gradients and the last micro-batch's input gradient."""

    layers: Sequence[str] = ("",)  #: in the order of the forward

    def __init__(self, engine: ShardedEngine) -> None:
        self.engine = engine
        self.probed: dict[ProbePoint, Probed] = {}

    def layer_of(self, parameter: str) -> str:
        """Return the one of ``layers`` that has a parameter."""
        return ""

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        """Run the engine's step and return its loss."""
        value = self._probed_step(batch, loss)
        if (dx := self.engine.input_gradient) is not None:
            point = ProbePoint(INPUT_GRADIENT, "", len(batch.micro_batches) - 1)
            self.probed[point] = Probed(dx, partial(_index_in_sharding, self.engine, self.engine.input_sharding))
        return value

    def _probed_step(self, batch: Batch, loss: Loss | None) -> float:
        self.probed.clear()
        return self.engine.step(batch, partial(self._probed_loss, batch, loss or self.engine.loss))

    def _probed_loss(
        self, batch: Batch, loss: Loss, outputs: Array, targets: Array, **options: Any
    ) -> tuple[float, Array]:
        m = next(m for m, micro in enumerate(batch.micro_batches) if micro.targets is targets)
        place = self._place_of_outputs()
        # Copies, since the loss may overwrite its arguments.
        self.probed[ProbePoint(OUTPUT, self.layers[-1], m)] = Probed(outputs.copy(), place)
        value, gradient = loss(outputs, targets, **options)
        self.probed[ProbePoint(OUTPUT_GRADIENT, self.layers[-1], m)] = Probed(gradient.copy(), place)
        return value, gradient

    def _place_of_outputs(self) -> Place:
        return partial(_index_in_sharding, self.engine, self.engine.output_sharding)


class LayeredProbe(Probe):
    """Records the output and the input gradient of each layer on this rank."""

    engine: LayeredEngine

    def __init__(self, engine: LayeredEngine) -> None:
        super().__init__(engine)
        self.layers = [name for name, _ in engine.model.layers]

    def layer_of(self, parameter: str) -> str:
        return max((layer for layer in self.layers if parameter.startswith(f"{layer}/")), key=len)

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        with self.engine.wrapped(partial(ProbedLayer, self)):
            return self._probed_step(batch, loss)

    def take(self, point: ProbePoint, array: Array, declared: Activation, base: Array) -> None:
        """Record a layer's result for input ``base``. Raises UsageError if its dims differ from the declaration."""
        if (point.kind, point.layer) == (OUTPUT, self.layers[-1]):
            return  # _probed_loss records these, since the loss may overwrite them
        if len(declared.dims.split()) != array.ndim:
            raise UsageError(
                f"layer {point.layer}: the {point.kind} has shape {array.shape}, but the layer declares "
                f'[{declared.dims}]; set inputs = Activation("...") and outputs = Activation("...") in its class'
            )
        probed = Probed(array, partial(self._index_of, declared), base if base.shape == array.shape else None)
        self.probed.setdefault(point, probed)  # a recomputed array arrives again

    def _place_of_outputs(self) -> Place:
        return partial(self._index_of, Activation(self.engine.model.outputs, where="inside"))

    def _index_of(self, declared: Activation, shape: tuple[int, ...]) -> Index:
        layout, mesh = self.engine.layout, self.engine.mesh

        def places(letter: str, length: int) -> slice | np.ndarray:
            if letter in declared.whole:
                return slice(0, length)
            local = layout.positions(length, mesh, declared.where, letter)
            if letter in layout.zigzag:
                return local
            return slice(int(local[0]), int(local[-1]) + 1) if local.size else slice(0, 0)  # they are consecutive

        return tuple(map(places, declared.dims.split(), shape))


class ProbedLayer(Layer):
    """A layer that passes its results to a probe."""

    def __init__(self, probe: LayeredProbe, name: str, layer: Layer) -> None:
        self._probe, self._name, self._layer = probe, name, layer

    def forward(self, sh, p, x, ctx):
        y, saved, *extra = self._layer.forward(sh, p, x, ctx)
        self._probe.take(ProbePoint(OUTPUT, self._name, ctx.micro_batch), y, self._layer.outputs, x)
        return y, (ctx.micro_batch, saved), *extra

    def backward_input(self, sh, p, saved, dy, *side):
        m, saved = saved
        dx, rest = self._layer.backward_input(sh, p, saved, dy, *side)
        if (dx := wait_for(dx)) is not None:
            self._probe.take(ProbePoint(INPUT_GRADIENT, self._name, m), dx, self._layer.inputs, dy)
        return dx, rest

    def backward_weight(self, sh, rest, g):
        self._layer.backward_weight(sh, rest, g)


def _index_in_sharding(engine: ShardedEngine, sharding: str, shape: tuple[int, ...]) -> Index:
    return Spec.parse(sharding).block(shape, engine.mesh) if sharding else (slice(None),) * len(shape)


def probe(engine: ShardedEngine) -> Probe:
    """Return a probe for the engine; an engine with named layers is probed layer by layer."""
    return LayeredProbe(engine) if isinstance(engine, LayeredEngine) else Probe(engine)


# --- Activations of an imported model, compared with those of another program

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
