"""What a layer declares, by letters: parameters, buffers, inputs, outputs and side outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spmd_engine.arrays.backend import Array
from spmd_engine.errors import NotationError


@dataclass(frozen=True)
class Parameter:
    """A parameter of a layer, described by its letters; its shape comes from the layer's ``sizes``.

    ``std`` is the standard deviation of its normal initial values; with 0 they are all ``mean``.
    ``summed`` are the letters over which the einsum of its gradient sums, as they are sharded ``where`` the layer
    uses it: inside, or on the residual stream. The gradient stays unreduced over the axes of those letters.
    A ``shape`` is given by layers made of layers, in which one letter may have several sizes.

    ``element=("e", 3)`` says that this is number 3 of the letter e: an expert's own parameter. Only the
    ranks to which the layout gives that element have it; on the others it is missing in ``p`` and ``g``. Its inputs
    come from all ranks along the axes of e, so its gradient is summed over the other axes alone.
    """

    dims: str
    std: float = 0.0
    mean: float = 0.0
    decay: bool = True
    where: str = "inside"
    summed: str = "bs"
    element: tuple[str, int] | None = None
    shape: tuple[int, ...] | None = None  #: whole; None: as the layer's sizes say

    def whole(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its whole shape in a layer with these sizes."""
        return self.shape if self.shape is not None else tuple(sizes[letter] for letter in self.dims.split())

    def __post_init__(self) -> None:
        if any(len(letter) != 1 for letter in self.dims.split()):
            apart = " ".join(letter for letter in self.dims if not letter.isspace())
            raise NotationError(f'Parameter("{self.dims}"): dims are letters with blanks between them, as in "{apart}"')


@dataclass(frozen=True)
class Activation:
    """What goes into a layer or comes out of it, described by its letters: ``Activation("b h w c")``.

    Its letters are sharded as they are ``where`` it is: on the residual stream between layers, or inside them, as
    tokens and logits are. Those that are ``whole`` are not sharded, whatever the layout says of them.
    """

    dims: str = "b s d"
    where: str = "residual"
    whole: str = ""


@dataclass(frozen=True)
class Buffer:
    """State of a layer that no gradient changes: running statistics, the load of experts.

    A forward finds it beside the parameters, as it was when the step began. In training a forward returns updates
    (``Extra.updates``), and with the optimizer's update the engine makes each buffer ``fold(buffer, update)``: once for
    every micro-batch, in their order, or, ``per_step``, once with the sum over all micro-batches. An update that is
    unreduced over the axes of the letters ``summed``, as they are sharded ``where``, is first summed over them. A step
    that is skipped, a recomputation and an evaluation change nothing. A buffer is saved with the parameters; it has no
    gradient and no weight decay, and is in parts only where its letters are sharded. An ``element`` is as a
    Parameter's. What is ``frozen`` was a parameter and has no updates: fully sharded, it is in parts as parameters are,
    over the axes of ``summed``, along which ranks would hold copies, and is gathered for use.
    """

    dims: str
    fold: Callable[[Array, Array], Array]
    initial: float = 0.0
    per_step: bool = False
    summed: str = ""
    where: str = "inside"
    shape: tuple[int, ...] | None = None  #: whole; None: as the layer's sizes say
    element: tuple[str, int] | None = None
    frozen: bool = False
    std: float = 0.0  #: of what is frozen: that of the normal values that it has until others are loaded

    def whole(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its whole shape in a layer with these sizes."""
        return self.shape if self.shape is not None else tuple(sizes[letter] for letter in self.dims.split())


@dataclass(frozen=True)
class SideOutput:
    """Something that a layer computes beside its output: an auxiliary loss, or counts that people want to see.

    Forwards return it (``Extra.outputs``), unreduced over the axes of the letters ``summed``, as they are sharded
    ``where``, and equal on the ranks of all other axes but those that shard ``dims``. Of a ``loss`` the mean over the
    micro-batches of a step is added to the training loss, and ``backward_input`` is given its gradient; what is no
    loss is added up.
    """

    dims: str = ""
    loss: bool = False
    summed: str = ""
    where: str = "inside"
