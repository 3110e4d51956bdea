"""ShardedEngine: what a sharded model must define, and what it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.mesh import Mesh, Over
from spmd_engine.engine.batch import Batch
from spmd_engine.engine.holdings import Holdings
from spmd_engine.engine.replicas import check_replicas
from spmd_engine.engine.serving import Writer, serve
from spmd_engine.engine.tape import Tape, Tapes
from spmd_engine.errors import UsageError
from spmd_engine.layers.loss import mean_squared_error
from spmd_engine.sharding.notation import Spec

Loss = Callable[..., tuple[float, Array]]


class ShardedEngine(Holdings, ABC):
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

    input_sharding: str = ""
    output_sharding: str = ""
    loss: Loss = staticmethod(mean_squared_error)
    input_gradient: Array | None = None  #: of the last backward
    checks_replicas: bool = True  #: whether the next step compares the gradients of ranks that hold the same block

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

    # --- training ----------------------------------------------------------------------------------------

    @property
    def target_sharding(self) -> str:
        return self.output_sharding

    def _check_shardings(self) -> None:
        """The batch must be cut alike in inputs and targets, or the loss is not what the gradients sum to."""
        inputs, targets = (
            spec.cuts_of(spec.letters[0]) if spec.dims else ()
            for spec in map(Spec.parse, (self.input_sharding, self.target_sharding))
        )
        if inputs and targets != inputs:
            raise UsageError(
                f'inputs are "{self.input_sharding}", targets "{self.target_sharding}": say by output_sharding (or '
                f'target_sharding) that the batch is cut over {",".join(axis for axis, _ in inputs)} there too, alike'
            )

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes along which the targets are cut, and so the loss is summed."""
        return Spec.parse(self.target_sharding).axes

    def batch_span(self, samples: int) -> slice:
        """This rank's part of so many samples: of the first dim of its inputs."""
        spec = Spec.parse(self.input_sharding)
        return spec.part(0, samples, self.mesh) if spec.dims else slice(0, samples)

    def cut_rows(self, inputs: Array, targets: Array | None, *mask: Array) -> list[Array | None]:
        """Samples that are whole beyond their first dim, cut along the others as the shardings say."""
        shardings = (self.input_sharding, self.target_sharding, self.target_sharding)
        return [_cut_row(x, text, self.mesh) for x, text in zip((inputs, targets, *mask), shardings, strict=False)]

    def join_outputs(self, y: Array, label: str = "") -> Array:
        """The whole outputs, from each rank's block of them. Collective over the axes that cut them."""
        return Spec.parse(self.output_sharding).gather(y, self.mesh, label=label) if self.output_sharding else y

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
        if self.mesh.checks and self.checks_replicas:
            check_replicas(self, gradients)
            self.checks_replicas = False  # a reduction that is there once is there in every step
        self.gradients = gradients
        return self._sum_loss(total)

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
        return self._sum_loss(total)

    def _sum_loss(self, value: float) -> float:
        """The global loss of all ranks' shares."""
        return self._sum_over_batch(value)

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


def _cut_row(x: Array | None, text: str, mesh: Mesh) -> Array | None:
    spec = Spec.parse(text)
    if x is None or not any(axes for _, axes in spec.dims[1:]):
        return x
    beyond = Spec(spec.dims[1:], spec.weights).block(x.shape[1:], mesh)
    return x[(slice(None), *beyond)]
