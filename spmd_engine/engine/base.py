"""ShardedEngine: what a sharded model must define, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any
from zlib import crc32

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of
from spmd_engine.arrays.updates import sum_of_squares
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.mesh import Collectives, Mesh, Over
from spmd_engine.engine.batch import Batch
from spmd_engine.engine.replicas import check_replicas
from spmd_engine.engine.serving import Writer, serve
from spmd_engine.engine.tape import Tape, Tapes
from spmd_engine.errors import MismatchError, UsageError
from spmd_engine.layers.loss import mean_squared_error
from spmd_engine.sharding.notation import Spec, nested_span

Loss = Callable[..., tuple[float, Array]]


class ShardedEngine(Collectives, ABC):
    """A model of which every rank runs the same program on its own shard.

    Define three methods. All arrays in and out are this rank's blocks.

    ``load_checkpoint(params)``
        Take this rank's blocks from a mapping of names to whole, sliceable arrays (NumPy arrays, memory maps,
        slices of a safetensors file). ``self.block(name, array)`` cuts one by its sharding.
    ``forward(x)``
        The output; None on ranks that do not have it. Save what the backward needs with ``self.tape.push``.
    ``backward(grads)``
        ``{name: gradient}`` like ``parameters``, reduced over the ranks, for the gradient of the output; take
        back with ``self.tape.pop``. Set ``self.input_gradient`` if something comes before this engine.

    To be trained, saved, shown and verified, say also what this rank holds and how it is cut:

    ``parameters``        name -> array stored here; the optimizer updates it in place
    ``shardings``         name -> ``"d f/model"``; what is not named is whole on every rank
    ``input_sharding``, ``output_sharding``, ``target_sharding``   of the batch's blocks; targets are like outputs.
                          Where they are not said, every rank has the whole batch, and gradients must not be summed
    ``loss``              a function (outputs, targets, count=n) -> (value, gradient); mean_squared_error if not said.
                          Its gradient has the 1/n of the global batch in it: a backward only sums

    ``self.tape.push(x)`` comes back as ``x = self.tape.pop()``, ``push(x, z)`` as ``x, z = pop()``.

    Collectives (``send``, ``receive``, ``all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all``,
    ``broadcast``, ``barrier``) go over the whole world, or ``over="data"``. Everything here works whether or
    not ``__init__`` calls ``super().__init__()``.
    """

    parameters: Mapping[str, Array] = MappingProxyType({})
    shardings: Mapping[str, str] = MappingProxyType({})
    input_sharding: str = ""
    output_sharding: str = ""
    backend: Backend = CPU
    loss: Loss = staticmethod(mean_squared_error)
    input_gradient: Array | None = None  #: of the last backward
    gradients: Mapping[str, Array] = MappingProxyType({})  #: of the last step, like ``owned``

    # --- to be defined -----------------------------------------------------------------------------------

    @abstractmethod
    def load_checkpoint(self, params: Mapping[str, Any]) -> None:
        """Take this rank's blocks of ``params``: name -> whole array, or anything with a shape that can be sliced."""

    @abstractmethod
    def forward(self, x: Array) -> Array | None:
        """The output's block for the input's block ``x``; None on ranks that do not have it."""

    @abstractmethod
    def backward(self, grads: Array | None) -> dict[str, Array]:
        """The parameters' gradients, summed over the batch, for the output's gradient ``grads``."""

    # --- where we are ------------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The mesh of this engine: all ranks on one axis, ``data``, unless another was set."""
        if "_mesh" not in self.__dict__:
            self._mesh = Mesh()
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @property
    def device_id(self) -> int:
        """The rank of this device in the world."""
        return self.mesh.rank

    @property
    def num_devices(self) -> int:
        """The number of ranks in the world."""
        return self.mesh.size

    @property
    def ledger(self) -> Ledger:
        return self.mesh.ledger

    def group(self, over: Over = None) -> Group:
        return self.mesh.group(over)

    # --- micro-batches under way -------------------------------------------------------------------------

    @property
    def _tapes(self) -> Tapes:
        return self.__dict__.setdefault("_tape_store", Tapes())

    @property
    def tape(self) -> Tape:
        """The stack of the current micro-batch; in inference mode, one that keeps nothing."""
        return self._tapes.current

    def micro_batch(self, index: Hashable) -> AbstractContextManager[None]:
        """``with engine.micro_batch(3): ...``: forward and backward there use micro-batch 3's own tape."""
        return self._tapes.select(index)

    def inference(self) -> AbstractContextManager[None]:
        """``with engine.inference(): ...``: forwards save nothing."""
        return self._tapes.off()

    @property
    def is_training(self) -> bool:
        return self._tapes.recording

    # --- parameters --------------------------------------------------------------------------------------

    @property
    def owned(self) -> Mapping[str, Array]:
        """What this rank's optimizer updates: by default every parameter stored here."""
        return self.parameters

    def named(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Arrays like ``owned`` (gradients, optimizer state) as arrays by parameter name."""
        return arrays

    def decays(self, key: str) -> bool:
        """Whether weight decay applies to this key of ``owned``: by default, to what has two dims or more."""
        return self.owned[key].ndim > 1

    def after_update(self) -> None:
        """Called when the optimizer has changed ``owned``."""

    def sharding(self, name: str) -> Spec:
        """How a parameter is cut."""
        if name in self.shardings:
            return Spec.parse(self.shardings[name])
        if name not in self.parameters:
            raise UsageError(f"no parameter {name!r}; this engine has: {', '.join(self.parameters)}")
        return Spec.parse(" ".join("ijklmnop"[: np.ndim(self.parameters[name])]))

    def block(self, name: str, array: Any) -> Array:
        """This rank's block of a whole, sliceable array, read by slices alone."""
        if name in self.shardings:
            block = array[self.sharding(name).block(tuple(array.shape), self.mesh)]
        else:  # whole on every rank; a copy, since it will be updated
            block = np.array(array[...])
        return self.backend.asarray(np.asarray(block) if not self.backend.owns(block) else block)

    def global_shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a parameter. Collective over the axes that cut it."""
        shape = list(self.parameters[name].shape)
        for dim, (_, axes) in enumerate(self.sharding(name)):
            for axis in reversed(axes):
                shape[dim] = int(self.all_reduce(np.array(shape[dim]), over=axis, label="shape"))
        return tuple(shape)

    def gather(self, name: str) -> Array:
        """The whole parameter, on every rank that calls. Every rank must: one that ends instead, or calls
        something else, turns the gather into a MismatchError on all of them, never into a hang."""
        if name not in self.parameters:
            raise UsageError(f"no parameter {name!r}; there are: {', '.join(self.parameters)}")
        # Over the world, where any rank's mistake meets the others.
        asked = self.all_gather(np.array([crc32(name.encode())], np.uint32), label="gather")
        if (asked != asked[self.device_id]).any():
            others = np.flatnonzero(asked != asked[0]).tolist()
            raise MismatchError(f"gather: ranks {others} ask for another parameter than rank 0 (here: {name!r})")
        return self.sharding(name).gather(self.parameters[name], self.mesh, label="gather")

    def counts_here(self, name: str) -> bool:
        """Whether this rank is the one among a parameter's replicas that counts it in a global sum."""
        cut = self.sharding(name).axes
        return all(place == 0 for axis, place in self.mesh.coordinates.items() if axis not in cut)

    def gradient_norm(self) -> float:
        """The 2-norm of the whole gradient, each element counted once. Collective over the world."""
        total = sum(sum_of_squares(g) for g in self._counted_gradients())
        return float(self.all_reduce(np.array(total, np.float64), label="gradient norm")) ** 0.5

    def _counted_gradients(self) -> Iterable[Array]:
        """Flat gradients that this rank, of all that have them, counts."""
        named = self.named(self.gradients).items()
        return (backend_of(g).xp.ravel(g) for name, g in named if self.counts_here(name))

    # --- training ----------------------------------------------------------------------------------------

    @property
    def target_sharding(self) -> str:
        return self.output_sharding

    def _check_shardings(self) -> None:
        """The batch must be cut alike in inputs and targets, or the loss is not what the gradients sum to."""
        inputs, targets = Spec.parse(self.input_sharding).dims, Spec.parse(self.target_sharding).dims
        if inputs and inputs[0][1] and (not targets or targets[0][1] != inputs[0][1]):
            raise UsageError(
                f'inputs are "{self.input_sharding}", targets "{self.target_sharding}": say by output_sharding (or '
                f'target_sharding) that the batch is cut over {",".join(inputs[0][1])} there too'
            )

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes along which the targets are cut, and so the loss is summed."""
        return Spec.parse(self.target_sharding).axes

    def batch_span(self, samples: int) -> slice:
        """This rank's part of so many samples: of the first dim of its inputs."""
        dims = Spec.parse(self.input_sharding).dims
        axes = dims[0][1] if dims else ()
        return nested_span(samples, axes, self.mesh.axes, self.mesh.coordinates)

    def batch_parts(self) -> int:
        """In how many parts a micro-batch is cut: it must hold at least so many samples."""
        dims = Spec.parse(self.input_sharding).dims
        return self.mesh.axis_size(dims[0][1]) if dims else 1

    def count(self, batch: Batch) -> float:
        """The number of terms in the global mean: of all targets that are not masked, over all ranks."""
        if batch.count is not None:
            return batch.count
        local = sum(float(m.targets.size if m.mask is None else m.mask.sum()) for m in batch.micro_batches)
        return self._sum_over_batch(local)

    def step(self, batch: Batch, loss: Loss | None = None) -> float:
        """Forward and backward of every micro-batch; sets ``gradients``. Returns the global mean loss.

        ``loss(outputs, targets, count=n)`` returns this rank's share of the mean over n terms, and its gradient.
        """
        loss = loss or self.loss
        self._check_shardings()
        count = self.count(batch)
        total, gradients = 0.0, {}
        for index, micro in enumerate(batch.micro_batches):
            with self.micro_batch(index):
                outputs = self.forward(micro.inputs)
                gradient = None
                if outputs is not None:
                    value, gradient = loss(outputs, micro.targets, **micro.loss_options(count))
                    total += value
                for name, array in self.backward(gradient).items():
                    gradients[name] = gradients[name] + array if name in gradients else array
        if self.mesh.checks and not self.__dict__.get("_replicas_checked"):  # in the first step
            check_replicas(self, gradients)
            self._replicas_checked = True
        self.gradients = gradients
        return self._sum_over_batch(total)

    def evaluate(self, batch: Batch, loss: Loss | None = None) -> float:
        """The global mean loss, without a backward and without a tape."""
        loss = loss or self.loss
        self._check_shardings()
        count, total = self.count(batch), 0.0
        with self.inference():
            for micro in batch.micro_batches:
                outputs = self.forward(micro.inputs)
                if outputs is not None:
                    total += loss(outputs, micro.targets, **micro.loss_options(count))[0]
        return self._sum_over_batch(total)

    def _sum_over_batch(self, value: float) -> float:
        axes = self.batch_axes
        if not axes:
            return value
        return float(self.all_reduce(np.array(value, np.float64), over=axes, label="loss"))

    # --- serving -----------------------------------------------------------------------------------------

    def inference_loop(self, input_stream: Iterable[Array] | None, output_stream: Writer | None) -> None:
        """Answer every input with an output: rank 0 reads whole inputs and writes whole outputs.

        Called on all ranks; what ranks other than 0 give is not looked at. ``input_stream`` is anything to
        iterate over; ``output_stream`` anything with ``write(array)``. Each input is cut by ``input_sharding``
        and the output gathered by ``output_sharding``. No tape is kept.
        """
        serve(self, input_stream, output_stream)
