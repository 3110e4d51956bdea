"""Layers that run one after the other on a rank: their forward and backward for one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from spmd_engine.arrays.backend import Array
from spmd_engine.engine.gathering import OpenParameters
from spmd_engine.engine.reducer import Reducer
from spmd_engine.layers.layer import At, Layer
from spmd_engine.sharding.shards import Shards


@dataclass(frozen=True)
class Segment:
    """Neighbours among the layers of a chunk: if ``recomputed``, a forward keeps only what goes into them."""

    layers: range
    recomputed: bool = False


@dataclass
class Saved:
    """What a forward of a segment leaves for its backward."""

    at: At
    x: Array | None  #: what went in, if the forward is to be repeated
    of_layers: list[Any]  #: what each layer saved, if not


class Chunk:
    """Consecutive layers of a model, with everything that one pass through them needs."""

    def __init__(
        self,
        segments: Sequence[Segment],
        layers: Sequence[tuple[str, Layer]],
        shards: Sequence[Shards],
        parameters: OpenParameters,
        reducer: Reducer,
    ) -> None:
        self._segments, self._layers, self._shards = segments, layers, shards
        self._parameters, self._reducer = parameters, reducer
        self._numbers = [number for segment in segments for number in segment.layers]

    @contextmanager
    def watched(self, watch: Callable[[str, Layer], Layer]) -> Iterator[None]:
        """Meanwhile ``watch(name, layer)`` takes the place of each layer."""
        layers, self._layers = self._layers, [(name, watch(name, layer)) for name, layer in self._layers]
        try:
            yield
        finally:
            self._layers = layers

    def forward(self, x: Array, at: At) -> tuple[Array, list[Saved]]:
        """The output, and what the backward needs."""
        saved = []
        for segment in self._segments:
            again = segment.recomputed and at.training
            kept = Saved(at, x if again else None, [])
            x = self._forward(segment, x, replace(at, saving=False) if again else at, None if again else kept)
            saved.append(kept)
        return x, saved

    def _forward(self, segment: Segment, x: Array, at: At, kept: Saved | None) -> Array:
        for number in segment.layers:
            p = self._parameters.open(number, ahead=self._after(number))
            x, saved = self._layers[number][1].forward(self._shards[number], p, x, at)
            if kept is not None and at.training:
                kept.of_layers.append(saved)
        return x

    def backward(self, saved: list[Saved], dy: Array, on_input_gradient: Callable[[Any], None]) -> None:
        """Both parts of the backward, layer by layer: the weights' gradients while what they need is at hand.

        ``on_input_gradient`` is told the input's gradient as soon as it is known, since somebody may be waiting
        for it, while nobody waits for the first layer's weights.
        """
        layers = self._backward_input(saved, dy)
        del dy  # only they need it, and not for long
        for number, dx, rest in layers:
            if number == self._numbers[0]:
                on_input_gradient(dx)
            self._backward_weight(number, rest)
            del rest  # before the next layer makes its own

    def backward_input(self, saved: list[Saved], dy: Array) -> tuple[Any, list[tuple[int, Any]]]:
        """The input's gradient, and what ``backward_weight`` needs."""
        rests, dx = [], None
        for number, dx, rest in self._backward_input(saved, dy):  # noqa: B007 (the last one is the input's)
            rests.append((number, rest))
        return dx, rests

    def backward_weight(self, rests: list[tuple[int, Any]]) -> None:
        """The gradients of the weights, in the order of the backward."""
        while rests:
            self._backward_weight(*rests.pop(0))

    def _backward_input(self, saved: list[Saved], dy: Array) -> Iterator[tuple[int, Any, Any]]:
        for segment in reversed(self._segments):
            kept = saved.pop()
            keep: Sequence[int] = ()
            if kept.x is not None:
                keep = segment.layers  # what the forward gathers now, the backward uses at once
                again = Saved(kept.at, None, [])
                self._repeat(segment, kept, again)
                kept = again
            for number in reversed(segment.layers):
                p = self._parameters.open(number, keep=keep, ahead=self._before(number))
                dy, rest = self._layers[number][1].backward_input(
                    self._shards[number], p, kept.of_layers.pop(), dy
                )
                yield number, dy, rest
                del rest

    def _repeat(self, segment: Segment, kept: Saved, again: Saved) -> None:
        x, kept.x = kept.x, None
        for number in segment.layers:
            p = self._parameters.open(number, keep=segment.layers, ahead=self._before(segment.layers[0]))
            x, saved = self._layers[number][1].forward(self._shards[number], p, x, kept.at)
            again.of_layers.append(saved)

    def _backward_weight(self, number: int, rest: Any) -> None:
        self._layers[number][1].backward_weight(self._shards[number], rest, self._reducer.sums(number))
        self._reducer.layer_done(number)

    def _after(self, number: int) -> range:
        return range(number + 1, self._numbers[-1] + 1)

    def _before(self, number: int) -> range:
        return range(number - 1, self._numbers[0] - 1, -1)
