"""Cores that the ranks of a node share evenly."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from spmd_engine.planning.machine import Machine

Act = Callable[[], None]


class Processors:
    """Work on nodes: each node's ranks get min(1, cores / working ranks) of a core each.

    A node's work is kept by the *virtual time* at which it ends: the seconds of a core that each of its working ranks
    has had. So when ranks begin and end, nothing but the speed of that time changes (Parekh and Gallager, 1993).
    """

    def __init__(self, machine: Machine, at: Callable[[float, Act], None]) -> None:
        self.machine, self._at, self._order = machine, at, count()
        self._shared: dict[int, _Shared] = {}

    def work(self, now: float, rank: int, seconds: float, then: Act) -> None:
        """Have a rank work from now on for so many seconds of a core of its own, and call ``then`` when done."""
        number, node = self.machine.places[rank]
        if node.cores is None or node.cores >= node.ranks:
            self._at(now + seconds, then)
            return
        shared = self._shared.setdefault(number, _Shared(node.cores))
        shared.pass_time(now)
        heappush(shared.work, (shared.virtual + seconds, next(self._order), then))
        self._look_again(now, shared)

    def _look_again(self, now: float, shared: _Shared) -> None:
        """Come back when the first work ends, if nothing changes before."""
        shared.version += 1
        if not shared.work:
            return
        version = shared.version
        ends = now + (shared.work[0][0] - shared.virtual) / shared.speed

        def look() -> None:
            if shared.version != version:
                return
            shared.pass_time(ends)
            ended = []
            while shared.work and shared.work[0][0] <= shared.virtual * (1 + 1e-12):
                ended.append(heappop(shared.work)[2])
            self._look_again(ends, shared)
            for then in ended:
                then()

        self._at(ends, look)


class _Shared:
    """The cores of one node, and the work under way."""

    def __init__(self, cores: float) -> None:
        self.cores, self.virtual, self.since, self.version = cores, 0.0, 0.0, 0
        self.work: list[tuple[float, int, Act]] = []

    @property
    def speed(self) -> float:
        """Of virtual time."""
        return min(1.0, self.cores / len(self.work)) if self.work else 1.0

    def pass_time(self, now: float) -> None:
        if self.work:
            self.virtual += (now - self.since) * self.speed
        self.since = now
