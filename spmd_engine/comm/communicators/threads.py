"""Threads as ranks: the same SPMD program in one process, for notebooks, debuggers and unit tests."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from spmd_engine.arguments import checked
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.connections import Connections, even_nodes
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import Progress
from spmd_engine.comm.shared_memory.arena import Neighbours, bound
from spmd_engine.comm.shared_memory.cores import cores_here
from spmd_engine.comm.shared_memory.cross_memory import CrossMemory
from spmd_engine.comm.shared_memory.slot_table import SlotTable, size_of_table
from spmd_engine.errors import RankAborted, UsageError
from spmd_engine.runtime.watchdog import ThreadWatchdog

_current = threading.local()
_ports: dict[str, ThreadPort] = {}  # open ones, by name
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # do not count unused memory
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE


def current_thread_communicator() -> Communicator | None:
    """The communicator of the virtual rank that this thread runs, if it runs one."""
    return getattr(_current, "communicator", None)


@checked({"ranks": 1}, fn="the program of a rank, as in run_threads(f, 4)")
def run_threads(
    fn: Callable[..., Any],
    ranks: int,
    *,
    args: Sequence[Any] = (),
    nodes: str | Sequence[str] | None = None,
) -> list[Any]:
    """Run the SPMD function ``fn(*args)`` on ``ranks`` virtual ranks; returns their results in rank order.

    In ``fn``, ``world()``, ``Mesh(data=4)`` and every engine see ``ranks`` ranks. The first exception of a rank ends
    all ranks; ``run_threads`` raises it, with a note that names the rank. ``nodes`` names each rank's host, to test
    placements (a text: a letter each); the default is one host. Raises UsageError unless ``nodes`` has one name for
    each rank.

    >>> import numpy as np
    >>> from spmd_engine import Mesh
    >>> run_threads(lambda: float(Mesh(data=4).all_reduce(np.ones(1))[0]), ranks=4)
    [4.0, 4.0, 4.0, 4.0]
    """
    if nodes is not None and len(nodes) != ranks:
        raise UsageError(f"run_threads: nodes names {len(nodes)} hosts; one for each of {ranks} ranks is needed")
    fabric = _Fabric(nodes or [os.uname().nodename] * ranks)
    results: list[Any] = [None] * ranks
    progresses = [Progress() for _ in range(ranks)]
    numbers: dict[int, int] = {}  # thread numbers by rank
    watchdog = ThreadWatchdog([progress.activity for progress in progresses], lambda: numbers)

    def body(rank: int) -> None:
        numbers[rank] = threading.get_ident()
        _current.communicator = ThreadCommunicator(fabric, range(ranks), rank, progresses[rank])
        try:
            results[rank] = fn(*args)
            Group(_current.communicator, "world", Ledger()).leave()
        except BaseException as error:
            fabric.fail(rank, error)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(ranks)]
    with _limit_blas_threads(max(1, int(cores_here() // ranks))):
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)  # a wait without timeout that begins just after Ctrl-C would miss it
        except BaseException as error:  # after Ctrl-C no rank may go on waiting in the background
            fabric.fail(0, error)
            raise
        finally:
            watchdog.stop()
    if fabric.failure:
        rank, error = fabric.failure
        error.add_note(f"raised on rank {rank} of {ranks}")
        raise error
    return results


def _limit_blas_threads(most: int) -> AbstractContextManager[Any]:
    """Limit BLAS to ``most`` threads, or fewer if it has fewer already.

    More threads than cores are slow, as BLAS threads spin while they wait for each other.
    """
    libraries = _libraries(len(sys.modules)).select(user_api="blas")
    return libraries.limit(limits=min([most, *(library.num_threads for library in libraries.lib_controllers)]))


@lru_cache(maxsize=1)
def _libraries(modules: int) -> ThreadpoolController:
    """Libraries with thread pools, such as BLAS. The search takes as long as the rest of ``run_threads``.

    It is repeated only if the number of loaded ``modules`` has changed, as modules may load libraries.
    """
    return ThreadpoolController()


class _Fabric:
    """The state that the virtual ranks of one ``run_threads`` share: mailboxes, memory, and the first failure."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes, ranks = list(nodes), len(nodes)
        self.boxes = [_Mailbox() for _ in range(ranks)]
        self.failure: tuple[int, BaseException] | None = None
        self.ended: set[int] = set()
        self.linked: list[_Fabric] = []  # whose failures are also this one's: worlds that have merged
        self.port: ThreadPort | None = None  # by which its ranks merge with those of another world
        self._lock = threading.Lock()
        self._tables: dict[tuple, list] = {}  # name -> memory, number of ranks that have not requested it
        size = bound(ranks) if ranks > 1 else 0
        self._neighbours: dict[int, Neighbours] = {}  # each is made by the thread of its rank
        self._memories = [mmap.mmap(-1, size, flags=_PRIVATE) for _ in range(ranks)] if size else []

    def neighbours(self, rank: int) -> Neighbours | None:
        if not self._memories or rank in self._neighbours:
            return self._neighbours.get(rank)
        cross_memory, probe = CrossMemory([os.getpid()] * len(self.nodes)), np.full(8, rank, np.uint8)
        reads = cross_memory.can_read(rank, address_of(probe), probe.tobytes())
        self._neighbours[rank] = neighbours = Neighbours(self._memories, rank, cross_memory if reads else None)
        return neighbours

    def table(self, name: tuple, rank: int, members: Sequence[int], neighbours: Neighbours) -> SlotTable:
        """The slot table of these ranks of one node; the first rank creates it."""
        with self._lock:
            entry = self._tables.setdefault(name, [None, len(members)])
            if entry[0] is None:
                entry[0] = memoryview(mmap.mmap(-1, size_of_table(len(members)), flags=_PRIVATE))
            entry[1] -= 1
            if entry[1] == 0:
                del self._tables[name]
        return SlotTable(entry[0], rank, members, neighbours, self)

    # Interface of a Waker, for the slot tables. One interpreter runs one thread at a time: no fences are needed.

    weak = False

    def fence(self) -> None:
        pass

    def anyone_sleeps(self) -> bool:
        return True

    def wake(self, local_ranks: Sequence[int]) -> None:
        for rank in local_ranks:
            self.boxes[rank].changed.set()

    def fail(self, rank: int, error: BaseException) -> None:
        linked: Sequence[_Fabric] = ()
        with self._lock:
            if self.failure is None and not isinstance(error, RankAborted):
                self.failure, linked = (rank, error), tuple(self.linked)
        for box in self.boxes:
            box.changed.set()
        for fabric in linked:
            fabric.fail(rank, error)

    def link(self, other: _Fabric) -> None:
        """From now on a failure of one is also one of the other."""
        self.linked.append(other)
        other.linked.append(self)

    def unlink(self) -> None:
        """Its failures are no longer those of others."""
        for other in self.linked:
            other.linked.remove(self)
        self.linked.clear()


