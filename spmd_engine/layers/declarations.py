"""What a layer declares, by letters: parameters, buffers, inputs, outputs and side outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from spmd_engine.arguments import checked
from spmd_engine.arrays.backend import Array
from spmd_engine.errors import NotationError

Dims = Annotated[str, 'letters, as in "b s d"']
Sized = Annotated[tuple[str, int], 'a letter and its size, as ("d", 64)']
Image = Annotated[tuple[int, int], "its height and width, as (8, 8)"]
Where = Literal["inside", "residual"]  # which sharding letters have: that inside layers, or of the stream between them


def _check_dims(name: str, dims: str) -> None:
    if any(len(letter) != 1 for letter in dims.split()):
        apart = " ".join(letter for letter in dims if not letter.isspace())
        raise NotationError(f'{name}("{dims}"): dims are letters with blanks between them, as in "{apart}"')


@checked({"std": 0})
@dataclass(frozen=True)
class Parameter:
    """A parameter of a layer, described by its letters; its shape comes from the layer's ``sizes``.

    ``std`` is the standard deviation of its normal initial values; with 0 they are all ``mean``.
    ``summed`` are the letters over which its gradient is a sum, as they are sharded ``where`` the layer uses it:
    inside, or on the residual stream. The gradient stays unreduced over the axes of those letters.
    Containers give a ``shape``, since one letter may have several sizes in them.

    ``element=("e", 3)``: the parameter belongs to element 3 of the letter e, an expert. Only the ranks that hold this
    element have it; on others it is missing in ``p`` and ``g``. Its inputs come from all ranks along the axes of e, so
    its gradient is summed over the other axes only.
    """

    dims: Dims
    std: float = 0.0
    mean: float = 0.0
    decay: bool = True
    where: Where = "inside"
    summed: str = "bs"
    element: tuple[str, int] | None = None
    shape: tuple[int, ...] | None = None  #: global; None: by the layer's sizes

    def whole(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The global shape in a layer with these sizes."""
        return self.shape if self.shape is not None else tuple(sizes[letter] for letter in self.dims.split())

    def __post_init__(self) -> None:
        _check_dims("Parameter", self.dims)


@checked()
@dataclass(frozen=True)
class Activation:
    """An input or output of a layer, described by its letters: ``Activation("b h w c")``.

    ``where`` selects the sharding of its letters: that of the "residual" stream between layers, or that "inside"
    layers, which tokens and logits have. The letters in ``whole`` are not sharded, whatever the layout.
    """

    dims: Dims = "b s d"
    where: Where = "residual"
    whole: str = ""

    def __post_init__(self) -> None:
        _check_dims("Activation", self.dims)
        if len({*self.dims.split()}) < len(self.dims.split()):
            raise NotationError(f'Activation("{self.dims}"): give each dim a letter of its own')


@checked({"std": 0})
@dataclass(frozen=True)
class Buffer:
    """State of a layer that no gradient changes: running statistics, the load of experts.

    A forward reads it in ``p``, with its value from the start of the step. In training a forward returns updates
    (``Extra.updates``), and with the optimizer's update the engine sets each buffer to ``fold(buffer, update)``: once
    for every micro-batch, in order, or, with ``per_step``, once with the sum over all micro-batches. An update that is
    unreduced over the axes of the letters ``summed``, as they are sharded ``where``, is first summed over them. Skipped
    steps, recomputations and evaluations change nothing. A buffer is saved with the parameters; it has no gradient and
    no weight decay, and is split only where its letters are sharded. ``element`` is that of a Parameter. A ``frozen``
    buffer was a parameter and has no updates: if parameters are fully sharded, it is sharded, too, over the axes of
    ``summed``, along which ranks would hold replicas, and gathered for use.
    """

    dims: Dims
    fold: Callable[[Array, Array], Array]
    initial: float = 0.0
    per_step: bool = False
    summed: str = ""
    where: Where = "inside"
    shape: tuple[int, ...] | None = None  #: global; None: by the layer's sizes
    element: tuple[str, int] | None = None
    frozen: bool = False
    std: float = 0.0  #: the deviation of a frozen buffer's normal initial values, before others are loaded

    def whole(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The global shape in a layer with these sizes."""
        return self.shape if self.shape is not None else tuple(sizes[letter] for letter in self.dims.split())


@checked()
@dataclass(frozen=True)
class SideOutput:
    """An auxiliary loss, or counts, that a layer computes in addition to its output.

    Forwards return it (``Extra.outputs``), unreduced over the axes of the letters ``summed``, as they are sharded
    ``where``, and equal along all other axes except those that shard ``dims``. The mean of a ``loss`` over the
    micro-batches of a step is added to the training loss, and ``backward_input`` gets its gradient; other side outputs
    are summed.
    """

    dims: Dims = ""
    loss: bool = False
    summed: str = ""
    where: Where = "inside"
