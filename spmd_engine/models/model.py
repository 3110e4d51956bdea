"""A model: named layers in order, the letters of its inputs and outputs, and its loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.errors import UsageError
from spmd_engine.layers.contract import check_declarations
from spmd_engine.layers.declarations import Buffer, Parameter
from spmd_engine.layers.layer import Layer


@dataclass(frozen=True)
class Model:
    """The definition of a model for an engine; independent of the mesh."""

    name: str
    layers: tuple[tuple[str, Layer], ...]
    inputs: str  #: letters, as in "b s"
    outputs: str
    targets: str
    loss: Callable  #: loss(sh, outputs, targets, *, count, mask) -> (value, gradient)
    context: int = 1  #: longest s; 0: any
    vocabulary: int = 0  #: inputs and targets are tokens below it; 0: inputs are not tokens
    sample: tuple[int, ...] | None = None  #: the global shape of one input sample; None: any
    #: Metrics of an evaluation besides the loss: metric(sh, outputs, targets, *, mask) -> the number of this rank's
    #: targets that fulfil it, equal on ranks with the same targets. Metrics are computed before the loss.
    metrics: Mapping[str, Callable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in self.layers:
            if not (
                isinstance(item, tuple) and [isinstance(*pair) for pair in zip(item, (str, Layer))] == [True, True]
            ):
                raise UsageError(f"{self.name}: layers are pairs, of a name and a Layer; one is {item!r}")
            check_declarations(item[1])
        if duplicates := [name for name, count in Counter(name for name, _ in self.layers).items() if count > 1]:
            raise UsageError(f"{self.name}: two layers are called {duplicates[0]!r}; give each a name of its own")
        names = {f"{name}/{parameter}" for name, layer in self.layers for parameter in layer.parameters}
        for name, layer in self.layers:
            for parameter, other in layer.tied.items():
                if other not in names:
                    raise UsageError(f"{self.name}: {name}/{parameter} is tied to {other!r}, which no layer has")

    def parameters(self) -> Iterator[tuple[str, tuple[Parameter, tuple[int, ...]]]]:
        """Yield full name, description and global shape of each parameter; a tied one appears once."""
        for name, layer in self.layers:
            for short_name, parameter in layer.parameters.items():
                if short_name not in layer.tied:
                    yield f"{name}/{short_name}", (parameter, parameter.whole(layer.sizes))

    def elements(self) -> Iterator[tuple[str, tuple[str, tuple[str, int], int]]]:
        """Yield the full name of each parameter and frozen weight of one element of a letter, with its layer, the
        letter and the element's number, and the length of the letter."""
        for name, layer in self.layers:
            parameters = {key: weight for key, weight in layer.parameters.items() if key not in layer.tied}
            frozen = {key: buffer for key, buffer in layer.buffers.items() if buffer.frozen}
            for key, weight in (parameters | frozen).items():
                if weight.element:
                    yield f"{name}/{key}", (name, weight.element, layer.sizes[weight.element[0]])

    def buffers(self) -> Iterator[tuple[str, tuple[Buffer, tuple[int, ...]]]]:
        """Yield full name, description and global shape of each buffer."""
        for name, layer in self.layers:
            for short_name, buffer in layer.buffers.items():
                yield f"{name}/{short_name}", (buffer, buffer.whole(layer.sizes))

    def check_inputs(self, x: Array) -> None:
        """Raise UsageError for invalid tokens or too long sequences. Values of device arrays are not checked."""
        if len(self.inputs.split()) != x.ndim:
            raise UsageError(f"{self.name}: inputs [{self.inputs}] have shape {x.shape}")
        if "s" in self.inputs and 0 < self.context < x.shape[1]:
            raise UsageError(f"{self.name}: a sequence of {x.shape[1]}, but the context is {self.context}")
        self._check_tokens("inputs", x)

    def check_samples(self, x: Array) -> None:
        """Raise UsageError for samples of another shape than that of this model; only the first dim may be sharded."""
        if self.sample is not None and tuple(x.shape[1:]) != self.sample:
            letters, shape = self.inputs.split()[1:], tuple(x.shape[1:])
            raise UsageError(
                f"{self.name}: samples [{' '.join(letters)}] have shape {shape}, the model was built for {self.sample}"
            )

    def check_targets(self, targets: Array) -> None:
        """Raise UsageError for targets that are not tokens of this model: ignored targets need a mask, not -1."""
        self._check_tokens("targets", targets)

    def _check_tokens(self, what: str, x: Array) -> None:
        if not self.vocabulary or backend_of(x).on_device:
            return
        if x.dtype.kind not in "iu":
            raise UsageError(f"{self.name}: {what} must be whole numbers, they are {x.dtype}")
        if x.size and (x.min() < 0 or x.max() >= self.vocabulary):
            raise UsageError(
                f"{self.name}: {what} from {x.min()} to {x.max()}; the vocabulary has 0 to {self.vocabulary - 1}"
            )

    @property
    def parameter_count(self) -> int:
        return sum(prod(shape) for _, (_, shape) in self.parameters())
