"""Unlike nodes: how long each stage of a plan takes for what takes the first rank a second.

Along axes that cut samples ranks get as many as suit their speeds, as ``unequal.work_shares`` will have it; along
others all wait for the slowest.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from spmd_engine.engine.state.split_weights import WORK, Shares
from spmd_engine.planning.machine.machine import Machine
from spmd_engine.planning.search.placement import shares
from spmd_engine.planning.search.search_space import PIPE, Candidate


def stage_paces(
    machine: Machine, seconds: Mapping[str, float], candidate: Candidate, given: Shares
) -> np.ndarray | None:
    """Paces, float64[stages]; None where all ranks are alike. ``seconds``: of the same work by the name of a node's
    kind; ``given``: shares of samples that are not to be chosen."""
    if not machine.unlike:
        return None
    first = seconds[machine.node(0).name]
    ranks = np.array([seconds[node.name] / first for _, node in machine.places[: candidate.ranks]])
    paces = ranks.reshape([size for _, size in candidate.axes])
    names = [axis for axis, _ in candidate.axes]
    for axis in [name for name in names if name not in (PIPE, *WORK)]:
        paces = paces.max(axis=names.index(axis), keepdims=True)
    for axis in [name for name in names if name in WORK]:
        along = names.index(axis)
        size, others = paces.shape[along], candidate.batch_ranks // paces.shape[along]
        samples = candidate.batch_size // candidate.micro_batches // others
        # shares are of a whole axis: of all that is on the other axes, the slowest counts
        slowest = np.moveaxis(paces, along, 0).reshape(size, -1).max(axis=1)
        counts = _counts(slowest, samples, given.get(axis))
        shape = [size if number == along else 1 for number in range(len(names))]
        paces = (paces * counts.reshape(shape) / counts.mean()).max(axis=along, keepdims=True)
    return paces.reshape(-1)


def _counts(paces: np.ndarray, samples: int, given: tuple[int, ...] | None) -> np.ndarray:
    """Samples of each rank along an axis."""
    if given is not None:
        return np.array(given, float)
    if samples < len(paces):
        return np.ones(len(paces))
    counts = np.array(shares(list(1 / paces), samples), float)
    return np.maximum(counts, 1.0)
