"""Ranks as MPI processes, with nonblocking messages only, and waits that yield the processor."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from threading import Thread

import numpy as np
from mpi4py import MPI

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.agreement.tree import agree, gather_texts
from spmd_engine.comm.communicators.communicator import Communicator, MessagePart
from spmd_engine.comm.connections import Connections, even_nodes
from spmd_engine.comm.pending import Operation, Progress, ProgressThread, Steps
from spmd_engine.comm.shared_memory.arena import Node, open_node
from spmd_engine.comm.shared_memory.slot_table import SlotTable, room_for_table, size_of_table, table_on
from spmd_engine.errors import MeshError, UsageError
from spmd_engine.runtime.activity import Memory
from spmd_engine.runtime.other_nodes import ASK, ENDED, SideMessages

logger = logging.getLogger(__name__)

KEPT = 32  # unused communicators that are kept: MPI allows about 2,000
PIECE = 1 << 30  # most bytes of a message: some MPI libraries refuse counts from 2^31
_CREATION = 32764  # a tag that no other message uses
_JOINING = 32763  # a tag of messages between the first ranks of two jobs
_MEMBER = struct.Struct("<?q")  # a member's message: whether it keeps such a communicator, offset of its slot table
_SPIN_TESTS = 1000  # tests of a condition before yielding, about 200 microseconds
_YIELDS = 100  # yields before sleeping, as a peer may be nearly ready
_OVERSUBSCRIBED = 5  # ``_YIELDS`` where ranks outnumber cores
_SHORTEST, _LONGEST = 50e-6, 1e-3  # seconds of sleep
_WOKEN = 10e-3  # longest sleep if another rank will wake this one


class MPICommunicator(Communicator):
    """Ranks are MPI processes.

    MPI's own waits spin, and with more ranks than cores a spinning rank slows the working ones several times. So
    nothing here blocks inside MPI: requests are tested, and between tests the rank yields a hundred times, then sleeps
    for 50 microseconds to 1 millisecond.
    """

    def __init__(
        self, comm: MPI.Intracomm, progress: Progress, world: MPICommunicator | None = None, members: Sequence[int] = ()
    ) -> None:
        """``members``: the ranks of a sub-communicator in ``world``. Only this class passes the last two arguments;
        without them, ``open_node`` says the hosts."""
        self._comm = comm
        self._world = world if world is not None else self
        self._node: Node | None = None
        self._yields = _YIELDS
        #: of the world: messages to ranks on other nodes, if there are any
        self.side_messages: SideMessages | None = None
        self._ended: set[int] = set()
        self._asked: set[int] = set()  # ranks of the world that will report the end of their programs
        self._duplicate: MPI.Intracomm | None = None  # of the world
        self.records: dict[int, Memory] = {}  #: of the world: of the activity of this node's ranks, by rank
        self.stop_watching: Callable[[], None] = lambda: None  #: of the world: stops its watchdog
        self._users = 0  # number of meshes that use this communicator
        #: of the world: by members, least recently used first; meshes with groups of the same ranks share one
        self._kept: dict[tuple[int, ...], MPICommunicator] = {}
        hosts = [world.hosts[rank] for rank in members] if world is not None else [MPI.Get_processor_name()] * comm.size
        super().__init__(members or range(comm.size), comm.rank, hosts, progress)
        self.is_device_aware = is_device_aware()

    def open_node(self, hosts: Sequence[str], cores: int) -> None:
        """Share memory with this node's ranks; once, for the world. ``hosts``: of all ranks. ``cores``: of this node.
        Collective."""
        self.hosts = list(hosts)
        ranks = [rank for rank, host in enumerate(hosts) if host == self.node]
        gather_here = partial(gather_texts, self, ranks=ranks)
        node, nodes = open_node(self.rank, ranks, size_of_table(len(ranks)), gather_here), even_nodes(hosts)
        if len(ranks) < self.size:
            if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
                if self.rank == 0:
                    logger.warning(
                        "this MPI library does not permit calls from threads: data between nodes move only while ranks "
                        "wait"
                    )
            else:
                self.start_progress_thread()
            nodes = nodes if "no" not in gather_texts(self, "yes" if node is not None else "no") else None
        table = table_on(node, ranks, ranks.index(self.rank)) if node is not None and nodes is not None else None
        self._connect(node, len(ranks) > cores, table)

    def start_progress_thread(self) -> None:
        """See ``Communicator``: if MPI permits it, and there is no such thread from an earlier world."""
        if self.progress.on_begin is None and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            thread = ProgressThread(self.progress)
            self.progress.on_begin = thread.wake
            atexit.register(thread.stop)

    def _connect(self, node: Node | None, oversubscribed: bool, table: SlotTable | None) -> None:
        """Connect the ranks by the ``table`` of this rank's node. Calls so far were made by messages."""
        self._node, neighbours = node, node.neighbours if node is not None else None
        self.spin_tests, self._yields = (0, _OVERSUBSCRIBED) if oversubscribed else (_SPIN_TESTS, _YIELDS)
        self.connections = Connections(self, neighbours, table)
        if self.connections.table is None and self._world is self:
            self._duplicate = self._comm.Dup()  # other libraries may use the world's communicator
            self.side_messages = SideMessages(self._duplicate)

    def start_send(self, data: Array, to: int, tag: int) -> list:
        return [self._comm.Isend([piece, MPI.BYTE], to, tag) for piece in _pieces(data)]

    def start_receive(self, data: Array, source: int, tag: int) -> list:
        return [self._comm.Irecv([piece, MPI.BYTE], source, tag) for piece in _pieces(data)]

    def done(self, requests: list) -> bool:
        return not requests or MPI.Request.Testall(requests)

    def create_subset(self, ranks: Sequence[int], timeout: float | None) -> MPICommunicator:
        """See ``Communicator``. Members use a kept communicator again if all of them still keep it, on which they
        first agree: as ranks belong to different groups, one may have closed it."""
        members, communicators = tuple(self.members[rank] for rank in ranks), self._world._kept
        communicator = communicators.get(members)
        description = f"for ranks {list(ranks)}, to create a communicator of them"
        creation = Operation(self, self._agree_on_subset(ranks, communicator is not None), timeout, description)
        all_keep, offset, nodes = self.progress.begin(creation).wait()
        if communicator is None or not all_keep:
            if communicator is not None and not communicator._users:
                communicator.close()
            communicator = self._create_subset(ranks, members, offset, nodes)
        communicator._users += 1
        communicators.pop(members, None)
        communicators[members] = communicator
        return communicator

    def _create_subset(
        self, ranks: Sequence[int], members: Sequence[int], offset: int, nodes: list[list[int]] | None
    ) -> MPICommunicator:
        subset, table = MPICommunicator(self._create_mpi(ranks), self.progress, self._world, members), None
        if nodes is not None and self._node is not None:
            node_ranks = next(node for node in nodes if subset.rank in node)
            table = table_on(self._node, [members[rank] for rank in node_ranks], node_ranks.index(subset.rank), offset)
        subset._connect(self._node, self.spin_tests == 0, table)
        return subset

    def _create_mpi(self, ranks: Sequence[int]) -> MPI.Intracomm:
        """An MPI communicator of these ranks. Collective among them."""
        all_ranks = self._comm.Get_group()
        group = all_ranks.Incl(ranks)
        try:
            return self._comm.Create_group(group)
        except MPI.Exception as error:
            raise MeshError(
                f"MPI cannot create another communicator ({error}); close() meshes that are no longer used, "
                "or open them with 'with Mesh(...) as mesh:'"
            ) from error
        finally:
            group.Free()
            all_ranks.Free()

    def _agree_on_subset(self, ranks: Sequence[int], keeps: bool) -> Steps:
        """Wait until all members have called ``subset``. (Inside MPI this rank would spin and not advance operations.)

        ``keeps``: whether this rank keeps such a communicator. Returns (whether all members do, the offset of the slot
        table that the first rank of this node has allocated, the indices of ``ranks`` by nodes; None if slot tables are
        not available on all nodes, or not needed).
        """
        hosts = [self.hosts[rank] for rank in ranks]
        nodes = even_nodes(hosts)
        node_indices = [i for i, host in enumerate(hosts) if host == self.node]
        offset, is_first, neighbours = None, ranks[node_indices[0]] == self.rank, self.connections.neighbours
        if is_first and nodes is not None and neighbours is not None:
            offset = room_for_table(neighbours, len(node_indices))
        row, words = _MEMBER.pack(keeps, -1 if offset is None else offset), Signature("barrier").words
        _, rows = yield from agree(MessagePart(self, ranks), words, np.frombuffer(row, np.uint8), _CREATION)
        keeps_by_rank, offsets = zip(*_MEMBER.iter_unpack(rows.tobytes()), strict=True)
        fits = not all(keeps_by_rank) and nodes is not None and all(offsets[node[0]] >= 0 for node in nodes)
        if neighbours is not None and offset is not None and not fits:
            neighbours.own.release(offset, size_of_table(len(node_indices)))
        return all(keeps_by_rank), offsets[node_indices[0]], nodes if fits else None

    def free(self) -> None:
        """End the use by one mesh. The world keeps the last KEPT unused communicators for later meshes."""
        self._users -= 1
        communicators = self._world._kept
        unused = [members for members, comm in communicators.items() if not comm._users]
        for members in unused[: max(0, len(unused) - KEPT)]:
            communicators.pop(members).close()

    def close(self) -> None:
        """Release all resources of this communicator."""
        super().free()
        if not MPI.Is_finalized():
            self._comm.Free()

    def part(self) -> None:
        """End the use of a merged world, after all of its ranks have ended their calls. Collective."""
        for comm in self._kept.values():
            comm.close()
        self.progress.activity.close(self.line)
        if self._duplicate is not None:
            self._duplicate.Free()
        self._comm.Disconnect()

    def announce_end(self) -> None:
        self._comm.Iprobe()  # lets MPI send what it has only buffered, though the sends are complete
        if self._node is not None:
            self._node.announce_end()
        if (messages := self._world.side_messages) is not None:
            messages.send(b"", [asking for asking, _ in messages.receive(ASK)], ENDED)

    def ended(self, awaited: Sequence[int]) -> list[int]:
        world, node_ranks = self._world, self._node.ranks if self._node is not None else ()
        members = {self.members[rank]: rank for rank in awaited}
        ended = set(self._node.ended() if self._node is not None else ())
        if (messages := world.side_messages) is not None:
            asked = members.keys() - world._asked - set(node_ranks)
            world._asked |= asked
            messages.send(b"", sorted(asked), ASK)
            world._ended.update(rank for rank, _ in messages.receive(ENDED))
            ended |= world._ended
        return sorted(rank for member, rank in members.items() if member in ended)

    def prepare_to_pause(self, idle: int) -> None:
        if self._node is not None and idle >= self._yields:
            self._node.futexes.prepare_to_sleep()

    def pause(self, idle: int, messages: bool = True) -> None:
        if idle <= self._yields:
            os.sched_yield()
            return
        naps = min(idle - self._yields, 99)
        seconds = min(_LONGEST, _SHORTEST * 1.1**naps) if messages else min(_WOKEN, _SHORTEST * 2**naps)
        if self._node is not None:
            self._node.futexes.sleep(seconds)
        else:
            time.sleep(seconds)


