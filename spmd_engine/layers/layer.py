"""What a layer is: parameters by name, and functions of arrays that keep nothing to themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

from spmd_engine.arrays.backend import Array
from spmd_engine.layers.cache import Cache
from spmd_engine.layers.contract import check_backward_input, check_backward_weight, check_forward, guard, is_users
from spmd_engine.layers.declarations import Activation, Buffer, Parameter, SideOutput
from spmd_engine.layers.documents import Documents
from spmd_engine.layers.gradients import GradientSums
from spmd_engine.layers.later import Later
from spmd_engine.sharding.shards import Shards

Parameters = Mapping[str, Array]


@dataclass(frozen=True)
class ForwardContext:
    """Where and when a layer is called: all of it global, so that no result depends on the mesh."""

    #: s, inside layers: position of each token of this rank in its sample. With a cache b s: samples may differ.
    positions: Array
    residual_positions: Array  #: s, or b s, on the residual stream: the same, for this rank's part of the stream
    samples: Array | None = None  #: b: index in the global batch of each sample of this rank
    step: int = 0  #: optimizer steps made so far
    seed: int = 0
    training: bool = False  #: whether dropout applies and a backward will follow
    saving: bool = True  #: in training, whether that backward will use what this very forward saves
    length: int = 0  #: of the whole sequence, over all ranks that cut s; only who meets their keys needs it
    micro_batch: int = 0  #: number in its step
    share: float = 1.0  #: the weight of this micro-batch's auxiliary losses in the loss of the step
    mask: Array | None = None  #: like the targets; 0 where one does not count
    documents: Documents | None = None  #: in training: those of each sample, which see nothing of each other
    cache: Cache | None = None  #: when serving: what attention remembers of the positions before these
    #: when serving: rows[n] and columns[n] of the inputs here whose outputs [n 1 ...] alone are wanted of the head
    wanted: tuple[Array, Array] | None = None
    decided: Any = None  #: in a recomputation: ``Extra.decided`` of the first forward


@dataclass(frozen=True)
class Extra:
    """What a forward may return third, beside the output and what the backward needs."""

    updates: Mapping[str, Array] = field(default_factory=dict)  #: of buffers, by the layer's own names
    outputs: Mapping[str, Array | float] = field(default_factory=dict)  #: side outputs, by the layer's own names
    #: Choices that a recomputation of this forward must not make anew, such as routing: rounding could turn them.
    decided: Any = None


class Layer(ABC):
    """One text that is a single device's layer where nothing is cut, and a shard of it where something is.

    ``parameters``, ``buffers`` and ``side_outputs`` map names to their descriptions, ``sizes`` letters to whole
    sizes. In all methods ``p[name]`` is this rank's block of a parameter or buffer, ``sh`` the collectives in letters,
    and what a forward saves comes back to the backward: nothing of a micro-batch is kept on the layer, so any number
    of them may be under way.
    """

    parameters: Mapping[str, Parameter] = MappingProxyType({})
    buffers: Mapping[str, Buffer] = MappingProxyType({})
    side_outputs: Mapping[str, SideOutput] = MappingProxyType({})
    inputs: Activation = Activation()
    outputs: Activation = Activation()
    sizes: Mapping[str, int] = MappingProxyType({})
    tied: Mapping[str, str] = MappingProxyType({})  #: own names of parameters that are another layer's, by full name
    may_cut = "bs"  #: letters that a layout may cut inside this layer
    across = ""  #: the letter over whose axes it gathers from, and reduces onto, the residual stream
    attends = False  #: whether queries meet keys in it: what ``--recompute attention`` repeats

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        guard(cls, "__init__", lambda layer, returned, *args, **options: None)
        guard(cls, "forward", check_forward)
        guard(cls, "backward_input", check_backward_input)
        guard(cls, "backward_weight", check_backward_weight)

    @property
    def side_by_side(self) -> tuple[Layer, ...]:
        """What it consists of, if a layout's axes may cut other letters in each: itself, as a rule."""
        return (self,)

    def cost(self, length: int) -> float:
        """Multiplications of a forward, for each token of a sequence of this length: by what work is balanced."""
        dims = (parameter.dims.split() for parameter in self.parameters.values())
        return float(sum(prod(self.sizes[letter] for letter in each) for each in dims if len(each) > 1))

    @abstractmethod
    def forward(self, sh: Shards, p: Parameters, x: Array, ctx: ForwardContext) -> tuple:
        """The output, what the backward needs (anything is enough unless ``ctx.training`` and ``ctx.saving``) and,
        if there is any, an ``Extra``."""

    @abstractmethod
    def backward_input(
        self, sh: Shards, p: Parameters, saved: Any, dy: Array, *side: Mapping[str, float]
    ) -> tuple[Array | Later | None, Any]:
        """The input's gradient, and what the gradients of the weights still need.

        The gradient may be under way (``sh.start_...``, or a ``Later``): it is then waited for after
        ``backward_weight``. A layer with losses among its ``side_outputs`` is given their gradients by name.
        """

    def backward_weight(self, sh: Shards, rest: Any, g: GradientSums) -> None:
        """Add the gradients to ``g``, unreduced over the axes that cut the batch or the sequence."""
        if is_users(type(self)):  # of its own parameters it has forgotten all
            check_backward_weight(self, None, sh, rest, g)
