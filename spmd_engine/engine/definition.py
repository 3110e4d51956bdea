"""``EngineDefinition``: what a sharded model defines. ``ShardedEngine`` (``base.py``) has what it inherits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import accumulated_in
from spmd_engine.engine.batch import MicroBatch
from spmd_engine.engine.state.assignment import Index
from spmd_engine.layers.contract import Signed
from spmd_engine.losses import mean_squared_error

Loss = Callable[..., tuple[float, Array]]
Metric = Callable[..., float]


class EngineDefinition(metaclass=Signed):
    """What a ``ShardedEngine`` must define, what it declares, and what it may replace.

    Define three methods. Their arguments and results are this rank's blocks.

    ``load_checkpoint(params)``
        Take this rank's blocks from a mapping of names to whole, sliceable arrays (NumPy arrays, memory maps,
        slices of a safetensors file). ``self.block(name, array)`` takes a block by its sharding.
    ``forward(x)``
        The output; None on ranks without it. Save what the backward needs with ``self.tape.push``.
    ``backward(grads)``
        ``{name: gradient}`` like ``parameters``, reduced over the ranks, for the gradient of the output. Read what the
        forward saved with ``self.tape.pop``. Set ``self.input_gradient`` if another module precedes this engine.

    To train, save, show and verify the model, also declare:

    ``parameters``        name -> this rank's array, which the optimizer updates in place
    ``shardings``         name -> ``"d f/model"``; a parameter without a sharding is replicated
    ``input_sharding``, ``output_sharding``, ``target_sharding``   of the batch's blocks; by default targets are sharded
                          as outputs. Without them every rank has the whole batch, and must not sum gradients
    ``loss``              a function (outputs, targets, count=n) -> (value, gradient); by default mean_squared_error.
                          Its gradient includes the factor 1/n of the global batch: a backward only sums
    ``metrics``           name -> function (outputs, targets) -> the number of this rank's targets that satisfy it

    ``x = self.tape.pop()`` returns what ``self.tape.push(x)`` saved; ``x, z = pop()`` what ``push(x, z)`` saved.
    """

    parameters: Mapping[str, Array] = MappingProxyType({})
    shardings: Mapping[str, str] = MappingProxyType({})
    input_sharding: str = ""
    output_sharding: str = ""
    outputs_everywhere: bool = False  #: whether ``forward`` returns the whole output on every rank
    loss: Loss = staticmethod(mean_squared_error)
    #: Functions by name that evaluations and steps report in addition to the loss: see ``Evaluation``.
    metrics: Mapping[str, Metric] = MappingProxyType({})
    input_gradient: Array = None  #: that of the last backward; None before

    @property
    def target_sharding(self) -> str:
        return self.output_sharding

    @abstractmethod
    def load_checkpoint(self, params: Mapping[str, Any]) -> None:
        """Take this rank's blocks of ``params``: name -> whole array, or anything with a shape that can be sliced."""

    @abstractmethod
    def forward(self, x: Array) -> Array | None:
        """The output's block for the input's block ``x``; None on ranks that do not have it."""

    @abstractmethod
    def backward(self, grads: Array) -> dict[str, Array]:
        """The parameters' gradients, summed over the batch, for the output's gradient (None: no output here)."""

    # --- what an engine with a storage, a schedule or buffers of its own replaces ---------------------------

    buffers: Mapping[str, Array] = MappingProxyType({})  #: this rank's blocks of state without a gradient
    #: State of this rank alone between steps: the residues of gradient compression. None: no rank has any.
    residues: Mapping[str, Array] | None = None
    #: Auxiliary losses and counts of the last step, whole, on every rank; see ``layers.SideOutput``.
    side_outputs: Mapping[str, np.ndarray] = MappingProxyType({})
    #: Whether loading a checkpoint may fill ``parameters`` and ``buffers`` in place and call ``filled()``: one rank
    #: reads each block and sends it to the others. Otherwise ``load_checkpoint`` slices arrays.
    is_filled_in_place: bool = False

    @property
    def buffer_names(self) -> Sequence[str]:
        """All buffers of the model, in the same order on every rank, including those without a part on this rank."""
        return tuple(self.buffers)

    def buffer_index(self, name: str) -> Index | None:
        """The part of a whole buffer that this rank stores; None if none. By default, the whole buffer."""
        return tuple(slice(0, n) for n in self.buffers[name].shape) if name in self.buffers else None

    @property
    def names(self) -> Sequence[str]:
        """All parameters of the model, in the same order on every rank, including those without a part on this rank."""
        return tuple(self.parameters)

    @property
    def owned(self) -> Mapping[str, Array]:
        """The arrays that this rank's optimizer updates: by default all its parameters."""
        return self.parameters

    def new_state(self, like: Array) -> Array:
        """Zeros like an array of ``owned``, in float32 if that has 16 bits, for the optimizer's state: in memory, or
        offloaded."""
        return backend_of(like).xp.zeros(like.shape, accumulated_in(like.dtype))

    def named(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Arrays like ``owned`` (gradients, optimizer state) as arrays by parameter name."""
        return arrays

    def decays(self, key: str) -> bool:
        """Whether weight decay applies to this key of ``owned``: by default, if its array has two dims or more."""
        return self.owned[key].ndim > 1

    def after_update(self) -> None:
        """Called after the optimizer has changed ``owned``."""

    def take_residues(self, residues: Mapping[str, Array]) -> bool:
        """Continue with this rank's saved ``residues``; False, on all ranks, if they do not fit and are dropped."""
        return not residues

    def filled(self) -> None:
        """Called after a load has filled ``parameters`` and ``buffers``; the optimizer has changed nothing."""
        self.after_update()

    def update_skipped(self) -> None:
        """Called instead of ``after_update`` when a step updates nothing, because its gradients are not finite."""

    def outputs_of(self, micro: MicroBatch) -> Array | None:
        """The outputs of one micro-batch, for an evaluation."""
        return self.forward(micro.inputs)
