"""What a layer is: parameters by name, and functions of arrays that keep nothing to themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.errors import UnknownParameter, UsageError
from spmd_engine.layers.attention.kv_cache import Cache
from spmd_engine.layers.contract import check_backward_input, check_backward_weight, check_forward, guard, is_checked
from spmd_engine.layers.declarations import Activation, Buffer, Parameter, SideOutput
from spmd_engine.layers.deferred import Deferred
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
    length: int = 0  #: of the whole sequence, over all ranks that shard s; only attention over several ranks needs it
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
    """One text that is a single device's layer where nothing is sharded, and a shard of it where something is.

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
    may_cut = "bs"  #: letters that a layout may shard inside this layer
    across = ""  #: the letter over whose axes it gathers from, and reduces onto, the residual stream
    costs_only = False  #: it computes nothing, but spends on shapes what another program would: it is not checked
    attends = False  #: whether it is attention: ``--recompute attention`` repeats it

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        guard(cls, "__init__", lambda layer, returned, *args, **options: None)
        guard(cls, "forward", check_forward)
        guard(cls, "backward_input", check_backward_input)
        guard(cls, "backward_weight", check_backward_weight)

    @property
    def side_by_side(self) -> tuple[Layer, ...]:
        """What it consists of, if a layout's axes may shard other letters in each: itself, as a rule."""
        return (self,)

    def cost(self, length: int) -> float:
        """Multiplications of a forward, for each token of a sequence of this length: by what work is balanced."""
        dims = (parameter.dims.split() for parameter in self.parameters.values())
        return float(sum(prod(self.sizes[letter] for letter in letters) for letters in dims if len(letters) > 1))

    @abstractmethod
    def forward(self, sh: Shards, p: Parameters, x: Array, ctx: ForwardContext) -> tuple:
        """The output, what the backward needs (anything is enough unless ``ctx.training`` and ``ctx.saving``) and,
        if there is any, an ``Extra``."""

    @abstractmethod
    def backward_input(
        self, sh: Shards, p: Parameters, saved: Any, dy: Array, *side: Mapping[str, float]
    ) -> tuple[Array | Deferred | None, Any]:
        """The input's gradient, and what the gradients of the weights still need.

        The gradient may be under way (``sh.start_...``, or a ``Deferred``): it is then waited for after
        ``backward_weight``. A layer with losses among its ``side_outputs`` is given their gradients by name.
        """

    def backward_weight(self, sh: Shards, rest: Any, g: GradientSums) -> None:
        """Add the gradients to ``g``, unreduced over the axes that shard the batch or the sequence."""
        if is_checked(type(self)):  # its class has parameters of its own and does not override this method
            check_backward_weight(self, None, sh, rest, g)


# --- Where a layer puts its gradients: sums over micro-batches, in place


class GradientSums:
    """A layer's gradients by its own names, each to be added to.

    The first contribution of a step is written instead of added to zeros, which saves two passes over
    memory: ``untouched`` holds the full names of what has none yet, shared by all layers, since a tied
    parameter gets contributions from two of them. ``g["norm"]`` is the part of the names under ``norm/``.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        full_names: Mapping[str, str] | None = None,
        untouched: set[str] | None = None,
        prefix: str = "",
    ) -> None:
        self._arrays, self._prefix = arrays, prefix
        self._full_names = full_names if full_names is not None else {name: name for name in arrays}
        self._untouched = untouched if untouched is not None else set()

    def __getitem__(self, folder: str) -> GradientSums:
        return GradientSums(self._arrays, self._full_names, self._untouched, f"{self._prefix}{folder}/")

    def __setitem__(self, name: str, value: Array) -> None:
        raise UsageError(f"g[{name!r}] cannot be assigned: gradients are added up, by g.add(name, array) or g.einsum")

    def __iadd__(self, value: Array) -> GradientSums:
        name = self._prefix.rstrip("/")
        raise UsageError(f"g[{name!r}] += ...: write g.add({name!r}, array), or g.einsum")

    def einsum(self, name: str, pattern: str, *operands: Array) -> None:
        """Add ``einsum(pattern, *operands)`` to the gradient of ``name``."""
        array, first = self._take(name)
        einsum(pattern, *operands, out=array, accumulate=not first)

    def add(self, name: str, value: Array) -> None:
        """Add an array to the gradient of ``name``."""
        array, first = self._take(name)
        if (shape := getattr(value, "shape", ())) != array.shape and array.size:
            raise UsageError(f"g.add({name!r}): the array has shape {shape}, but the parameter {array.shape}")
        if first:
            array[...] = value
        else:
            array += value

    def open(self, name: str) -> Array:
        """The gradient of ``name`` itself, zero where nothing was added yet, to be added to in parts."""
        array, first = self._take(name)
        if first:
            array[...] = 0
        return array

    def untouched(self, names: Iterable[str]) -> list[str]:
        """Those of these names whose gradients are here and have no contribution yet."""
        full_names = {name: self._full_names.get(self._prefix + name) for name in names}
        return [name for name, full in full_names.items() if full in self._untouched]

    def _take(self, name: str) -> tuple[Array, bool]:
        name = self._prefix + name
        if name not in self._full_names:
            raise UnknownParameter(name, self._full_names, "layer")
        full = self._full_names[name]
        first = full in self._untouched
        self._untouched.discard(full)
        return self._arrays[name], first


# --- Several documents in one sequence, which see nothing of each other


#: How documents share a row: as one text; seeing nothing of each other; and with learned positions from 0 in each.
DOCUMENTS = ("joined", "apart", "restarted")


@dataclass(frozen=True)
class Documents:
    """Which document each position of this rank's samples belongs to; of whole sequences, however they are sharded."""

    numbers: Array  #: [b t], ascending in each sample
    starts: Array | None = None  #: [b t]: where its document begins, if learned positions begin anew there; None: not

    def at(self, positions: Array) -> Array:
        """The documents of these positions[s], as [b s]."""
        return self.numbers[:, positions]

    def learned(self, positions: Array) -> Array:
        """Which of the learned positions these are: [s], or [b s] counted from the beginnings of documents.

        Rotary positions need no such count: only distances within a document matter to them.
        """
        return positions if self.starts is None else positions - self.starts[:, positions]

    def on(self, backend: Backend) -> Documents:
        """The same where a backend computes."""
        starts = None if self.starts is None else backend.asarray(self.starts)
        return Documents(backend.asarray(self.numbers), starts)


def documents_of(numbers: Array, restart: bool) -> Documents:
    """Documents by numbers[b t] that ascend in each sample; with ``restart``, learned positions begin anew in each."""
    if not restart:
        return Documents(numbers)
    xp = backend_of(numbers).xp
    begins = xp.zeros(numbers.shape, xp.int64)
    columns = xp.arange(numbers.shape[1])
    begins[:, 1:] = xp.where(numbers[:, 1:] != numbers[:, :-1], columns[1:], 0)
    return Documents(numbers, xp.maximum.accumulate(begins, axis=1))
