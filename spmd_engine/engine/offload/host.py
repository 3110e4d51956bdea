"""Offloaded arrays of a device in the host's memory."""

from __future__ import annotations

import numpy as np

from spmd_engine.arrays import Backend
from spmd_engine.engine.offload.target import OffloadTarget


class HostTarget(OffloadTarget):
    """Pinned memory, from which the device copies fastest."""

    where, remedy, needs_device = "memory of the host", "Use --offload-to disk", True

    def __init__(self, folder: str, backend: Backend) -> None:
        super().__init__()
        self._pinned, self._blocks = backend.pinned_empty, dict[int, np.ndarray]()

    def grow(self, offset: int, size: int) -> None:
        block = self._pinned(size, np.uint8)
        block[...] = 0
        self._blocks[offset] = block

    def read(self, offset: int, view: memoryview) -> int:
        np.asarray(view)[...] = self._block(offset, len(view))
        return len(view)

    def write(self, offset: int, view: memoryview) -> int:
        self._block(offset, len(view))[...] = np.asarray(view)
        return len(view)

    def _block(self, offset: int, size: int) -> np.ndarray:
        first = max(start for start in tuple(self._blocks) if start <= offset)
        return self._blocks[first][offset - first : offset - first + size]
