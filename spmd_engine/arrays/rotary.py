"""Rotary positions: rotation of pairs of numbers by angles that grow with the position, forward and backward."""

from __future__ import annotations

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.factors import halves, over_heads
from spmd_engine.arrays.fused import fused
from spmd_engine.arrays.precision import accumulated_in

Rotation = tuple[Array, Array]  #: cosines and sines of n pairs at each position, each [s n] or [b s n]
Rope = tuple[Rotation, bool]  #: what ``rotate`` needs besides x


def rotation_at(positions: Array, frequencies: Array, like: Array) -> Rotation:
    """The rotation of each pair at ``positions[s]``, or ``[b s]``, by ``frequencies[n]`` in radians a position.

    Angles are float64, which keeps a position of a million to 1e-10; cosines and sines have the dtype of sums of
    ``like``.
    """
    xp, dtype = backend_of(like).xp, accumulated_in(like.dtype)
    angles = xp.asarray(positions, xp.float64)[..., None] * xp.asarray(frequencies)
    return xp.cos(angles).astype(dtype), xp.sin(angles).astype(dtype)


@fused
def rotate(x: Array, rotation: Rotation, neighbours: bool, *, back: bool = False) -> Array:
    """x[b s ... k] with its k/2 pairs rotated; ``back``: by the opposite angles, which is also the backward.

    A pair is (x[i], x[i + k/2]), or, with ``neighbours``, (x[2i], x[2i + 1]). If ``rotation`` has n < k/2 pairs, only
    the first 2n numbers of k are rotated, as if there were no others.
    Su et al., "RoFormer" (2021), section 3.4.
    """
    y, width = backend_of(x).xp.empty(x.shape, x.dtype), 2 * rotation[0].shape[-1]
    y[..., width:] = x[..., width:]
    first, second = halves(x[..., :width], neighbours)
    rotated_first, rotated_second = halves(y[..., :width], neighbours)
    cosine, sine = (over_heads(table, x.ndim) for table in rotation)
    if back:
        sine = -sine
    xp = backend_of(x).xp
    xp.multiply(first, cosine, out=rotated_first)
    rotated_first -= second * sine
    xp.multiply(second, cosine, out=rotated_second)
    rotated_second += first * sine
    return y
