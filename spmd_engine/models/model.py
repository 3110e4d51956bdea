"""A model: named layers in order, the letters of what goes in and comes out, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from spmd_engine.errors import UsageError
from spmd_engine.layers.layer import Layer, Parameter


@dataclass(frozen=True)
class Model:
    """Everything an engine needs to know, and nothing of any mesh."""

    name: str
    layers: tuple[tuple[str, Layer], ...]
    inputs: str  #: letters, as in "b s"
    outputs: str
    targets: str
    loss: Callable  #: loss(sh, outputs, targets, *, count, mask, want_gradient) -> (value, gradient)
    context: int = 1  #: longest s
    vocabulary: int = 0

    def __post_init__(self) -> None:
        own = {f"{name}/{parameter}" for name, layer in self.layers for parameter in layer.parameters}
        for name, layer in self.layers:
            for parameter, other in layer.tied.items():
                if other not in own:
                    raise UsageError(f"{self.name}: {name}/{parameter} is tied to {other!r}, which no layer has")

    def parameters(self) -> Iterator[tuple[str, tuple[Parameter, tuple[int, ...]]]]:
        """Full name, description and whole shape of each parameter; a tied one appears once."""
        for name, layer in self.layers:
            for own, parameter in layer.parameters.items():
                if own not in layer.tied:
                    shape = tuple(layer.sizes[letter] for letter in parameter.dims.split())
                    yield f"{name}/{own}", (parameter, shape)

    @property
    def parameter_count(self) -> int:
        return sum(prod(shape) for _, (_, shape) in self.parameters())
