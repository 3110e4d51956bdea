"""The interface of layers: parameters by name, and functions of arrays without state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

from spmd_engine.arguments import bound, checked
from spmd_engine.arrays import einsum
from spmd_engine.arrays.backend import Array, Backend, backend_of
from spmd_engine.comm.pending import Deferred
from spmd_engine.errors import UnknownParameter, UsageError
from spmd_engine.layers.attention.kv_cache import Cache
from spmd_engine.layers.contract import (
    Signed,
    check_backward_input,
    check_backward_weight,
    check_declarations,
    check_forward,
    guard,
    is_checked,
)
from spmd_engine.layers.declarations import Activation, Buffer, Parameter, SideOutput
from spmd_engine.sharding.shards import Shards

Parameters = Mapping[str, Array]
#: The ``limits`` of arguments of the package's layers, see ``checked``.
LIMITS = {
    **dict.fromkeys(("epsilon", "std", "out_std", "momentum", "shared", "unused"), 0),
    **dict.fromkeys(("width", "hidden", "vocabulary", "heads", "experts", "inputs", "outputs", "channels", "image"), 1),
    **dict.fromkeys(("dropout", "rate"), (0, 1)),
    **dict.fromkeys(("groups", "kernel", "stride", "dilation"), 1),
}


@dataclass(frozen=True)
class ForwardContext:
    """The context of a call of a layer: all of it is global, so that no result depends on the mesh."""

    #: [s], inside layers: position of each token of this rank in its sample; [b s] with a cache: samples may differ.
    positions: Array
    residual_positions: Array  #: [s] or [b s]: the same for this rank's shard of the residual stream
    samples: Array | None = None  #: [b]: index in the global batch of each sample of this rank
    step: int = 0  #: optimizer steps made so far
    seed: int = 0
    training: bool = False  #: whether dropout applies and a backward will follow
    saving: bool = True  #: in training: whether the backward uses what this forward saves
    length: int = 0  #: the length of the global sequence; only attention over several ranks needs it
    micro_batch: int = 0  #: its number in the step
    share: float = 1.0  #: the weight of this micro-batch's auxiliary losses in the loss of the step
    scale: float = 1.0  #: by which gradients, also of auxiliary losses, are multiplied
    mask: Array | None = None  #: shaped as the targets; 0 where a target does not count
    documents: Documents | None = None  #: in training: of each sample; attention does not cross them
    cache: Cache | None = None  #: when serving: keys and values of the earlier positions
    #: when serving: rows[n] and columns[n] of this rank's inputs; the head returns only their outputs, [n 1 ...]
    wanted: tuple[Array, Array] | None = None
    decided: Any = None  #: in a recomputation: ``Extra.decided`` of the first forward


@dataclass(frozen=True)
class Extra:
    """The optional third value that a forward returns."""

    updates: Mapping[str, Array] = field(default_factory=dict)  #: updates of buffers, by the names in the layer
    outputs: Mapping[str, Array | float] = field(default_factory=dict)  #: side outputs, by the names in the layer
    #: Choices, such as routing, that a recomputation of this forward reuses, since rounding could change them.
    decided: Any = None


class _Checked(Signed):
    """The class of layers: what a layer declares is checked when it has been made."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        try:
            layer = super().__call__(*args, **options)
        except TypeError:
            bound(cls.__name__, cls, args, options)
            raise
        check_declarations(layer)
        return layer