class _Mailbox:
    def __init__(self) -> None:
        self.changed = threading.Event()
        self._lock, self._messages = threading.Lock(), defaultdict(deque)

    def put(self, key: tuple, data: Array) -> None:
        with self._lock:
            self._messages[key].append(data)
        self.changed.set()

    def take(self, key: tuple) -> Array | None:
        with self._lock:
            waiting = self._messages.get(key)
            data = waiting.popleft() if waiting else None
            if waiting is not None and not waiting:
                del self._messages[key]
        return data


class ThreadCommunicator(Communicator):
    """Messages by copy through mailboxes. ``members`` are ranks of the fabric, in this communicator's order."""

    in_one_process = True
    is_device_aware = True  # in one address space the arrays' library copies device arrays

    def __init__(
        self, fabric: _Fabric, members: Sequence[int], rank: int, progress: Progress, name: tuple = ()
    ) -> None:
        super().__init__(members, rank, [fabric.nodes[member] for member in members], progress)
        self._fabric, self._name, self._me = fabric, name, self.members[rank]
        neighbours, table = fabric.neighbours(self._me), None
        self._subsets: defaultdict[tuple[int, ...], int] = defaultdict(int)
        if neighbours is not None and self.size > 1 and even_nodes(self.hosts) is not None:
            peers = [r for r, host in enumerate(self.hosts) if host == self.node]
            local_ranks = [self.members[r] for r in peers]
            table = fabric.table((*name, self.node), peers.index(rank), local_ranks, neighbours)
        self.connections = Connections(self, neighbours, table)

    def start_send(self, data: Array, to: int, tag: int) -> list:
        self._fabric.boxes[self.members[to]].put((self._name, self._me, tag), _bytes(data).copy())
        return []

    def start_receive(self, data: Array, source: int, tag: int) -> list:
        box, key, buffers = self._fabric.boxes[self._me], (self._name, self.members[source], tag), [_bytes(data)]

        def has_arrived() -> bool:
            if buffers and (message := box.take(key)) is not None:
                buffers.pop()[: message.size] = message
            return not buffers

        return [has_arrived]

    def done(self, requests: list) -> bool:
        return all([has_arrived() for has_arrived in requests])

    def create_subset(self, ranks: Sequence[int], timeout: float | None) -> ThreadCommunicator:
        members = tuple(self.members[r] for r in ranks)
        self._subsets[members] += 1  # two communicators of the same ranks must not share messages
        name = (*self._name, members, self._subsets[members])
        rank = members.index(self._me)
        return ThreadCommunicator(self._fabric, members, rank, self.progress, name)

    def open_port(self, name: str, timeout: float) -> ThreadPort:
        """A new port, or, with a ``name``, the open one of that name; see ``world.open_port`` and ``connect``."""
        if name and name not in _ports:
            raise UsageError(f"no virtual rank waits for others by the name {name}")
        self._fabric.port = port = ThreadPort(self._fabric, timeout, _ports[name] if name else None)
        return port

    def merged(self, joins: bool, progress: Progress) -> ThreadCommunicator:
        """The world of both sides of the port that rank 0 has opened, or with which it has connected."""
        assert self._fabric.port is not None
        fabric = self._fabric.port.merged
        assert fabric is not None
        rank = self.rank + (len(fabric.nodes) - self.size if joins else 0)
        return ThreadCommunicator(fabric, range(len(fabric.nodes)), rank, progress)

    def part(self) -> None:
        """End the use of a merged world, after all of its ranks have ended their calls."""
        self.free()
        if self.rank == 0:
            self._fabric.unlink()

    def announce_end(self) -> None:
        self._fabric.ended.add(self._me)

    def ended(self, awaited: Sequence[int]) -> list[int]:
        return [rank for rank in awaited if self.members[rank] in self._fabric.ended]

    def prepare_to_pause(self, idle: int) -> None:
        self._fabric.boxes[self._me].changed.clear()

    def pause(self, idle: int, messages: bool = True) -> None:
        if self._fabric.failure:
            raise RankAborted(f"rank {self._fabric.failure[0]} failed")
        self._fabric.boxes[self._me].changed.wait(0.05)


