"""The memory and the work of meta arrays over time.

Each rank of a dry run has a ``Meter``; ``metered`` sets the one of this thread. Meta arrays allocate memory from it and
free it with their last view, as real arrays do, so that it holds at any moment what a rank would hold.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from spmd_engine.errors import UsageError

TEMPORARIES = "temporaries"

#: The host's kernels that compute products in the place of BLAS; a machine file may have a speed for each.
KERNELS = CONVOLUTION, CONVOLUTION_WEIGHTS = "convolution", "convolution_weights"

_current = threading.local()


class Memory:
    """A number of bytes that some views share; they are freed with the last of these."""

    __slots__ = ("meter", "nbytes", "kind", "what", "number", "written", "shared", "__weakref__")

    def __init__(self, meter: Meter, size: int, kind: str, what: str) -> None:
        self.meter, self.nbytes, self.kind, self.what = meter, size, kind, what
        self.written = False
        self.shared = False  #: whether ranks of the node share it
        self.number = -1

    def __del__(self) -> None:
        self.meter.release(self)


@dataclass
class Work:
    """Computed work: matrix products by (batch, m, n, k, itemsize, fused, kernel), and elementwise
    operations."""

    products: Counter = field(default_factory=Counter)
    elements: int = 0
    calls: int = 0
    read: int = 0  #: bytes
    written: int = 0  #: bytes
    loaded: int = 0  #: bytes that come back from where they were offloaded
    stored: int = 0  #: bytes that are offloaded
    waits: int = 0  #: how often the host waits for a device
    copies: int = 0  #: arrays that are copied to a device


@dataclass(frozen=True)
class Held:
    """The peak of the memory, by kind, and after which event it was reached."""

    total: int
    by_kind: dict[str, int]
    event: int


class Meter:
    """Counts for one rank. ``choose``: the outcome of choices that depend on data, "balanced" or "worst".

    ``lenient``: meta arrays that code writes into its own arrays count as zeros. ``on_device``: calls are launches.
    """

    def __init__(self, choose: str = "balanced", *, lenient: bool = False, on_device: bool = False) -> None:
        self.choose, self.lenient, self.on_device = choose, lenient, on_device
        self.kind, self.what = TEMPORARIES, ""  #: what the memory that is allocated now holds
        self.held: Counter = Counter()
        self.total = 0
        #: bytes (negative: freed; 0: relabelled), the memory's number, its kind, and what it is
        self.events: list[tuple[int, int, str, str]] = []
        self.notes: dict[str, None] = {}  #: assumptions about values, in order
        self.work = Work()
        self.constants: dict[Hashable, int] = {}  #: bytes that loops cache, by function and arguments
        self.times = 1  #: how often the current work counts
        #: memory of the current phase, by weak references, so that it can be freed before the phase ends
        self._young: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._turn = 0
        self._count = 0
        self._top = Held(0, {}, 0)

    # --- memory ------------------------------------------------------------------------------------------

    def allocate(self, size: int, kind: str | None = None, what: str | None = None) -> Memory:
        """Allocate memory, until the last reference to it is gone."""
        memory = Memory(self, size, kind or self.kind, self.what if what is None else what)
        if size:
            memory.number = self._count = self._count + 1
            if memory.kind == TEMPORARIES:
                self._young[memory.number] = memory
            self.held[memory.kind] += size
            self.total += size
            self.events.append((size, memory.number, memory.kind, memory.what))
            if self.total > self._top.total:
                self._top = Held(self.total, dict(self.held), len(self.events))
        return memory

    def release(self, memory: Memory) -> None:
        """Free memory."""
        if memory.nbytes:
            self.held[memory.kind] -= memory.nbytes
            self.total -= memory.nbytes
            self.events.append((-memory.nbytes, memory.number, memory.kind, memory.what))
            self._young.pop(memory.number, None)

    def relabel(self, memory: Memory, kind: str, what: str | None = None) -> None:
        """Count memory as of another kind from now on."""
        if memory.nbytes and memory.kind != kind:
            self.held[memory.kind] -= memory.nbytes
            self.held[kind] += memory.nbytes
            self._young.pop(memory.number, None)
        memory.kind, memory.what = kind, memory.what if what is None else what
        if memory.number >= 0:  # memory of 0 bytes has no events
            self.events.append((0, memory.number, memory.kind, memory.what))

    def keep_young(self, kind: str) -> None:
        """End a phase: its remaining memory is of this kind, and no longer temporary."""
        for memory in tuple(self._young.values()):
            self.relabel(memory, kind)
        self._young.clear()

    def take_top(self) -> Held:
        """The peak of the memory since the last call."""
        top, self._top = self._top, Held(self.total, dict(self.held), len(self.events))
        return top

    @contextmanager
    def taking(self, kind: str, what: str = "") -> Iterator[None]:
        """Inside the context, memory is allocated with this kind."""
        before, (self.kind, self.what) = (self.kind, self.what), (kind, what)
        try:
            yield
        finally:
            self.kind, self.what = before

    # --- work --------------------------------------------------------------------------------------------

    def take_work(self) -> Work:
        """The work since the last call."""
        work, self.work = self.work, Work()
        return work

    def product(self, batch: int, m: int, n: int, k: int, itemsize: int, fused: float = 0.0, kernel: str = "") -> None:
        """Count ``batch`` matrix products of [m k] by [k n], read once and written once. ``fused``, the share of the
        speed that is reached by a kernel that also consumes them: then they are not written. ``kernel``: see
        ``Product``."""
        work, times = self.work, self.times
        work.products[batch, m, n, k, itemsize, fused, kernel] += times
        work.calls += times
        work.read += times * batch * (m * k + k * n) * itemsize
        work.written += times * batch * m * n * itemsize * (not fused)

    def elementwise(self, elements: int, read: int, written: int) -> None:
        """Count one operation on a number of ``elements``, which reads and writes these numbers of bytes."""
        work, times = self.work, self.times
        work.elements += times * elements
        work.calls += times
        work.read += times * read
        work.written += times * written

    def wait(self, times: int = 1) -> None:
        """Count how often the host waits for a device."""
        self.work.waits += self.times * times

    def copy(self) -> None:
        """Count an array that is copied to a device."""
        self.work.copies += self.times

    def transfer(self, loaded: int, stored: int) -> None:
        """Count bytes that come back from where they were offloaded, and that are offloaded."""
        self.work.loaded += self.times * loaded
        self.work.stored += self.times * stored

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Inside the context, all work counts this number of times."""
        before, self.times = self.times, self.times * times
        try:
            yield
        finally:
            self.times = before

    # --- unknown values ------------------------------------------------------------------------

    def assume(self, what: str) -> None:
        """Note an assumption, which replaces unknown values."""
        self.notes[what] = None

    def turn(self) -> int:
        """A number that increases with each call, so that choices differ."""
        self._turn += 1
        return self._turn - 1


def meter() -> Meter:
    """The meter of this thread; raises UsageError if there is none."""
    current = getattr(_current, "meter", None)
    if current is None:
        raise UsageError("an array that is only a shape was used outside of a dry run; it has no values")
    return current


@contextmanager
def metered(meter: Meter) -> Iterator[Meter]:
    """Inside the context, ``meter`` counts the work of this thread on meta arrays."""
    before, _current.meter = getattr(_current, "meter", None), meter
    try:
        yield meter
    finally:
        _current.meter = before
