"""Random batches to verify with: functions of seed, step and global index alone, whatever the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd_engine.comm.agreement import on_rank_zero
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.engine.batch import Batch, batch_of
from spmd_engine.errors import UsageError
from spmd_engine.models import Model
from spmd_engine.verify.comparison import from_first

Batches = Callable[[ShardedEngine, int], Batch]


def batches_for_model(
    model: Model, size: int, *, length: int = 32, micro_batches: int = 1, seed: int = 0, dtype: Any = np.float64
) -> Batches:
    """Batches of ``size`` samples as the model wants them; of sequences, ``length`` positions (at most its context).

    Tokens and classes are drawn evenly, vectors from a normal distribution.
    """
    common = {"b": size, "s": min(length, model.context)}
    first, last = ({**layer.sizes, **common} for _, layer in (model.layers[0], model.layers[-1]))
    inputs = [first[letter] for letter in model.inputs.split()]
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
) -> Batches:
    """Batches for an engine of one's own: normal inputs of this shape, the batch first, and targets like its outputs.

    With ``below``, inputs are whole numbers from 0 up to it (tokens) instead. Collective: rank 0 asks the reference
    for its outputs' shape. Raises UsageError if the engine's targets are of another shape than its outputs.
    """
    if engine.target_sharding != engine.output_sharding:
        raise UsageError(
            f'targets are "{engine.target_sharding}", outputs "{engine.output_sharding}"; only targets like outputs '
            "can be made up. Bring batches, and a loss, of your own to spmd_engine.verify.verify"
        )

    def ask() -> tuple[tuple[int, ...], str]:
        dtype = np.result_type(*(parameter.dtype for parameter in reference.parameters.values()))
        with reference.inference():
            outputs = reference.forward(reference.backend.asarray(inputs(0, dtype)))
        if not outputs.ndim or len(outputs) != shape[0]:
            raise UsageError(
                f"inputs of shape {tuple(shape)} give outputs of {outputs.shape}; both must begin with the batch"
            )
        return outputs.shape, dtype.name

    def inputs(step: int, dtype: Any) -> np.ndarray:
        draw = np.random.default_rng([seed, step])
        return draw.standard_normal(shape).astype(dtype) if below is None else draw.integers(0, below, shape)

    target_shape, dtype = from_first(engine.group(), on_rank_zero(engine.group(), ask))

    def batch(engine: ShardedEngine, step: int) -> Batch:
        targets = np.random.default_rng([seed, step, 1]).standard_normal(target_shape).astype(dtype)
        return batch_of(inputs(step, dtype), targets, engine, micro_batches, step)

    return batch
