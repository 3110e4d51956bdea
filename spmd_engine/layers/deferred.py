"""Values under way: results of communication that overlaps with computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd_engine.comm.pending import Pending
from spmd_engine.sharding.shards import Transferred


class Deferred:
    """A function to call with the result of an operation that is under way.

    ``finish()`` waits for the operation and calls the function, which may start another operation; ``wait()`` waits for
    that one, too, and returns the value. It does so once: the value is not kept.
    """

    __slots__ = ("_pending", "_then", "_value")

    def __init__(self, pending: Pending | Transferred | Deferred, then: Callable[[Any], Any]) -> None:
        self._pending: Pending | Transferred | Deferred | None = pending
        self._then: Any = then
        self._value: Any = None

    def finish(self) -> None:
        """Wait for the operation and call the function; do not wait for an operation that this starts."""
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
    """``x``, or its value if it is under way."""
    return x.wait() if isinstance(x, UNDER_WAY) else x


def then(x: Any, do: Callable[[Any], Any]) -> Any:
    """``do(x)``; deferred if ``x`` is under way."""
    return Deferred(x, do) if isinstance(x, UNDER_WAY) else do(x)
