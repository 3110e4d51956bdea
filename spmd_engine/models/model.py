"""A model: named layers in order, the letters of its inputs and outputs, and its loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Parameter as Argument
from inspect import signature
from math import prod
from typing import Any

from spmd_engine.arguments import checked
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.errors import UsageError, described
from spmd_engine.layers import Buffer, Layer, Parameter
from spmd_engine.layers.contract import check_declarations, check_sizes
from spmd_engine.losses import check_classes, cross_entropy, mean_squared_error, right_classes
from spmd_engine.sharding import Shards


@checked(
    {"context": 0, "vocabulary": 0}, layers="pairs of a name and a Layer", loss="a function, as mean_squared_error"
)
@dataclass(frozen=True)
class Model:
    """The definition of a model for an engine, independent of the mesh: named layers in order, the letters of inputs,
    outputs and targets, as in "b s", and a loss.

    The loss is ``mean_squared_error``, ``cross_entropy`` of outputs whose last letter is the classes, or another
    ``loss(outputs, targets, *, count, mask) -> (value, gradient)`` of whole samples, where ``count`` is the number of
    terms of the global mean. A loss of blocks has the collectives in letters, too: ``loss(sh, outputs, targets, *,
    count, mask)``. Raises UsageError for layers whose sizes do not fit together.
    """

    name: str
    layers: tuple[tuple[str, Layer], ...]
    inputs: str  #: letters
    outputs: str
    targets: str
    loss: Callable
    context: int = 1  #: longest s; 0: any
    vocabulary: int = 0  #: inputs and targets are tokens below it; 0: inputs are not tokens
    sample: tuple[int, ...] | None = None  #: the global shape of one input sample; None: any
    #: Metrics of an evaluation besides the loss: metric(sh, outputs, targets, *, mask) -> the number of this rank's
    #: targets that fulfil it, equal on ranks with the same targets. Metrics are computed before the loss.
    metrics: Mapping[str, Callable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in self.layers:
            check_declarations(item[1])
        for name in ("inputs", "outputs", "targets"):
            text = getattr(self, name)
            if any(len(letter) != 1 for letter in text.split()):
                raise UsageError(f'{self.name}: {name} is {text!r}; write letters with blanks between, as in "b s d"')
        if duplicates := [name for name, count in Counter(name for name, _ in self.layers).items() if count > 1]:
            raise UsageError(f"{self.name}: two layers are called {duplicates[0]!r}; give each a name of its own")
        names = {f"{name}/{parameter}" for name, layer in self.layers for parameter in layer.parameters}
        for name, layer in self.layers:
            for parameter, other in layer.tied.items():
                if other not in names:
                    raise UsageError(f"{self.name}: {name}/{parameter} is tied to {other!r}, which no layer has")

        check_sizes(self.layers, f"{self.name}: ")
        object.__setattr__(self, "loss", _loss_of_blocks(self))

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
        if len(self.inputs.split()) != getattr(x, "ndim", None):
            raise UsageError(f"{self.name}: inputs [{self.inputs}] must be an array of these dims, not {described(x)}")
        if "s" in self.inputs and 0 < self.context < x.shape[1]:
            raise UsageError(f"{self.name}: a sequence of {x.shape[1]}, but the context is {self.context}")
        self._check_tokens("inputs", x)

    def check_samples(self, x: Array) -> None:
        """Raise UsageError for samples of another shape than that of this model; only the first dim may be sharded."""
        letters, (first, layer) = self.inputs.split(), self.layers[0]
        taken = layer.inputs.dims.split()
        if len(letters) == x.ndim == len(taken):
            for letter, into, length in zip(letters[1:], taken[1:], x.shape[1:], strict=True):
                if layer.input_sizes.get(into, length) != length:
                    raise UsageError(
                        f"{self.name}: inputs [{self.inputs}] have shape {tuple(x.shape)}, but {letter} is "
                        f"{layer.input_sizes[into]} in {first} ({type(layer).__name__})"
                    )
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


# --- Losses and metrics of blocks: in letters, since a mesh may shard their dims


def class_loss(letter: str, classes: int, *, check: bool = True) -> Callable:
    """Return the cross-entropy of scores[b c] or logits[b s v] with targets[b] or [b s] below ``classes``; the letter
    of the classes may be sharded. ``check``: whether a target out of range is an error."""

    def loss(sh, outputs, targets, **options):
        if check and sh.axes(letter):  # cross_entropy checks whole rows of scores itself
            check_classes(targets, classes, options.get("mask"))
        return cross_entropy(outputs, targets, **_shard_of_classes(sh, letter, classes), **options)

    return loss


def class_accuracy(letter: str, classes: int) -> Callable:
    """Return a metric: the number of targets[b] with the largest of scores[b c]; letter c may be sharded."""

    def metric(sh, outputs, targets, **options):
        return right_classes(outputs, targets, **_shard_of_classes(sh, letter, classes), **options)

    return metric


def _shard_of_classes(sh: Shards, letter: str, classes: int) -> dict[str, Any]:
    """The group over which the letter of the classes is sharded, and the first class of this rank."""
    axes = sh.axes(letter)
    return {"over": sh.mesh.group(axes) if axes else None, "start": sh.span(letter, classes).start}


def _loss_of_blocks(model: Model) -> Callable:
    """The loss of a model as a function of blocks, ``loss(sh, outputs, targets, ...)``, which it may be already."""
    loss, letters = model.loss, model.outputs.split()
    if loss is cross_entropy:
        sizes = [layer.sizes[letters[-1]] for _, layer in model.layers if letters[-1] in layer.sizes]
        if not sizes:
            raise UsageError(
                f"{model.name}: outputs {model.outputs!r} end with the classes, but no layer has {letters[-1]!r}"
            )
        return class_loss(letters[-1], sizes[-1])
    if not _takes_whole_samples(loss):
        return loss

    def of_blocks(sh: Shards, outputs: Array, targets: Array, **options: Any) -> tuple[float, Array]:
        axes = sh.axes(letter for letter in letters if letter not in "bs")
        if axes and loss is not mean_squared_error:
            raise UsageError(
                f"{model.name}: the outputs {model.outputs!r} are sharded over {', '.join(axes)}, which this loss does "
                "not support; use cross_entropy, or a loss that takes blocks, loss(sh, outputs, targets, ...)"
            )
        return loss(outputs, targets, **options)

    return of_blocks


def _takes_whole_samples(loss: Callable) -> bool:
    """Whether a loss takes outputs and targets alone, besides its options, and no ``sh`` before them."""
    try:
        arguments = signature(loss).parameters.values()
    except (TypeError, ValueError):  # a function without a signature
        return False
    positional = [a for a in arguments if a.kind in (Argument.POSITIONAL_ONLY, Argument.POSITIONAL_OR_KEYWORD)]
    return len([a for a in positional if a.default is a.empty and a.name not in ("count", "mask")]) == 2
