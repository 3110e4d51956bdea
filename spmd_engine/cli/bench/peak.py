"""How fast this machine multiplies matrices: what other speeds are shares of."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from threadpoolctl import threadpool_limits

_SIZE = 1024


def sgemm_peak(rounds: int = 20) -> float:
    """Floating-point operations a second of one core's float32 matrix products: the best of some."""
    a, b = (np.random.default_rng(seed).standard_normal((_SIZE, _SIZE)).astype(np.float32) for seed in (0, 1))
    out = np.empty_like(a)
    seconds = []
    with threadpool_limits(1, "blas"):
        for _ in range(rounds):
            began = perf_counter()
            np.matmul(a, b, out=out)
            seconds.append(perf_counter() - began)
    return 2 * _SIZE**3 / min(seconds)
