"""Groups of few channels, several side by side as one: where a vector of outputs is made at once, that is less work.

The weights between channels of different groups are then 0, and gradients of these are left out.
"""

from __future__ import annotations

import numpy as np


def side_by_side(groups: int, outputs: int, wide: int) -> int:
    """How many of the groups, of so many outputs each, to take as one: as many as divide them and fill no more than
    ``wide`` outputs."""
    return max(m for m in range(1, max(1, min(groups, wide // max(1, outputs))) + 1) if groups % m == 0)


def joined(w: np.ndarray, groups: int, m: int) -> np.ndarray:
    """w[k l i (g o)] of convolutions in ``groups`` as [k l (m i) (g o)], in groups of m of these."""
    k, l, i, f = w.shape
    o = f // groups
    wide = np.zeros_like(w, shape=(k, l, m, i, groups // m, m, o))
    parts = w.reshape(k, l, i, groups // m, m, o)
    for each in range(m):
        wide[:, :, each, :, :, each] = parts[:, :, :, :, each]
    return wide.reshape(k, l, m * i, f)


def parted(wide: np.ndarray, groups: int, m: int) -> np.ndarray:
    """Of gradients [k l (m i) (g o)] those of w[k l i (g o)]: the adjoint of ``joined``."""
    k, l, mi, f = wide.shape
    i, o = mi // m, f // groups
    blocks = wide.reshape(k, l, m, i, groups // m, m, o)
    w = np.empty_like(wide, shape=(k, l, i, groups // m, m, o))
    for each in range(m):
        w[:, :, :, :, each] = blocks[:, :, each, :, :, each]
    return w.reshape(k, l, i, f)
