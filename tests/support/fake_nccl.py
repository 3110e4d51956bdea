"""A strict stand-in for the module ``cupy.cuda.nccl``, for virtual ranks on the stand-in for CuPy (fake_cupy.py).

Names, arguments and numbers are CuPy 14.2's (its wheel with NCCL 2.32: ``dir``, and the first docstring lines). A call
is queued on a stream and returns; a transfer happens when all of its ranks have reached it on their streams, so that
ranks that start transfers in different orders never end, as with NCCL. Pointers must be those of device memory, and the
ranks of a transfer must agree about it. Each thread is a rank.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextlib import contextmanager
from ctypes import c_char
from types import SimpleNamespace

import numpy as np

from support import fake_cupy

SUM, PROD, MAX, MIN, AVG = range(5)
DTYPES = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"] + ["bfloat16"]
NAMES = ["INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "FLOAT32", "FLOAT64", "BFLOAT16"]
UFUNCS = {SUM: np.add, PROD: np.multiply, MAX: np.maximum, MIN: np.minimum}
ID_BYTES = 128

_lock = threading.RLock()
_groups: dict[tuple, _Group] = {}
_local = threading.local()


class NcclError(RuntimeError):
    pass


class _Group:
    """The ranks with one unique id."""

    def __init__(self, size: int) -> None:
        self.size, self.complete = size, threading.Event()
        self.ranks: dict[int, NcclCommunicator] = {}
        self.aborted = False


class _Work(threading.Event):
    """What one call, or a group of calls, queues on a stream of a rank: its transfers, done one after the other."""

    def __init__(self, comm: NcclCommunicator, transfers: list[SimpleNamespace]) -> None:
        super().__init__()
        self.comm, self.transfers, self.thread = comm, transfers, threading.get_ident()
        self.after = transfers[0].stream.of_this_rank()  # what its stream waits for

    def can_begin(self) -> bool:
        return all(work.is_set() for work in self.after)


class NcclCommunicator:
    created: list[tuple[int, ...]] = []  #: pairs (ndev, rank), in order

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        if type(commId) is not bytes:
            raise TypeError("Argument 'commId' has incorrect type")
        assert len(commId) == ID_BYTES
        with _lock:
            self._group = _groups.setdefault(commId, _Group(ndev))
            assert self._group.size == ndev and rank not in self._group.ranks
            self.rank, self.works, self.error = rank, deque[_Work](), ""
            self._group.ranks[rank] = self
            self.created.append((ndev, rank))
            if len(self._group.ranks) == ndev:
                self._group.complete.set()
        if not self._group.complete.wait(100):
            raise NcclError("NCCL_ERROR_SYSTEM_ERROR: a rank never came")

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        self._queue("allReduce", stream, sendbuf, recvbuf, count, count, datatype, op=op)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        self._queue("reduce", stream, sendbuf, recvbuf, count, count, datatype, op=op, root=root)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        self._queue("reduceScatter", stream, sendbuf, recvbuf, recvcount * self._group.size, recvcount, datatype, op=op)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        self._queue("allGather", stream, sendbuf, recvbuf, count, count * self._group.size, datatype)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        self._queue("broadcast", stream, sendbuff, recvbuff, count, count, datatype, root=root)

    def send(self, sendbuf, count, datatype, peer, stream):
        self._queue("send", stream, sendbuf, None, count, 0, datatype, peer=peer)

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._queue("recv", stream, None, recvbuf, 0, count, datatype, peer=peer)

    def check_async_error(self):
        if self.error:
            raise NcclError(self.error)

    def abort(self):
        """Its kernels end, here and, as connections are lost, on the other ranks with an error."""
        with _lock:
            self._group.aborted = True
            for other in self._group.ranks.values():
                other.error = other.error or "NCCL_ERROR_SYSTEM_ERROR: remote process exited"
            for work in self.works:
                work.set()
            self.works.clear()

    def destroy(self):
        assert not self.works or self._group.aborted, "destroy() would wait for transfers that never end"

    def _queue(self, name, stream, sent, received, sends, receives, datatype, **more):
        dtype = np.dtype(DTYPES[datatype])
        stream = fake_cupy._streams[stream]
        transfer = SimpleNamespace(name=name, dtype=dtype, peer=None, root=None, op=None, stream=stream, done=False)
        vars(transfer).update(more)
        assert dtype.kind in "iuf" or transfer.op is None
        transfer.sent = self._values(sent, sends, dtype, stream, write=False)
        only_root = name == "reduce" and transfer.root != self.rank
        transfer.received = self._values(None if only_root else received, receives, dtype, stream, write=True)
        group = getattr(_local, "group", None)
        if group is None:
            _submit(self, [transfer])
        else:
            group.append((self, transfer))

    def _values(self, pointer, count, dtype, stream, write):
        if pointer is None:
            return None
        assert count > 0, "NCCL was called for nothing"
        memory = fake_cupy.memory_at(pointer, count * dtype.itemsize)
        memory.use(write=write, stream=stream, queued=True)
        values = np.frombuffer((c_char * (count * dtype.itemsize)).from_address(pointer), dtype)
        return SimpleNamespace(memory=memory, values=values, pointer=pointer, kept=memory.values)


def _submit(comm: NcclCommunicator, transfers: list[SimpleNamespace]) -> None:
    work = _Work(comm, transfers)
    with _lock:
        stream = transfers[0].stream
        assert all(transfer.stream is stream for transfer in transfers)
        stream.unfinished[:] = [each for each in stream.unfinished if not each.is_set()] + [work]
        for used in [used for t in transfers for used in (t.sent, t.received) if used is not None]:
            used.memory.transfers[:] = [each for each in used.memory.transfers if not each.is_set()] + [work]
            used.memory = None  # it is freed when its last array is
        comm.works.append(work)
        if comm._group.aborted:
            comm.abort()
        while any([_advance(group) for group in list(_groups.values())]):  # what ends here may let others begin
            pass


def _advance(group: _Group) -> bool:
    """Do what the first work of each rank permits. Whether anything was done."""
    heads = {rank: comm.works[0] for rank, comm in group.ranks.items() if comm.works and comm.works[0].can_begin()}
    moved = False
    for rank, head in heads.items():
        for transfer in head.transfers:
            if transfer.name == "send" and not transfer.done and (peer := heads.get(transfer.peer)) is not None:
                match = [t for t in peer.transfers if t.name == "recv" and t.peer == rank and not t.done]
                if match:
                    assert match[0].received.values.nbytes == transfer.sent.values.nbytes
                    match[0].received.values[:] = transfer.sent.values
                    transfer.done = match[0].done = moved = True
    waiting = {rank: next((t for t in head.transfers if not t.done), None) for rank, head in heads.items()}
    ready = [waiting[rank] for rank in sorted(waiting)]
    if len(ready) == group.size and all(t is not None and t.name not in ("send", "recv") for t in ready):
        _collect(ready)
        moved = True
    for rank, head in heads.items():
        if all(transfer.done for transfer in head.transfers):
            group.ranks[rank].works.popleft().set()
            moved = True
    return moved


def _collect(all_ranks: list[SimpleNamespace]) -> None:
    """Do one collective. NCCL's sums start at any rank: here at the last."""
    first = all_ranks[0]
    facts = {(t.name, t.dtype, t.op, t.root, t.sent.values.size) for t in all_ranks}
    assert len(facts) == 1, f"ranks have queued different calls: {facts}"
    sent = [t.sent.values.copy() for t in all_ranks]
    if first.op is not None:
        total = sent[-1]
        for values in sent[:-1]:
            total = UFUNCS[first.op](total, values)
    for rank, t in enumerate(all_ranks):
        t.done = True
        if t.received is None:
            continue
        if first.name == "allGather":
            _check_place(t.sent, t.received, rank)
            t.received.values[:] = np.concatenate(sent)
        elif first.name == "broadcast":
            t.received.values[:] = sent[first.root]
        elif first.name == "reduceScatter":
            _check_place(t.received, t.sent, rank)
            t.received.values[:] = total.reshape(len(sent), -1)[rank]
        else:
            _check_place(t.sent, t.received, 0)
            t.received.values[:] = total