class Layer(metaclass=_Checked):
    """A layer, with the same code for one device and for any mesh.

    ``parameters``, ``buffers`` and ``side_outputs`` map names to their declarations, ``sizes`` letters to global
    sizes. In all methods ``p[name]`` is this rank's shard of a parameter or buffer, and ``sh`` the collectives in
    letters. What a forward saves is passed to the backward: a layer keeps no state of a micro-batch, so any number of
    them may be under way.
    """

    parameters: Mapping[str, Parameter] = MappingProxyType({})
    buffers: Mapping[str, Buffer] = MappingProxyType({})
    side_outputs: Mapping[str, SideOutput] = MappingProxyType({})
    inputs: Activation = Activation()
    outputs: Activation = Activation()
    sizes: Mapping[str, int] = MappingProxyType({})
    tied: Mapping[str, str] = MappingProxyType({})  #: name -> full name of another layer's parameter
    may_cut = "bs"  #: letters that a layout may shard inside this layer
    across = ""  #: letters over whose axes it gathers the residual stream and reduces onto it
    costs_only = False  #: it computes nothing, but has the costs of another program in a dry run; not checked
    attends = False  #: whether it is attention: ``--recompute attention`` repeats it

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls) and not is_checked(cls):
            checked(LIMITS)(cls)
        guard(cls, "__init__", lambda layer, returned, *args, **options: None)
        guard(cls, "forward", check_forward, keeps=2)
        guard(cls, "backward_input", check_backward_input, keeps=3)
        guard(cls, "backward_weight", check_backward_weight)

    @property
    def input_sizes(self) -> Mapping[str, int]:
        """The sizes of the letters of ``inputs``, where they are known: by default ``sizes``."""
        return self.sizes

    @property
    def output_sizes(self) -> Mapping[str, int]:
        """As ``input_sizes``, of ``outputs``."""
        return self.sizes

    @property
    def side_by_side(self) -> tuple[Layer, ...]:
        """The parallel layers inside it, in which a layout may shard different letters; by default only itself."""
        return (self,)

    def cost(self, length: int) -> float:
        """Multiplications of a forward per token of a sequence of this length, for balancing the work."""
        dims = (parameter.dims.split() for parameter in self.parameters.values())
        return float(sum(prod(self.sizes[letter] for letter in letters) for letters in dims if len(letters) > 1))

    @abstractmethod
    def forward(self, sh: Shards, p: Parameters, x: Array, ctx: ForwardContext) -> tuple:
        """The output, what the backward needs (anything unless ``ctx.training`` and ``ctx.saving``), and perhaps an
        ``Extra``."""

    @abstractmethod
    def backward_input(
        self, sh: Shards, p: Parameters, saved: Any, dy: Array, *side: Mapping[str, float]
    ) -> tuple[Array | Deferred | None, Any]:
        """The input's gradient, and what ``backward_weight`` needs.

        The gradient may be under way (``sh.start_...``, or a ``Deferred``): the caller waits for it after
        ``backward_weight``. ``side`` has the gradients of the losses among ``side_outputs``, by name.
        """

    def backward_weight(self, sh: Shards, rest: Any, g: GradientSums) -> None:
        """Add the gradients to ``g``, unreduced over the axes that shard the batch or the sequence."""
        if is_checked(type(self)):  # its class has parameters of its own and does not override this method
            check_backward_weight(self, None, sh, rest, g)


# --- Gradients of a layer, summed over micro-batches in place


class GradientSums:
    """A layer's gradients by the names in the layer, to which contributions are added.

    The first contribution of a step is written instead of added to zeros, which saves two passes over
    memory: ``untouched`` holds the full names of gradients without one, shared by all layers, since a tied
    parameter gets contributions from two of them. ``g["norm"]`` has the gradients under ``norm/``.
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
        """The array of the gradient of ``name``, to add contributions to; zero if there are none yet."""
        array, first = self._take(name)
        if first:
            array[...] = 0
        return array

    def untouched(self, names: Iterable[str]) -> list[str]:
        """The ``names`` of which this rank has the gradient, without a contribution yet."""
        full_names = {name: self._full_names.get(self._prefix + name) for name in names}
        return [name for name, full in full_names.items() if full in self._untouched]

    def _take(self, name: str) -> tuple[Array, bool]:
        name = self._prefix + name
        if name not in self._full_names:
            raise UnknownParameter(name, self._full_names, "layer")
        full = self._full_names[name]
        first = full in self._untouched
        if first:
            self._untouched.discard(full)
        return self._arrays[name], first


# --- Several documents in one sequence, which do not attend to each other


#: How documents share a row: as one text; without attention across them; also with learned positions from 0 in each.
DOCUMENTS = ("joined", "apart", "restarted")


@dataclass(frozen=True)
class Documents:
    """The document of each position of this rank's samples, for the global sequences even if they are sharded."""

    numbers: Array  #: [b t], ascending in each sample
    starts: Array | None = None  #: [b t]: where its document begins, if learned positions restart there; else None

    def at(self, positions: Array) -> Array:
        """The documents of these positions[s], as [b s]."""
        return self.numbers[:, positions]

    def learned(self, positions: Array) -> Array:
        """The indices of learned positions: [s], or [b s] counted from the beginnings of documents.

        Rotary positions need no such count: they depend only on distances within a document.
        """
        return positions if self.starts is None else positions - self.starts[:, positions]

    def on(self, backend: Backend) -> Documents:
        """The same documents, as arrays of a backend."""
        starts = None if self.starts is None else backend.asarray(self.starts)
        return Documents(backend.asarray(self.numbers), starts)


def documents_of(numbers: Array, restart: bool) -> Documents:
    """Documents by numbers[b t] that ascend in each sample; with ``restart``, learned positions restart in each."""
    if not restart:
        return Documents(numbers)
    xp = backend_of(numbers).xp
    begins = xp.zeros(numbers.shape, xp.int64)
    columns = xp.arange(numbers.shape[1])
    begins[:, 1:] = xp.where(numbers[:, 1:] != numbers[:, :-1], columns[1:], 0)
    return Documents(numbers, xp.maximum.accumulate(begins, axis=1))
