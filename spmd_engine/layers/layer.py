"""What a layer is: parameters by name, and functions of arrays that keep nothing to themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

from spmd_engine.arrays.backend import Array
from spmd_engine.errors import NotationError
from spmd_engine.layers.gradients import GradientSums
from spmd_engine.sharding.shards import Shards

Parameters = Mapping[str, Array]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a layer, described by its letters; its shape comes from the layer's ``sizes``.

    ``std`` is the standard deviation of its normal initial values; with 0 they are all ``mean``.
    ``summed`` are the letters over which the einsum of its gradient sums, as they are cut ``where`` the layer
    uses it: inside, or on the residual stream. The gradient stays unreduced over the axes of those letters.
    """

    dims: str
    std: float = 0.0
    mean: float = 0.0
    decay: bool = True
    where: str = "inside"
    summed: str = "bs"

    def __post_init__(self) -> None:
        if any(len(letter) != 1 for letter in self.dims.split()):
            apart = " ".join(letter for letter in self.dims if not letter.isspace())
            raise NotationError(f'Parameter("{self.dims}"): dims are letters with blanks between them, as in "{apart}"')


@dataclass(frozen=True)
class At:
    """Where and when a layer is called: all of it global, so that no result depends on the mesh."""

    positions: Array  #: s, inside layers: position of each token of this rank in its sample
    residual_positions: Array  #: s, on the residual stream: the same, for this rank's part of the stream
    samples: Array | None = None  #: b: index in the global batch of each sample of this rank
    step: int = 0  #: optimizer steps made so far
    seed: int = 0
    training: bool = False  #: whether dropout applies and a backward will follow
    saving: bool = True  #: in training, whether that backward will use what this very forward saves
    length: int = 0  #: of the whole sequence, over all ranks that cut s; only who meets their keys needs it


class Layer(ABC):
    """One text that is a single device's layer where nothing is cut, and a shard of it where something is.

    ``parameters`` maps names to Parameters and ``sizes`` letters to whole sizes. In all methods ``p[name]`` is
    this rank's block, ``sh`` the collectives in letters, and what a forward saves comes back to the backward:
    nothing of a micro-batch is kept on the layer, so any number of them may be under way.
    """

    parameters: Mapping[str, Parameter] = MappingProxyType({})
    sizes: Mapping[str, int] = MappingProxyType({})
    tied: Mapping[str, str] = MappingProxyType({})  #: own names of parameters that are another layer's, by full name
    may_cut = "bs"  #: letters that a layout may cut inside this layer
    across = ""  #: the letter over whose axes it gathers from, and reduces onto, the residual stream

    def cost(self, length: int) -> float:
        """Multiplications of a forward, for each token of a sequence of this length: by what work is balanced."""
        dims = (parameter.dims.split() for parameter in self.parameters.values())
        return float(sum(prod(self.sizes[letter] for letter in each) for each in dims if len(each) > 1))

    @abstractmethod
    def forward(self, sh: Shards, p: Parameters, x: Array, at: At) -> tuple[Array, Any]:
        """The output, and what the backward needs (anything is enough unless ``at.training`` and ``at.saving``)."""

    @abstractmethod
    def backward_input(self, sh: Shards, p: Parameters, saved: Any, dy: Array) -> tuple[Array | None, Any]:
        """The input's gradient, and what the gradients of the weights still need."""

    def backward_weight(self, sh: Shards, rest: Any, g: GradientSums) -> None:
        """Add the gradients to ``g``, unreduced over the axes that cut the batch or the sequence."""
