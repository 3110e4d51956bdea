"""How ranks of another launcher ask a running job to take them in: by files in the folder of its run.

1. Rank 0 of the joining ranks writes a request, ``join.json``, which it holds locked until it ends.
2. Rank 0 of the job finds the request after a step, and answers with a file, which it holds locked, too: with the name
   of a port, or with the reason why these ranks cannot join.
3. Both connect while the job goes on. After its next step, the job sends what the joining ranks must know, and both
   worlds merge (``comm.world.merged``).

A lock is free when its process has ended, in whatever way. So neither side waits for one that is gone, and after the
merge each ends if the other one was killed: MPI alone would let it wait.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass
from math import inf
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar, Self, TypeVar

from spmd_engine.axes import MOST
from spmd_engine.checkpoints.format.folder import LOCK
from spmd_engine.comm import Communicator
from spmd_engine.comm.communicators.threads import current_thread_communicator
from spmd_engine.comm.world import Port, open_port
from spmd_engine.configuration import Configuration, setting
from spmd_engine.engine.reshape import ShapeRequest
from spmd_engine.errors import UsageError
from spmd_engine.files import RequestFile, check_owner, open_private, open_regular
from spmd_engine.foreign import MOST_OF_REQUEST, parse_json
from spmd_engine.runtime.ending import end_job_from_thread

CONNECT = 10.0  #: seconds that the two ranks wait for each other at the port
LOOK = 0.02  #: seconds between two looks for an answer
CHECK = 0.5  #: seconds between two tests whether the other side still runs
GRACE = 5.0  #: seconds in which a job ends by itself as the other one does, before it is ended

T = TypeVar("T")

logger = logging.getLogger(__name__)


class LockedFile:
    """A file with JSON that its writer holds locked until it ends. Without locks in the file system none is free."""

    def __init__(self, path: Path, handle: int, content: Any, is_mine: bool) -> None:
        self.path, self.content, self._handle, self._is_mine = path, content, handle, is_mine

    @classmethod
    def create(cls, path: Path, content: Any) -> Self:
        """Write the file, complete and locked from the first moment. Raises FileExistsError if there is one."""
        unfinished = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        handle = open_private(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if os.geteuid() == 0:  # the job of the folder's owner must be able to read it
                with suppress(OSError):
                    os.fchown(handle, os.stat(path.parent).st_uid, -1)
            with suppress(OSError):  # no locks here
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(handle, json.dumps(content).encode())
            os.link(unfinished, path)
        except BaseException:
            os.close(handle)
            raise
        finally:
            unfinished.unlink()
        return cls(path, handle, content, True)

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Another process's file; None if there is none. Raises UsageError for one of a user who does not share the
        folder."""
        try:
            handle = open_regular(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            check_owner(path, os.fstat(handle))
        except UsageError:
            os.close(handle)
            raise
        content = None
        with suppress(ValueError, RecursionError):
            content = parse_json(os.read(handle, MOST_OF_REQUEST))
        return cls(path, handle, content, False)

    def is_held(self) -> bool:
        """Whether the writer still runs."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(self._handle, fcntl.LOCK_UN)
        except OSError as error:
            return error.errno != errno.ESTALE
        return False

    def rename(self, path: Path) -> None:
        os.replace(self.path, path)
        self.path = path

    def close(self) -> None:
        """Release the lock, or stop reading. The writer removes the file, unless another one has its path by now."""
        with suppress(FileNotFoundError):
            if self._is_mine and os.path.samestat(os.fstat(self._handle), os.stat(self.path)):
                self.path.unlink()
        os.close(self._handle)


def runs(folder: Path) -> bool:
    """Whether a job writes its run to the folder."""
    lock = LockedFile.open(folder / LOCK)
    if lock is None:
        return False
    try:
        return lock.is_held()
    finally:
        lock.close()


def remove_unheld(path: Path) -> None:
    """Remove a LockedFile, if there is one, whose writer has ended."""
    if (file := LockedFile.open(path)) is not None:
        if not file.is_held():
            path.unlink(missing_ok=True)
        file.close()


class HolderWatch:
    """A thread that ends this job when the process that holds a file has ended, unless ``close`` is called before.
    Virtual ranks need none: a failure of one is one of all."""

    def __init__(self, file: LockedFile, message: str) -> None:
        self._file, self._message, self._closed = file, message, Event()
        self._thread = Thread(target=self._run, name="spmd_engine holder watch", daemon=True)
        if current_thread_communicator() is None:
            self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(CHECK):
            if not self._file.is_held():
                if not self._closed.wait(GRACE):
                    end_job_from_thread(self._message)
                return

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._file.close()


@dataclass(frozen=True)
class JoinRequest(Configuration):
    """The request of ranks to join a running job, and to change its shape when they have."""

    FILE: ClassVar = "join.json"  #: in the folder of the run

    ranks: int = setting(MISSING, least=1, most=MOST)  #: that join
    facts: Mapping[str, Any] = setting(MISSING)  #: which must be those of the job; JSON
    shape: ShapeRequest | None = setting(MISSING)  #: to follow at once; None: the ranks stay idle
    id: str = setting(MISSING)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch("[0-9a-f]{16}", self.id) or not isinstance(self.facts, Mapping):
            raise UsageError("this is no request of the command 'join': it lacks facts, or its number")


def facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that joining ranks must share with a job of this configuration (JSON)."""
    from spmd_engine.runtime.environment import installed_versions  # which few ranks need

    facts = {name: config.get(name) for name in ("model", "data", "strategy", "device", "corpus")}
    return facts | {"spmd_engine": installed_versions(["spmd_engine"]).get("spmd_engine", "")}


def difference(theirs: Any, ours: Any, name: str = "") -> str:
    """The first difference between the facts of joining ranks and of a job, as text; empty if there is none."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        parts = (
            difference(theirs.get(key), ours.get(key), f"{name}.{key}" if name else key)
            for key in sorted({*theirs, *ours})
        )
        return next(filter(None, parts), "")
    return "" if theirs == ours else f"{name} is {json.dumps(theirs)}, and {json.dumps(ours)} in the running job"


def _close(*several: LockedFile | HolderWatch | Port | None) -> None:
    for one in several:
        if one is not None:
            one.close()


# --- On rank 0 of the running job


class JoinRequests:
    """Requests to join a job, on its rank 0: one group of ranks at a time, up to the merge.

    ``refuses``: why no ranks can join this job, if so. ``facts``: of the job.
    """

    def __init__(self, folder: Path, refuses: str, facts: Mapping[str, Any]) -> None:
        self._folder, self._refuses, self._facts = folder, refuses, facts
        self._requested = RequestFile(folder / JoinRequest.FILE)
        self.request: JoinRequest | None = None  #: under way
        self._file: LockedFile | None = None  # the file of the request
        self._answer: LockedFile | None = None
        self._port: Port | None = None
        self._joined: list[tuple[LockedFile, HolderWatch | None]] = []  # answer and watch of each group that has
        for path in folder.glob("join-*.json"):
            with suppress(UsageError, OSError):  # the file of another user, or no file
                remove_unheld(path)

    def is_ready(self, world: Communicator) -> bool:
        """Whether ranks are connected and wait to be taken into this world. Call this after each step."""
        path = self._requested.path
        try:
            if self._port is None and self._requested.is_there():
                self._answer_request(path, world)
            if self._port is None or not self._port.is_connected():
                return False
            if self._file and self._file.is_held():
                return True
            raise UsageError("they have ended")
        except (UsageError, OSError) as error:  # the job goes on
            if self._file is None:
                self._requested.answered()
            self._drop(str(error))
        return False

    def _answer_request(self, path: Path, world: Communicator) -> None:
        """Open a port for the ranks that ask. Raises UsageError if they cannot join."""
        remove_unheld(path)
        if (file := LockedFile.open(path)) is None:
            return
        try:
            self.request = request = JoinRequest.from_json(file.content, JoinRequest.FILE)
            file.rename(self._folder / f"join-{request.id}.json")  # the next ranks can write theirs
        except (UsageError, OSError):
            file.close()
            raise
        self._file, why = file, self._refuses or difference(request.facts, self._facts)
        try:
            if not why:
                self._port = open_port(world, timeout=CONNECT)
        except UsageError as error:
            why = str(error)
        answer = LockedFile.create(
            self._folder / f"join-{request.id}-answer.json", {"port": self._port.name} if self._port else {"why": why}
        )
        if why:
            self._joined.append((answer, None))  # they have not read it yet
            raise UsageError(why)
        self._answer = answer

    def _drop(self, why: str) -> None:
        """Go on without the ranks that ask."""
        logger.warning("%d rank(s) that asked to join do not: %s", self.request.ranks if self.request else 0, why)
        _close(self._port, self._answer, self._file)
        self.request = self._file = self._answer = self._port = None

    def take(self, order: str, ranks: str) -> Port | None:
        """Send the joining ranks what they must know, and return the port when all of them are about to merge; None if
        they have ended. ``ranks``: their numbers in the new world, as text."""
        assert self._port and self._file and self._answer
        self._port.send(order)
        until = time.monotonic() + CONNECT
        while self._port.receive() is None:
            if not self._file.is_held() or time.monotonic() > until:
                self._drop("they have ended, or do not answer")
                return None
            time.sleep(LOOK / 20)
        message = f"the ranks that joined ({ranks}) have ended before the run; its last checkpoint is whole"
        self._joined.append((self._answer, HolderWatch(self._file, f"spmd_engine: {message}")))
        port, self.request, self._file, self._answer, self._port = self._port, None, None, None, None
        return port

    def close(self) -> None:
        """The run ends: answer the ranks that still wait, and stop watching those that have joined."""
        if self._port is not None:
            with suppress(UsageError):
                if self._port.is_connected():
                    self._port.send("")
            self._drop("the run ends")
        for answer, watch in self._joined:
            _close(watch, answer)
        self._joined.clear()


# --- On rank 0 of the joining ranks


class Entrance:
    """What ranks do to join a job, on their rank 0. Close it when the job has ended."""

    def __init__(self, world: Communicator, folder: Path, request: JoinRequest, wait: float) -> None:
        self._world = world
        self._folder, self._request, self._until = folder, request, time.monotonic() + wait
        self._checked = 0.0
        self._file: LockedFile | None = None
        self._answer: LockedFile | None = None
        self._watch: HolderWatch | None = None
        self.port: Port | None = None

    def enter(self) -> Iterator[str]:
        """Ask, connect, and wait until the job takes these ranks in. Yields "" every ``LOOK`` seconds, and in the end
        what the job sends. Raises UsageError if the job does not take them in."""
        self._file = yield from self._found(self._ask)
        path = self._folder / f"join-{self._request.id}-answer.json"
        self._answer = yield from self._found(lambda: LockedFile.open(path))
        content = self._answer.content if isinstance(self._answer.content, Mapping) else {}
        if not isinstance(content.get("port"), str):
            raise UsageError(f"{self._folder}: refused: {content.get('why', 'the answer of the job cannot be read')}")
        self.port = port = open_port(self._world, content["port"], CONNECT)
        yield from self._found(lambda: port.is_connected() or None)
        self._until = inf  # from now on the job may wait for these ranks
        order = yield from self._found(port.receive)
        if not order:
            raise UsageError(f"{self._folder}: the run has ended")
        yield order

    def _ask(self) -> LockedFile | None:
        """Write the request; None if other ranks ask now."""
        path = self._folder / JoinRequest.FILE
        try:
            return LockedFile.create(path, self._request.as_json())
        except FileExistsError:
            remove_unheld(path)
            return None

    def _found(self, look: Callable[[], T | None]) -> Generator[str, None, T]:
        """The first result of ``look()`` that is not None. Raises UsageError if the job ends, or after the wait."""
        while (result := look()) is None:
            now = time.monotonic()
            if now > self._until:
                raise UsageError(f"{self._folder}: no answer in time, and the request is withdrawn; does the job step?")
            if now > self._checked + CHECK:
                self._checked = now
                if not (self._answer.is_held() if self._answer else runs(self._folder)):
                    raise UsageError(f"{self._folder}: the run has ended")
            yield ""
            time.sleep(LOOK)
        return result

    def confirm(self) -> None:
        """Let the job begin the merge, as all ranks here do. From now on they end if the job ends without them."""
        assert self._answer and self.port
        self.port.send("ready")
        message = f"spmd_engine: {self._folder}: the job that these ranks joined has ended without them"
        self._watch, self._answer = HolderWatch(self._answer, message), None

    def close(self) -> None:
        _close(self.port, self._watch, self._answer, self._file)
        path = self._folder / f"join-{self._request.id}.json"  # as the job has renamed the request
        path.unlink(missing_ok=True)
