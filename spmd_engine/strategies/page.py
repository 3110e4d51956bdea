"""The base of all pages of this folder: sharded weights, without an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmd_engine.arrays.backend import CPU, Array, Backend
from spmd_engine.arrays.precision import accumulated_in, dtype_of
from spmd_engine.arrays.random import key_of, normal
from spmd_engine.comm import Mesh
from spmd_engine.engine import ShardedEngine
from spmd_engine.engine.state.assignment import Index
from spmd_engine.engine.zero.parameter_store import check_shapes


@dataclass(frozen=True)
class Weight:
    """One of a model's weights."""

    shape: tuple[int, ...]  #: the unsharded weight's
    inputs: int  #: number of inputs over which each output sums

    def initial(self, seed: int, name: str, dtype: Any, block: Index | None = None, backend: Backend = CPU) -> Array:
        """A block (default: all) of the initial values: normal, with standard deviation 1 / sqrt(inputs).

        They depend only on seed, name and global index.
        """
        return normal(key_of(seed, name), self.shape, dtype, block, backend) / self.inputs**0.5


class Page(ShardedEngine):
    """A model's weights, sharded by ``shardings``; zeros until they are loaded or initialized.

    A model's class defines the inputs and creates the weights with ``_store``; a strategy's class adds the axes, the
    shardings, forward and backward. In the costs of strategies' docstrings, b is a micro-batch, ``sent`` and ``held``
    are for each rank, ``saved`` is kept from forward to backward, and (n-1)/n is exact in the sum over ranks.
    """

    sample: str  #: letters of inputs, outputs and targets; the loss is the squared error
    sizes: tuple[str, str]  #: names of the constructor's first two arguments
    axes: tuple[str, ...] = ()  #: the strategy's mesh axes, the outermost first
    weights: Mapping[str, Weight]

    def _store(self, weights: Mapping[str, Weight], mesh: Mesh | None, dtype: Any) -> None:
        if mesh is not None:
            self.mesh = mesh
        self.dtype = dtype_of(dtype)
        self.weights = weights
        self.parameters = {
            name: self.xp.zeros(self.sharding(name).local_shape(weight.shape, self.mesh), self.dtype)
            for name, weight in weights.items()
        }

    def global_shape(self, name: str) -> tuple[int, ...]:
        return self.weights[name].shape  # known without communication

    def initialize(self, seed: int = 0) -> None:
        """Fill this rank's parts with initial values; no rank creates an unsharded weight."""
        for name, parameter in self.parameters.items():
            wide = accumulated_in(parameter.dtype)
            parameter[...] = self.weights[name].initial(seed, name, wide, self.index(name), self.backend)
        self.after_update()

    def load_checkpoint(self, params: Mapping[str, Any]) -> None:
        check_shapes(params, {name: weight.shape for name, weight in self.weights.items()})
        for name, parameter in self.parameters.items():
            parameter[...] = self.block(name, params[name])
