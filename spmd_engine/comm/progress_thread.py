"""Moves a rank's messages on while it computes: MPI moves data only inside its own calls.

A thread of one rank. It looks once in a while, and only while the rank has operations under way and is not itself in a
call: who is holds ``Progress.lock``. Measured between two hosts at 1 Gbit/s, an all_reduce of 16 MiB that takes 160 ms
took as long after 400 ms of other work as without any, and so it did with a look every 30 ms; with this, none.
"""

from __future__ import annotations

import threading
import time

from spmd_engine.comm.pending import Progress

PERIOD = 1e-3  # seconds between looks: at 1 Gbit/s, 125 kB come meanwhile


class ProgressThread:
    """Call ``wake`` when operations are under way, and ``stop`` before the transport ends."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._stopped = progress, False
        self._work = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spmd_engine progress", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._work.set()

    def stop(self) -> None:
        self._stopped = True
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        progress = self._progress
        while not self._stopped:
            self._work.wait()
            time.sleep(PERIOD)
            self._work.clear()
            if progress.lock.acquire(blocking=False):  # else the rank moves them on itself, and wakes this when it ends
                try:
                    if progress.move_on():
                        self._work.set()
                finally:
                    progress.lock.release()
