"""Loss functions and metrics, independent of models: ``loss(outputs, targets) -> (value, gradient)``.

``count`` is the number of terms of the *global* mean (all ranks, all micro-batches); by default the number of
terms in this call. The value is this rank's share of the mean, so that values and gradients need only be summed. It is
a float, or on a device an array of no dims, for which the host need not wait.
"""

from __future__ import annotations

from math import inf

from spmd_engine.arrays.activations import cross_entropy_gradient, exponentiate, scores_of_targets
from spmd_engine.arrays.backend import Array, backend_of, number_of
from spmd_engine.arrays.fused import chunks
from spmd_engine.arrays.precision import accumulated_in, is_half, rounded, widened
from spmd_engine.comm.group import Group
from spmd_engine.errors import UsageError, described, is_array


def mean_squared_error(
    outputs: Array, targets: Array, *, count: float | None = None, mask: Array | None = None
) -> tuple[float, Array]:
    """sum(mask · (outputs - targets)^2) / count, for any shape, and its gradient; the default mask is 1.

    Raises UsageError if the shapes differ.
    """
    _check_arrays("mean_squared_error", outputs, targets, mask)
    if outputs.shape != targets.shape:
        raise UsageError(f"mean_squared_error: outputs of shape {outputs.shape}, targets of {targets.shape}")
    difference = widened(outputs) - widened(targets)
    if difference.dtype.kind in "iub":  # the gradient would be 0
        raise UsageError(f"mean_squared_error: outputs of {outputs.dtype}, targets of {targets.dtype}; give floats")
    weight = 1.0 / _terms("mean_squared_error", count, outputs.size if mask is None else mask)
    weighted = difference if mask is None else difference * mask.astype(difference.dtype)
    value = number_of((weighted * difference).sum()) * weight
    return value, weighted * difference.dtype.type(2.0 * weight)


def cross_entropy(
    outputs: Array,
    targets: Array,
    *,
    count: float | None = None,
    mask: Array | None = None,
    over: Group | None = None,
    start: int = 0,
) -> tuple[float, Array]:
    """Mean over tokens of -log softmax(outputs)[target], and its gradient (written over ``outputs``).

    outputs[... v], targets[...] of global indices into v, mask[...]: 0 hides a token. Where v is sharded, ``over``
    is the group of ranks that hold v and ``start`` the first index of this rank: the group reduces maxima, sums and
    the targets' scores; it never gathers the outputs. Raises UsageError for shapes that do not match and for targets
    that are not classes. After Shoeybi et al., "Megatron-LM" (2019).
    """
    _check_arrays("cross_entropy", outputs, targets, mask)
    xp = backend_of(outputs).xp
    _check_rows("cross_entropy", outputs, targets, mask)
    if over is None and not start:  # otherwise targets may be classes of other ranks
        check_classes(targets, outputs.shape[-1], mask)
    scores = outputs.reshape(targets.size, outputs.shape[-1])
    local_targets = targets.reshape(-1).astype(xp.int64) - start  # small unsigned integers would wrap
    tokens, width = scores.shape
    wide = accumulated_in(scores.dtype)
    weights = xp.ones(tokens, wide) if mask is None else mask.reshape(-1).astype(wide)
    count = _terms("cross_entropy", count, weights)

    top = widened(scores.max(axis=1)) if width else xp.full(tokens, -xp.inf, wide)
    if over is not None:
        top = over.all_reduce(top, "max", label="loss")
    sums = xp.zeros((2, tokens), wide)  # sums of exponentials; scores of the targets
    for part in chunks(scores):
        piece = widened(scores[part])
        sums[1, part] = scores_of_targets(piece, local_targets[part], top[part])
        exponentiate(piece, top[part, None])
        piece.sum(axis=1, out=sums[0, part])
    if over is not None:
        sums = over.all_reduce(sums, label="loss")
    value = number_of(((xp.log(sums[0]) - sums[1]) * weights).sum(dtype=xp.float64)) / count

    weights /= wide.type(count)
    if not is_half(scores.dtype):
        cross_entropy_gradient(scores, sums[0], weights, local_targets)
        return value, scores.reshape(outputs.shape)
    for part in chunks(scores):  # exponentials are computed again: rounded ones would be rounded twice
        piece = widened(scores[part])
        exponentiate(piece, top[part, None])
        cross_entropy_gradient(piece, sums[0, part], weights[part], local_targets[part])
        rounded(piece, scores.dtype, scores[part])
    return value, scores.reshape(outputs.shape)


