"""Values under way: what travels while something else is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd_engine.comm.pending import Pending
from spmd_engine.sharding.shards import Transferred


class Deferred:
    """What ``then`` makes of the result of an operation that is under way.

    ``finish()`` waits for that operation and does what is to be done, which may put another one under way; ``wait()``
    waits for this one, too, and hands the value over, once, and keeps it no longer.
    """

    __slots__ = ("_pending", "_then", "_value")

    def __init__(self, pending: Pending | Transferred | Deferred, then: Callable[[Any], Any]) -> None:
        self._pending: Pending | Transferred | Deferred | None = pending
        self._then: Any = then
        self._value: Any = None

    def finish(self) -> None:
        """Wait for what is under way, and do what is to be done with it; do not wait for what that has begun."""
        if self._pending is not None:
            self._value = self._then(self._pending.wait())
            self._pending = self._then = None

    def wait(self) -> Any:
        """The value."""
        self.finish()
        value, self._value = self._value, None
        return wait_for(value)


UNDER_WAY = (Pending, Transferred, Deferred)


def wait_for(x: Any) -> Any:
    """``x`` itself, or, if it is under way, its value."""
    return x.wait() if isinstance(x, UNDER_WAY) else x


def then(x: Any, do: Callable[[Any], Any]) -> Any:
    """``do(x)``; once it is there, if ``x`` is under way."""
    return Deferred(x, do) if isinstance(x, UNDER_WAY) else do(x)
