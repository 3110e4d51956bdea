"""Random batches to verify with: functions of seed, step and global index alone, whatever the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd_engine.comm.agreement import on_rank_zero
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, batch_of
from spmd_engine.errors import UsageError
from spmd_engine.layers.loss import mean_squared_error
from spmd_engine.models import Model
from spmd_engine.sharding.notation import Spec
from spmd_engine.verify.comparison import from_first
from spmd_engine.verify.reference import put_back

Batches = Callable[[ShardedEngine, int], Batch]


def batches_for_model(
    model: Model, size: int, *, length: int = 32, micro_batches: int = 1, seed: int = 0, dtype: Any = np.float64
) -> Batches:
    """Batches of ``size`` samples as the model wants them; of sequences, ``length`` positions (at most its context).

    Tokens and classes are drawn evenly, vectors from a normal distribution.
    """
    common = {"b": size, "s": min(length, model.context)}
    first = {**model.layers[0][1].sizes, **common}
    last: dict[str, int] = {}  # of each letter, in the last layer that has it
    for _, layer in model.layers:
        last |= layer.sizes
    last |= common
    inputs = [size, *model.sample] if model.sample else [first[letter] for letter in model.inputs.split()]
    targets = [last[letter] for letter in model.targets.split()]
    classes = last[model.outputs.split()[-1]] if model.targets != model.outputs else 0  # one of so many, or numbers

    def batch(engine: ShardedEngine, step: int) -> Batch:
        draw = np.random.default_rng([seed, step])
        x = draw.integers(0, model.vocabulary, inputs) if model.vocabulary else draw.standard_normal(inputs)
        y = draw.integers(0, classes, targets) if classes else draw.standard_normal(targets)
        x, y = (array.astype(dtype) if array.dtype.kind == "f" else array for array in (x, y))
        return batch_of(x, y, engine, micro_batches, step)

    return batch


def batches_of_shape(
    engine: ShardedEngine,
    reference: ShardedEngine | None,
    shape: Sequence[int],
    *,
    micro_batches: int = 1,
    seed: int = 0,
    below: int | None = None,
    classes: int | None = None,
) -> Batches:
    """Batches for an engine of one's own: normal inputs of this shape, the batch first, and targets like its outputs.

    With ``below``, inputs are whole numbers from 0 up to it (tokens) instead. With ``classes``, targets are whole
    numbers below that, shaped like the outputs without their last dim. Collective: rank 0 asks the reference for its
    outputs' shape. Raises UsageError if the engine's targets are of another shape.
    """
    _check_targets(engine, classes)

    def ask() -> tuple[tuple[int, ...], str]:
        dtype = np.result_type(*(parameter.dtype for parameter in reference.parameters.values()))
        with put_back(reference), reference.inference():
            outputs = reference.forward(reference.backend.asarray(inputs(0, dtype)))
        if not outputs.ndim or len(outputs) != shape[0]:
            raise UsageError(
                f"inputs of shape {tuple(shape)} give outputs of {outputs.shape}; both must begin with the batch"
            )
        if classes and (outputs.ndim < 2 or outputs.shape[-1] < classes):
            raise UsageError(
                f"{classes} classes, but outputs of shape {outputs.shape}: their last dim must have a score for each"
            )
        return outputs.shape[:-1] if classes else outputs.shape, dtype.name

    def inputs(step: int, dtype: Any) -> np.ndarray:
        draw = np.random.default_rng([seed, step])
        return draw.standard_normal(shape).astype(dtype) if below is None else draw.integers(0, below, shape)

    target_shape, dtype = from_first(engine.group(), on_rank_zero(engine.group(), ask))

    def batch(engine: ShardedEngine, step: int) -> Batch:
        draw = np.random.default_rng([seed, step, 1])
        if classes:
            targets = draw.integers(0, classes, target_shape)
        else:
            targets = draw.standard_normal(target_shape).astype(dtype)
        return batch_of(inputs(step, dtype), targets, engine, micro_batches, step)

    return batch


def _check_targets(engine: ShardedEngine, classes: int | None) -> None:
    """Raise UsageError if what can be made up is not what the engine wants."""
    targets, outputs = Spec.parse(engine.target_sharding), Spec.parse(engine.output_sharding)
    if not classes and targets != outputs:
        raise UsageError(
            f'targets are "{targets}", outputs "{outputs}". Of targets unlike the outputs, only classes can be made '
            "up: --classes N. For others, bring batches, and a loss, of your own to spmd_engine.verify.verify"
        )
    wanted = Spec(outputs.dims[:-1]) if len(outputs.dims) > 1 else outputs  # "b/data" is the batch, and what follows
    if classes and targets != wanted:
        raise UsageError(
            f'--classes {classes}: targets are then like outputs, "{outputs}", without their last dim: say in the '
            f'engine target_sharding = "{wanted}"'
        )
    if classes and engine.loss is mean_squared_error:
        raise UsageError(
            f"--classes {classes}: the engine's loss is the mean squared error, of no classes. Say in the engine, for "
            "instance, loss = staticmethod(cross_entropy), from spmd_engine.layers"
        )