def solo(progress: Progress | None = None) -> ThreadCommunicator:
    """A world of one rank, for a process without an MPI launcher."""
    return ThreadCommunicator(_Fabric([os.uname().nodename]), range(1), 0, progress or Progress())


class ThreadPort:
    """A Port between virtual ranks of two ``run_threads`` in one process; ``other``: the open one to connect with.

    ``name``: by which the other rank connects.
    """

    def __init__(self, fabric: _Fabric, timeout: float, other: ThreadPort | None = None) -> None:
        self._fabric, self._until = fabric, time.monotonic() + timeout
        self.merged: _Fabric | None = None
        self._sent, self._received = (other._received, other._sent) if other else (deque[str](), deque[str]())
        self.name = other.name if other else f"virtual {os.urandom(8).hex()}"
        if other is None:
            _ports[self.name] = self
            return
        self.merged = other.merged = _Fabric([*other._fabric.nodes, *fabric.nodes])
        for each in (fabric, other._fabric):
            self.merged.link(each)

    def is_connected(self) -> bool:
        """Whether both ranks are here; never blocks. Raises UsageError if the other one did not come in time."""
        if self.merged is None and time.monotonic() > self._until:
            raise UsageError("they did not connect in time")
        return self.merged is not None

    def send(self, text: str) -> None:
        """Send a text to the other rank."""
        self._sent.append(text)

    def receive(self) -> str | None:
        """The text that the other rank has sent; None before it arrives."""
        return self._received.popleft() if self._received else None

    def close(self) -> None:
        """End its use; waits for an attempt to connect."""
        _ports.pop(self.name, None)


def _bytes(data: Array) -> Array:
    return data.reshape(-1).view(backend_of(data).xp.uint8)
