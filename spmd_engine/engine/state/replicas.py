"""Replicas must have equal gradients: what a forgotten all_reduce looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.errors import UsageError

if TYPE_CHECKING:
    from spmd_engine.engine.base import ShardedEngine


def check_replicas(engine: ShardedEngine, gradients: Mapping[str, Array]) -> None:
    """Raise UsageError if ranks that own the same block of a parameter have different gradients of it.

    Compares sums of magnitudes, so it finds a missing reduction, not a last bit. Collective.
    """
    for name in sorted(engine.parameters):
        sharding = engine.owned_sharding(name)
        axes = tuple(axis for axis in engine.mesh.axes if axis not in sharding.axes)
        if name not in gradients or not axes:
            continue
        size = np.array([float(abs(gradients[name]).sum(dtype=np.float64))])
        sizes = engine.all_gather(size, over=axes, label="check")
        if np.allclose(sizes, sizes[0], rtol=1e-4, equal_nan=True):
            continue
        sizes = sizes.reshape([engine.mesh.axes[axis] for axis in axes])
        unlike = [
            axis
            for dim, axis in enumerate(axes)
            if not np.allclose(sizes, sizes.take([0], axis=dim), rtol=1e-4, equal_nan=True)
        ]
        over = ",".join(unlike)
        cut = f'cut as "{sharding}"' if sharding.axes else "whole"  # letters that nobody wrote say nothing
        raise UsageError(
            f"the gradient of {name!r} differs between ranks of {over}, along which it is {cut}: is an "
            f"all_reduce over {over} missing in backward?"
        )
