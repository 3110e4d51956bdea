"""MPI as the transport: nonblocking messages only, and waits that leave the processor to others."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from mpi4py import MPI

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.agreement.dissemination import disseminate
from spmd_engine.comm.agreement.signature import Signature
from spmd_engine.comm.communicators.communicator import Communicator
from spmd_engine.comm.condition import Turns
from spmd_engine.comm.pending import TIMEOUT, Pending, Progress, ProgressThread, Steps
from spmd_engine.comm.shared_memory.node import Node, open_node
from spmd_engine.comm.shared_memory.slot_table import SlotTable, room_for_table, size_of_table, table_on
from spmd_engine.comm.transports.hierarchical import Lanes, even_nodes
from spmd_engine.comm.transports.messages import MessagePart
from spmd_engine.comm.transports.mpi import NonblockingCollectives
from spmd_engine.errors import MeshError
from spmd_engine.runtime.other_nodes import ASK, ENDED, SideMessages

logger = logging.getLogger(__name__)

KEPT = 32  # communicators that nobody uses any more: MPI refuses to make more than some 2,000
PIECE = 1 << 30  # bytes a message: some MPI libraries refuse counts of 2^31 and more
_FOUNDING = 32764  # a tag that no other message has
_TOLD = struct.Struct("<?q")  # by who makes a communicator: whether it has one, and where it has made room for a table
_SPIN_TESTS = 1000  # look again this often before giving way at all, some 200 microseconds
_YIELDS = 100  # give way this often before sleeping: a peer that is nearly there needs no sleep
_OVERSUBSCRIBED = 5  # and this often where ranks wait for a core
_SHORTEST, _LONGEST = 50e-6, 1e-3  # seconds of sleep
_WOKEN = 10e-3  # the longest sleep of those whom others wake


class MPICommunicator(Communicator):
    """Ranks are MPI processes. ``device_aware`` says whether MPI itself can read device memory.

    MPI's own waits spin, and with more ranks than cores a spinning rank slows the working ones several
    times. So nothing here blocks inside MPI: requests are tested, and between tests the rank yields a
    hundred times, then sleeps for 50 microseconds to 1 millisecond.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        progress: Progress | None = None,
        node: str | None = None,
        world: MPICommunicator | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        """``members``: the ranks, in ``world``, of a sub-communicator; only this class gives the last four."""
        self._comm = comm
        self._world = world if world is not None else self
        self._node: Node | None = None
        self._yields = _YIELDS
        self._members = list(members) if members is not None else list(range(comm.size))
        #: the world's: with ranks whose memory this one does not share, if there are any
        self.side_messages: SideMessages | None = None
        self._ended: set[int] = set()
        self._asked: set[int] = set()  # ranks of the world that are to say when their programs end
        self._lane_comm: MPI.Comm | None = None
        self._users = 0  # meshes that have it
        #: the world's: by their members, the least recently made first; meshes with groups of the same ranks share one
        self._kept: dict[tuple[int, ...], MPICommunicator] = {}
        self.turns = Turns()
        self.rank, self.size = comm.rank, comm.size
        self.node = node if node is not None else MPI.Get_processor_name()
        self.progress = progress if progress is not None else Progress()
        self.line = self.progress.activity.line(self._members)
        self.device_aware = is_device_aware()

    def open_node(self, hosts: Sequence[str], cores: int, tell: Callable[[str], list[str]]) -> None:
        """Share memory with this node's ranks, of all ranks' ``hosts``; for the world, once. ``tell``: see ``node``."""
        self.hosts = list(hosts)
        ranks = [rank for rank, host in enumerate(hosts) if host == self.node]
        node, nodes = open_node(self.rank, ranks, size_of_table(len(ranks)), tell), even_nodes(hosts)
        if len(ranks) < self.size:
            if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
                thread = ProgressThread(self.progress)
                self.progress.on_begin = thread.wake
                atexit.register(thread.stop)
            elif self.rank == 0:
                logger.warning("this MPI does not let threads call it: data between nodes move only while ranks wait")
            nodes = nodes if "no" not in tell("yes" if node is not None else "no") else None
        usable = node is not None and nodes is not None
        table = table_on(node, ranks, ranks.index(self.rank)) if usable else None
        self.calls = 0  # those that ranks have made until now were made without it
        self._live_on(node, len(ranks) > cores, nodes, table)

    def _live_on(
        self, node: Node | None, oversubscribed: bool, nodes: Sequence[Sequence[int]] | None, table: SlotTable | None
    ) -> None:
        """Take what ways there are: ``table``, of this rank's of the ``nodes``, and MPI's collectives between them."""
        self._node, self.neighbours = node, node.neighbours if node is not None else None
        self.spin_tests, self._yields = (0, _OVERSUBSCRIBED) if oversubscribed else (_SPIN_TESTS, _YIELDS)
        if table is not None and len(nodes) == 1:
            self.table = table
            return
        comm = self._comm
        if self._world is self:
            comm = comm.Dup()  # the world's may have other users
            self.side_messages = SideMessages(comm)
        self.collectives = NonblockingCollectives(comm, self.turns, self.tuning)
        if table is not None:
            self.lanes = Lanes(self, nodes, table)
            self._lane_comm = self._create(self.lanes.lane.members)
            self.lane_collectives = NonblockingCollectives(self._lane_comm, self.turns, self.tuning)

    def start_send(self, data: Array, to: int, tag: int) -> list:
        return [self._comm.Isend([piece, MPI.BYTE], to, tag) for piece in _pieces(data)]

    def start_receive(self, data: Array, source: int, tag: int) -> list:
        return [self._comm.Irecv([piece, MPI.BYTE], source, tag) for piece in _pieces(data)]

    def done(self, requests: list) -> bool:
        return not requests or MPI.Request.Testall(requests)

    def subset(self, ranks: Sequence[int], timeout: float | None = TIMEOUT) -> MPICommunicator:
        """See ``Communicator``. Ranks belong to different groups, so one may have closed what another still keeps.
        Therefore all members ask each other: only if all have theirs do they use it, else they make another."""
        members, kept = tuple(self._members[rank] for rank in ranks), self._world._kept
        made = kept.get(members)
        what = f"for ranks {list(ranks)}, to make a communicator of them"
        founding = Pending(self, self._agree(ranks, made is not None), timeout, what)
        everyone_has, offset, nodes = self.progress.begin(founding).wait()
        if not everyone_has:
            if made is not None and not made._users:
                made.close()
            made = self._make(ranks, members, offset, nodes)
        made._users += 1
        kept.pop(members, None)
        kept[members] = made
        return made

    def _make(
        self, ranks: Sequence[int], members: Sequence[int], offset: int, nodes: list[list[int]] | None
    ) -> MPICommunicator:
        made = MPICommunicator(self._create(ranks), self.progress, self.node, self._world, members)
        made.hosts, table = [self.hosts[rank] for rank in ranks], None
        if nodes is not None:
            own = next(node for node in nodes if made.rank in node)
            table = table_on(self._node, [members[rank] for rank in own], own.index(made.rank), offset)
        made._live_on(self._node, self.spin_tests == 0, nodes, table)
        return made

    def _create(self, ranks: Sequence[int]) -> MPI.Comm:
        """A communicator of MPI's, of these ranks, which have all come to make it."""
        everyone = self._comm.Get_group()
        group = everyone.Incl(ranks)
        try:
            return self._comm.Create_group(group)
        except MPI.Exception as error:
            raise MeshError(
                f"MPI refused another communicator ({error}); close() meshes that are no longer used, "
                "or open them with 'with Mesh(...) as mesh:'"
            ) from error
        finally:
            group.Free()
            everyone.Free()

    def _agree(self, ranks: Sequence[int], has: bool) -> Steps:
        """Wait here for those who do not come yet: inside MPI this rank would spin, and its operations rest.

        ``has``: whether this rank has such a communicator from before. Returns whether all of them have; else, besides,
        where the first of this node's ranks has made room for a table, and the ranks by nodes, counted in
        ``ranks``; None for these if tables cannot be had on all nodes, or would be of no use.
        """
        hosts = [self.hosts[rank] for rank in ranks]
        nodes = even_nodes(hosts)
        near = [i for i, host in enumerate(hosts) if host == self.node]
        room, here = None, ranks[near[0]] == self.rank
        if here and nodes is not None and self._node is not None:
            room = room_for_table(self.neighbours, len(near))
        row, same = _TOLD.pack(has, -1 if room is None else room), Signature("barrier").words
        _, rows = yield from disseminate(MessagePart(self, ranks), same, row, _FOUNDING)
        have, offsets = zip(*map(_TOLD.unpack, rows), strict=True)
        fits = not all(have) and nodes is not None and all(offsets[node[0]] >= 0 for node in nodes)
        if room is not None and not fits:
            self.neighbours.own.release(room, size_of_table(len(near)))
        return all(have), offsets[near[0]], nodes if fits else None

    def free(self) -> None:
        """One uses it no more. Of those that nobody uses, the last KEPT stay, for whoever next needs one."""
        self._users -= 1
        kept = self._world._kept
        unused = [members for members, each in kept.items() if not each._users]
        for members in unused[: max(0, len(unused) - KEPT)]:
            kept.pop(members).close()

    def close(self) -> None:
        """Give back all that this communicator holds."""
        self.progress.activity.close(self.line)
        if self.node_table is not None:
            with self.progress.lock:
                self.neighbours.retire(self.node_table)
        if not MPI.Is_finalized():
            for comm in (self._comm, self._lane_comm):
                if comm is not None:
                    comm.Free()

    def announce_end(self) -> None:
        if self._node is not None:
            self._node.announce_end()
        if (messages := self._world.side_messages) is not None:
            messages.send(b"", [asking for asking, _ in messages.receive(ASK)], ENDED)

    def ended(self, suspects: Sequence[int]) -> list[int]:
        world, near = self._world, self._node.ranks if self._node is not None else ()
        members = {self._members[rank]: rank for rank in suspects}
        ended = set(self._node.ended() if self._node is not None else ())
        if (messages := world.side_messages) is not None:
            asked = members.keys() - world._asked - set(near)
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
    """Whether the MPI library takes CUDA buffers: SPMD_CUDA_AWARE=0|1 if set, else what the library says."""
    if (said := os.environ.get("SPMD_CUDA_AWARE")) is not None:
        return said.lower() in ("1", "true", "yes", "on")
    for library in (None, MPI.__file__):  # mpi4py may have loaded it without making its symbols global
        with suppress(AttributeError, OSError):
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
    return False