def _check_arrays(name: str, outputs: Array, targets: Array, mask: Array | None) -> None:
    for role, x in ("outputs", outputs), ("targets", targets), ("mask", targets if mask is None else mask):
        if not is_array(x):
            raise UsageError(f"{name}: {role} is {described(x)}; give an array")


def _terms(name: str, count: float | None, own: int | Array) -> float:
    """The number of terms of the global mean, or 1 if there are none; ``own``: those of this call, or their weights."""
    terms = count or float(own if isinstance(own, int) else own.sum())
    if count is not None and not 0 <= count == terms < inf:
        raise UsageError(f"{name}: count is {count}; give the number of terms of the global mean")
    return terms or 1.0


def _check_rows(name: str, outputs: Array, targets: Array, mask: Array | None) -> None:
    if targets.size * outputs.shape[-1] != outputs.size:
        raise UsageError(
            f"{name}: outputs of shape {outputs.shape}, targets of {targets.shape}; give one class for each row"
        )
    if mask is not None and mask.size != targets.size:
        raise UsageError(f"{name}: mask of shape {mask.shape}, targets of {targets.shape}; give a number for each")


def check_classes(targets: Array, classes: int, mask: Array | None = None) -> None:
    """Raise UsageError for a target that is not a class: the loss would ignore it silently. Host arrays only."""
    if backend_of(targets).on_device or not targets.size:
        return
    counted = targets if mask is None else targets[mask.reshape(targets.shape) != 0]
    if targets.dtype.kind not in "iu" or (counted.astype("uint64") >= classes).any():  # -1 becomes very large
        values = f"{targets.dtype} from {targets.min()} to {targets.max()}"
        raise UsageError(f"targets must be whole numbers from 0 to {classes - 1}; they are {values}")


# --- Metrics: counts of targets, independent of models, and summed like losses


def right_classes(
    outputs: Array, targets: Array, *, mask: Array | None = None, over: Group | None = None, start: int = 0
) -> float:
    """The number of targets[...] that are the class of the largest score in outputs[... c]; of a tie, the lowest class.

    Targets are global class numbers; mask[...] is 0 for a target that does not count. Where c is sharded, ``over`` is
    the group of ranks that hold c and ``start`` the first class of this rank: the group reduces largest scores and
    their classes, and all its ranks get the same result.
    """
    _check_arrays("right_classes", outputs, targets, mask)
    xp = backend_of(outputs).xp
    _check_rows("right_classes", outputs, targets, mask)
    scores = outputs.reshape(targets.size, outputs.shape[-1])
    count, width = scores.shape
    no_class = xp.iinfo(xp.int64).max  # larger than every class
    top = scores.max(axis=1) if width else xp.full(count, -xp.inf, scores.dtype)
    if over is not None:
        top = over.all_reduce(top, "max", label="metric")
    numbers = xp.arange(start, start + width)
    predicted = xp.full(count, no_class)
    if width:  # CuPy takes no minimum of nothing
        predicted = xp.where(scores == top[:, None], numbers, no_class).min(axis=1)
    if over is not None:
        predicted = over.all_reduce(predicted, "min", label="metric")
    right = predicted == targets.reshape(-1).astype(xp.int64)
    return number_of(right.sum() if mask is None else (right * mask.reshape(-1)).sum())