def _check_place(part: SimpleNamespace, whole: SimpleNamespace, rank: int) -> None:
    """A call is in place only where the part is the rank's own of the whole."""
    if np.may_share_memory(part.values, whole.values):
        assert part.pointer == whole.pointer + rank * part.values.nbytes


def get_unique_id() -> bytes:
    return np.random.default_rng().bytes(ID_BYTES)


def groupStart() -> None:
    assert getattr(_local, "group", None) is None
    _local.group = []


def groupEnd() -> None:
    group, _local.group = _local.group, None
    for comm in dict.fromkeys(comm for comm, _ in group):
        _submit(comm, [transfer for each, transfer in group if each is comm])


@contextmanager
def installed():
    """``cupy.cuda.nccl`` is this module, as after ``pip install nvidia-nccl-cu13``."""
    constants = {f"NCCL_{name}": number for number, name in enumerate(NAMES)}
    constants |= {"NCCL_SUM": SUM, "NCCL_PROD": PROD, "NCCL_MAX": MAX, "NCCL_MIN": MIN, "NCCL_AVG": AVG}
    names = ["NcclCommunicator", "NcclError", "get_unique_id", "groupStart", "groupEnd"]
    before = sys.modules["cupy.cuda.nccl"]
    NcclCommunicator.created.clear()
    sys.modules["cupy.cuda.nccl"] = SimpleNamespace(
        available=True, **constants, **{name: globals()[name] for name in names}
    )
    try:
        yield NcclCommunicator
    finally:
        sys.modules["cupy.cuda.nccl"] = before
        _groups.clear()
