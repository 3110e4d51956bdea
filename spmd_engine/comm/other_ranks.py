"""The ranks of a job that are not on its mesh: they wait for orders of rank 0, and report signals to it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any

import numpy as np

from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.pending import TIMEOUT
from spmd_engine.errors import CommunicationTimeout, UsageError

NAP = 0.1  #: the longest sleep, in seconds, between two looks of a rank for an order
PROMPT = 0.1  #: seconds in which it looks as often as in any other wait
_TAG = 32765  # of messages to and from these ranks: no other message on the world's communicator has it
_MOST = 1000  # characters of an error


class OtherRanks:
    """The ranks of the world that are not on the mesh, and their messages with rank 0.

    Such a rank only waits for orders, which are JSON, and does what they say. It reports a signal as soon as it has
    one. To an order that *wakes* it, it answers with the number of that signal, or 0, so that no message is left over
    when the program ends. If other ranks are outside the mesh afterwards, ``set`` says which. On rank 0, ``with others:
    ...`` ends these ranks as the block ends: with the same exit code, or the same UsageError; other errors end all
    ranks of a job.
    """

    def __init__(self, world: Communicator, ranks: Sequence[int] = (), timeout: float | None = TIMEOUT) -> None:
        self.world, self._timeout = world, timeout or TIMEOUT
        self._reports: dict[int, tuple[np.ndarray, list]] = {}  # on rank 0: buffers and requests of those under way
        self._sends: list[tuple[list, np.ndarray]] = []  # requests of messages under way, and what they send
        self._has_reported = False
        self.set(ranks)

    @property
    def have_this(self) -> bool:
        """Whether this rank is one of them."""
        return self.world.rank in self.ranks

    @property
    def on_mesh(self) -> list[int]:
        """The ranks of the world that are not among them."""
        return [rank for rank in range(self.world.size) if rank not in self.ranks]

    def set(self, ranks: Sequence[int]) -> None:
        """These are the ranks from now on."""
        self.ranks = list(ranks)

    # --- on rank 0

    def _listen(self) -> None:
        """Begin to receive the reports of these ranks, on rank 0: not before, as a mesh may be opened without a job."""
        for rank in set(self.ranks) - self._reports.keys() if self.world.rank == 0 else ():
            report = np.zeros(1, np.int64)
            self._reports[rank] = report, self.world.start_receive(report, rank, _TAG)

    def signal(self) -> int:
        """The number of a signal that one of these ranks has received, on rank 0; 0 for none."""
        self._listen()
        return max((int(n[0]) for n, requests in self._reports.values() if self.world.done(requests)), default=0)

    def send(self, order: Mapping[str, Any], ranks: Sequence[int], wakes: bool = False) -> None:
        """Send some of these ranks an order, from rank 0."""
        text = np.frombuffer(json.dumps(order).encode(), np.uint8)
        self._sends = [entry for entry in self._sends if not self.world.done(entry[0])]
        for rank in ranks:
            for part in np.array([text.size, wakes]), text:
                self._sends.append((self.world.start_send(part, rank, _TAG), part))

    def wake(self, order: Mapping[str, Any]) -> None:
        """Send all of these ranks an order, from rank 0, and wait until they are awake."""
        self._listen()
        self.send(order, self.ranks, wakes=True)
        requests = [*self._reports.values(), *((report, sent) for sent, report in self._sends)]
        began, idle = monotonic(), 0
        while True:
            self.world.prepare_to_pause(idle)
            if all([self.world.done(each) for _, each in requests]):
                break
            if monotonic() - began > self._timeout:
                listed = ",".join(map(str, self.ranks))
                raise CommunicationTimeout(f"waited {self._timeout:g} s for idle ranks {listed} to wake")
            self.world.pause(idle)
            idle += 1
        self._sends.clear()
        self._reports.clear()

    def end(self, code: Any = 0, error: str = "") -> None:
        """End these ranks, from rank 0, with an exit code or an error, unless they have ended."""
        if self.world.rank == 0 and self.ranks:
            self.wake({"exit": code, "error": error[:_MOST]})
            self.ranks = []

    def __enter__(self) -> OtherRanks:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.end()
        elif issubclass(kind, SystemExit):
            self.end(error.code)
        elif issubclass(kind, UsageError):
            self.end(error=str(error))

    # --- on the others

    def take(self, received: Callable[[], int] = lambda: 0) -> dict[str, Any]:
        """Wait on one of these ranks until rank 0 sends an order, and return it; {} at the end of the job.

        ``received`` returns the number of a signal that this process has received, or 0. Raises SystemExit or
        UsageError, as rank 0 does, if the job ends so.
        """
        header = np.zeros(2, np.int64)
        self._wait(self.world.start_receive(header, 0, _TAG), received)
        size, wakes = header.tolist()
        text = np.empty(size, np.uint8)
        self._wait(self.world.start_receive(text, 0, _TAG), received)
        if wakes:
            if not self._has_reported:
                self._report(0)
            self._wait([], received)
            self._has_reported = False
        order = json.loads(text.tobytes())
        if "exit" not in order:
            return order
        self.ranks = []
        if order["error"]:
            raise UsageError(order["error"])
        if order["exit"]:
            sys.exit(order["exit"])
        return {}

    def _report(self, signal: int) -> None:
        report = np.array([signal])
        self._sends, self._has_reported = [(self.world.start_send(report, 0, _TAG), report)], True

    def _wait(self, requests: list, received: Callable[[], int]) -> None:
        """Wait for a message, or, without ``requests``, until all that this rank has sent has left.

        A message may take any time to come. The longer the rank has waited, the less often it looks: it notices the
        message after at most a hundredth of that time more.
        """
        world, began, idle = self.world, monotonic(), 0
        requests = requests or [each for sent, _ in self._sends for each in sent]
        while True:
            world.prepare_to_pause(idle)
            if world.done(requests):
                return
            if not self._has_reported and (signal := received()):
                self._report(signal)
            world.progress.advance_all()  # what this rank has sent
            if (waited := monotonic() - began) > PROMPT:
                sleep(min(NAP, waited / 100))
            world.pause(idle)  # raises RankAborted if another virtual rank has failed
            idle += 1
