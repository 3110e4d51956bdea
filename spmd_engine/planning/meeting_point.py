"""Where ranks that are run on shapes tell each other the few things that one must know of another.

One rank stands for all that are like it (a *class*), and each class runs in a thread of its own. Whoever gathers from
ranks of other classes, or receives from one, needs the shape of what these give; they leave it here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from spmd_engine.errors import UsageError

PATIENCE = 60.0  #: seconds without anybody moving on, after which ranks wait for each other for ever


class MeetingPoint:
    """What each class has left, by key; who needs it waits for it."""

    def __init__(self) -> None:
        self._left: dict[Hashable, Any] = {}
        self._condition = threading.Condition()
        self.failure: BaseException | None = None

    def leave(self, key: Hashable, what: Any) -> None:
        """Leave something for whoever asks for ``key``."""
        with self._condition:
            self._left[key] = what
            self._condition.notify_all()

    def take(self, key: Hashable) -> Any:
        """What was left under ``key``, once it is there; raises UsageError if nobody leaves it."""
        with self._condition:
            while key not in self._left:
                if self.failure is not None:
                    raise _Broken("another rank's step broke off")
                if not self._condition.wait(PATIENCE):
                    raise UsageError(f"a rank waits for what no other rank does: {key}")
            return self._left[key]

    def fail(self, error: BaseException) -> None:
        """Let nobody wait for one that broke off."""
        with self._condition:
            if self.failure is None and not isinstance(error, _Broken):
                self.failure = error
            self._condition.notify_all()

    def run(self, programs: Sequence[Callable[[], Any]]) -> list[Any]:
        """All programs' results, run side by side; the first error of any is raised."""
        if len(programs) == 1:
            return [programs[0]()]
        results: list[Any] = [None] * len(programs)

        def body(number: int) -> None:
            try:
                with self._condition:  # one at a time, until it waits: they would only take the interpreter from others
                    results[number] = programs[number]()
            except BaseException as error:
                self.fail(error)

        threads = [threading.Thread(target=body, args=(n,), daemon=True) for n in range(len(programs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        return results


class _Broken(Exception):
    """A rank gives up since another did."""
