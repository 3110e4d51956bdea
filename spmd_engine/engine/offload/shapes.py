"""Offloaded arrays in a dry run: shapes without bytes, whose transfers are counted."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.meter import Memory, meter
from spmd_engine.engine.offload.target import THREADS, OffloadTarget


class ShapesTarget(OffloadTarget):
    """No place: what is read and written counts on the meter of the rank."""

    where, has_bytes, arrays = "dry run", False, ShapedArray
    smallest = 1  # what a layer saves is one array here

    def __init__(self, holds_buffers: bool = False) -> None:
        """``holds_buffers``: whether its threads' buffers are always in memory, as with offloaded activations."""
        super().__init__()
        size = THREADS * self.piece * holds_buffers
        self._held = meter().allocate(size, "communication buffers", "offload")

    def grow(self, offset: int, size: int) -> None:
        """Shapes need no room."""

    def read(self, offset: int, view: memoryview) -> int:
        meter().transfer(len(view), 0)
        return len(view)

    def write(self, offset: int, view: memoryview) -> int:
        meter().transfer(0, len(view))
        return len(view)

    def start_read(self, offset: int, into: ShapedArray) -> Future[ShapedArray]:
        meter().transfer(into.nbytes, 0)
        return _done(into)

    def start_load(self, offset: int, size: int) -> Future[Memory]:
        with meter().taking("activations", "read ahead"):
            return _CountedWhenNeeded(meter().allocate(size))

    def start_store(self, offset: int, memory: Memory) -> Future[None]:
        meter().transfer(0, memory.nbytes)
        return _done(None)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class _CountedWhenNeeded(Future[Memory]):
    """A read that counts once a rank waits for it, as the simulation of a step expects."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.set_result(memory)

    def result(self, timeout: float | None = None) -> Memory:
        memory = super().result(timeout)
        meter().transfer(memory.nbytes, 0)
        return memory