def _pieces(data: Array) -> list[Array]:
    flat = data.reshape(-1).view(backend_of(data).xp.uint8)
    return [flat[start : start + PIECE] for start in range(0, flat.size, PIECE)]


def is_device_aware() -> bool:
    """Whether the MPI library accepts CUDA buffers: SPMD_CUDA_AWARE=0|1 if set, else as the library reports."""
    if (setting := os.environ.get("SPMD_CUDA_AWARE")) is not None:
        return setting.lower() in ("1", "true", "yes", "on")
    for library in (None, MPI.__file__):  # mpi4py may have loaded the library without global symbols
        with suppress(AttributeError, OSError):
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
    return False


# --- The port at which the first ranks of two jobs of MPI meet, so that the ranks of one join the other


class MPIPort:
    """A Port between two jobs of MPI, as ``ThreadPort``: opened, or, with a ``name``, that of the other job.

    A thread waits for the other rank, up to ``timeout`` seconds, as MPI waits only inside a call.
    """

    def __init__(self, name: str, timeout: float) -> None:
        if not MPI.Get_library_version().startswith("MPICH") or MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise UsageError("ranks can join a job of MPICH with threads; this MPI library is another one")
        self._joins, self._timeout, self._why = bool(name), timeout, ""
        self.name = name or MPI.Open_port()
        self.leaders: MPI.Intracomm | None = None  #: both ranks
        self._sent: list[MPI.Request] = []
        self._thread = Thread(target=self._connect, name="spmd_engine port", daemon=True)
        self._thread.start()

    def _connect(self) -> None:
        info = MPI.Info.Create()
        info.Set("timeout", str(ceil(self._timeout)))
        try:
            pair = (MPI.COMM_SELF.Connect if self._joins else MPI.COMM_SELF.Accept)(self.name, info)
            self.leaders = pair.Merge(self._joins)
            pair.Free()
        except MPI.Exception as error:
            self._why = f"they did not connect in {self._timeout:g} s ({error.Get_error_string()})"
        finally:
            info.Free()

    def is_connected(self) -> bool:
        if self._why:
            raise UsageError(self._why)
        return self.leaders is not None

    def send(self, text: str) -> None:
        assert self.leaders is not None
        self._sent.append(self.leaders.Isend([text.encode(), MPI.BYTE], 1 - self.leaders.rank, _JOINING))

    def receive(self) -> str | None:
        status = MPI.Status()
        if self.leaders is None or not self.leaders.Iprobe(1 - self.leaders.rank, _JOINING, status):
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        self.leaders.Recv([data, MPI.BYTE], 1 - self.leaders.rank, _JOINING)  # it has arrived: no wait
        return data.decode()

    def close(self) -> None:
        self._thread.join()
        if not self._joins:
            MPI.Close_port(self.name)

    @staticmethod
    def merge(own: MPI.Intracomm, port: MPIPort | None, joins: bool) -> MPI.Intracomm:
        """A communicator of the ranks of both worlds, those that join after the others. Collective; ``own``: of this
        world, whose rank 0 has the ``port``."""
        leaders = port.leaders if port else None
        both = own.Create_intercomm(0, leaders or MPI.COMM_SELF, 0 if joins else 1, _JOINING)
        merged = both.Merge(joins)
        both.Free()
        if port and leaders:
            MPI.Request.Waitall(port._sent)
            leaders.Free()
        return merged
