"""The account of what is done with arrays that have shapes alone: memory held, and work, moment by moment.

Every rank whose step is run on shapes has a ``Meter`` of its own; ``metered`` sets the one that counts in this thread.
Arrays take their memory from it and give it back with their last view, as real ones do, so that what it holds at a
moment is what a rank would hold.
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

#: The host's own kernels that make products, in the place of BLAS: a machine file may have a speed for each.
KERNELS = CONVOLUTION, CONVOLUTION_WEIGHTS = "convolution", "convolution_weights"

_current = threading.local()


class Memory:
    """So many bytes that some views share; they are given back with the last of these."""

    __slots__ = ("meter", "bytes", "kind", "what", "young", "number", "written", "shared", "__weakref__")

    def __init__(self, meter: Meter, size: int, kind: str, what: str) -> None:
        self.meter, self.bytes, self.kind, self.what = meter, size, kind, what
        self.young = True  #: whether it was taken in the phase that is under way
        self.written = False
        self.shared = False  #: whether ranks of the node reach it
        self.number = -1

    def __del__(self) -> None:
        self.meter.release(self)


@dataclass
class Work:
    """What was computed: matrix products by (batch, m, n, k, itemsize, fused, kernel), and what goes element by
    element."""

    products: Counter = field(default_factory=Counter)
    elements: int = 0
    calls: int = 0
    read: int = 0  #: bytes
    written: int = 0  #: bytes


@dataclass(frozen=True)
class Held:
    """The most that was held at a moment, by kind, and after which event that was."""

    total: int
    by_kind: dict[str, int]
    event: int


class Meter:
    """Counts for one rank. ``choose``: the outcome of choices that depend on data, "balanced" or "worst".

    ``lenient``: where code writes shapes into arrays that it made itself, these are taken to be zeros.
    """

    def __init__(self, choose: str = "balanced", *, lenient: bool = False) -> None:
        self.choose, self.lenient = choose, lenient
        self.kind, self.what = TEMPORARIES, ""  #: of what is taken now
        self.held: Counter = Counter()
        self.total = 0
        #: bytes (negative: given back; 0: of another kind now), the memory's number, its kind, and what it is
        self.events: list[tuple[int, int, str, str]] = []
        self.notes: dict[str, None] = {}  #: what was assumed about values, in order
        self.work = Work()
        self.constants: dict[Hashable, int] = {}  #: bytes that loops find once, and keep beside all arrays, by what for
        self.times = 1  #: how often the work counts that is done now
        #: what the phase under way has taken; by weak references, so that it can be freed before the end
        self._young: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._turn = 0
        self._count = 0
        self._top = Held(0, {}, 0)

    # --- memory ------------------------------------------------------------------------------------------

    def allocate(self, size: int, kind: str | None = None, what: str | None = None) -> Memory:
        """Take memory, until the last reference to it is gone."""
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
        """Take memory back."""
        if memory.bytes:
            self.held[memory.kind] -= memory.bytes
            self.total -= memory.bytes
            self.events.append((-memory.bytes, memory.number, memory.kind, memory.what))
            self._young.pop(memory.number, None)

    def relabel(self, memory: Memory, kind: str, what: str | None = None) -> None:
        """Count memory as of another kind from now on."""
        if memory.bytes and memory.kind != kind:
            self.held[memory.kind] -= memory.bytes
            self.held[kind] += memory.bytes
            self._young.pop(memory.number, None)
        memory.kind, memory.what = kind, memory.what if what is None else what
        if memory.number >= 0:  # of nothing, nothing was written down
            self.events.append((0, memory.number, memory.kind, memory.what))

    def keep_young(self, kind: str) -> None:
        """A phase ends: what it leaves behind is of this kind, and no longer temporary."""
        for memory in tuple(self._young.values()):
            self.relabel(memory, kind)
        self._young.clear()

    def take_top(self) -> Held:
        """The most that was held since the last call."""
        top, self._top = self._top, Held(self.total, dict(self.held), len(self.events))
        return top

    @contextmanager
    def taking(self, kind: str, what: str = "") -> Iterator[None]:
        """Meanwhile memory is taken for this."""
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
        """``batch`` matrix products of [m k] by [k n], read once and written once; where ``fused``, a share of the
        speed that a kernel reaches which uses them up where they are made, never written. ``kernel``: as of
        ``Product``."""
        work, times = self.work, self.times
        work.products[batch, m, n, k, itemsize, fused, kernel] += times
        work.calls += times
        work.read += times * batch * (m * k + k * n) * itemsize
        work.written += times * batch * m * n * itemsize * (not fused)

    def elementwise(self, elements: int, read: int, written: int) -> None:
        """One operation on so many elements, which reads and writes so many bytes."""
        work, times = self.work, self.times
        work.elements += times * elements
        work.calls += times
        work.read += times * read
        work.written += times * written

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Meanwhile all work counts so often."""
        before, self.times = self.times, self.times * times
        try:
            yield
        finally:
            self.times = before

    # --- unknown values ------------------------------------------------------------------------

    def assume(self, what: str) -> None:
        """Note what is taken to be so, since there are no values to look at."""
        self.notes[what] = None

    def turn(self) -> int:
        """A number that is one more each time: by which choices differ."""
        self._turn += 1
        return self._turn - 1


def meter() -> Meter:
    """The one that counts in this thread; raises UsageError where nothing is run on shapes."""
    current = getattr(_current, "meter", None)
    if current is None:
        raise UsageError("an array that is only a shape was computed with outside of an analysis; it has no values")
    return current


@contextmanager
def metered(meter: Meter) -> Iterator[Meter]:
    """Meanwhile ``meter`` counts what this thread does with shapes."""
    before, _current.meter = getattr(_current, "meter", None), meter
    try:
        yield meter
    finally:
        _current.meter = before
