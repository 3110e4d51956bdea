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
    """All that an engine needs; independent of the mesh."""

    name: str
    layers: tuple[tuple[str, Layer], ...]
    inputs: str  #: letters, as in "b s"
    outputs: str
    targets: str
    loss: Callable  #: loss(sh, outputs, targets, *, count, mask) -> (value, gradient)
    context: int = 1  #: longest s; 0: any
    vocabulary: int = 0  #: tokens, inputs and targets, are whole numbers below it; 0: inputs are no tokens
    sample: tuple[int, ...] | None = None  #: the whole shape of one sample of the inputs; None: any
    #: What an evaluation reports besides the loss: metric(sh, outputs, targets, *, mask) -> the number of targets here
    #: for which it holds, equal on ranks with the same targets. It is computed before the loss.
    metrics: Mapping[str, Callable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in self.layers:
            if not (
                isinstance(each, tuple) and [isinstance(*pair) for pair in zip(each, (str, Layer))] == [True, True]
            ):
                raise UsageError(f"{self.name}: layers are pairs, of a name and a Layer; one is {each!r}")
            check_declarations(each[1])
        if twice := [name for name, count in Counter(name for name, _ in self.layers).items() if count > 1]:
            raise UsageError(f"{self.name}: two layers are called {twice[0]!r}; give each a name of its own")
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
                    yield f"{name}/{own}", (parameter, parameter.whole(layer.sizes))

    def elements(self) -> Iterator[tuple[str, tuple[str, tuple[str, int], int]]]:
        """Full name of each parameter and each frozen weight that belongs to one element of a letter; its layer, the
        letter and the element's number, and the letter's length."""
        for name, layer in self.layers:
            parameters = {own: each for own, each in layer.parameters.items() if own not in layer.tied}
            frozen = {own: each for own, each in layer.buffers.items() if each.frozen}
            for own, each in (parameters | frozen).items():
                if each.element:
                    yield f"{name}/{own}", (name, each.element, layer.sizes[each.element[0]])

    def buffers(self) -> Iterator[tuple[str, tuple[Buffer, tuple[int, ...]]]]:
        """Full name, description and whole shape of each buffer."""
        for name, layer in self.layers:
            for own, buffer in layer.buffers.items():
                yield f"{name}/{own}", (buffer, buffer.whole(layer.sizes))

    def check_inputs(self, x: Array) -> None:
        """Raise UsageError for tokens, or sequences, that this model cannot take. Host arrays only."""
        if len(self.inputs.split()) != x.ndim:
            raise UsageError(f"{self.name}: inputs [{self.inputs}] have shape {x.shape}")
        if "s" in self.inputs and 0 < self.context < x.shape[1]:
            raise UsageError(f"{self.name}: a sequence of {x.shape[1]}, but the context is {self.context}")
        self._check_tokens("inputs", x)

    def check_samples(self, x: Array) -> None:
        """Raise UsageError for samples, whole beyond the first dim, of another shape than this model was built for."""
        if self.sample is not None and tuple(x.shape[1:]) != self.sample:
            letters, found = self.inputs.split()[1:], tuple(x.shape[1:])
            raise UsageError(
                f"{self.name}: samples [{' '.join(letters)}] have shape {found}, the model was built for {self.sample}"
            )

    def check_targets(self, targets: Array) -> None:
        """Raise UsageError for targets that are no tokens of this model; a mask hides, a negative target does not."""
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
