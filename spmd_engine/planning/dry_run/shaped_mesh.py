"""The mesh of a dry run: collectives are checked and counted by the real code, and return shapes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.axes import MeshPosition, Over, count_ranks, rank_grid
from spmd_engine.comm import Group, Ledger, Mesh
from spmd_engine.comm.blocks import joined, reduce_into
from spmd_engine.comm.calls import PreparedCall
from spmd_engine.comm.pending import Pending, Progress
from spmd_engine.comm.transports.shared_memory import CACHE
from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.recorder import Recorder
from spmd_engine.planning.dry_run.step_analysis import Communication, GroupKey


@dataclass(frozen=True)
class DryRunRanks:
    """The ranks of a mesh by class, and the mailbox through which classes exchange shapes."""

    axes: Mapping[str, int]
    classes: np.ndarray  #: the class of each rank, int[axes]
    mailbox: Mailbox
    nodes: Sequence[str]  #: the host of each rank, by number
    others: int = 0  #: ranks of the job that are not on the mesh; they have the next numbers

    @property
    def size(self) -> int:
        """The number of ranks of the mesh."""
        return count_ranks(self.axes)


class _NoCommunicator:
    """A communicator that knows its rank and sends nothing."""

    is_device_aware, in_one_process, connections, spin_tests = True, True, None, 0
    hosts: Sequence[Any] = range(2)  # no rank initializes parameters for another
    progress = Progress()  # no call is ever under way

    def __init__(self, rank: int, size: int, node: str) -> None:
        self.rank, self.size, self.node, self.members = rank, size, node, range(size)

    def free(self) -> None:
        """There is nothing to free."""


class ShapedMesh(Mesh):
    """One rank's view of a mesh, without the other ranks."""

    def __init__(
        self, ranks: DryRunRanks, coordinates: Mapping[str, int], recorder: Recorder, *, checks: bool = False
    ) -> None:
        self.all, self.recorder = ranks, recorder
        recorder.own_class = int(ranks.classes[tuple(coordinates.values())])
        MeshPosition.__init__(self, dict(ranks.axes), dict(coordinates))
        self.size, self.ranks = ranks.size, rank_grid(ranks.axes)
        self.rank = self.index(None)
        self.nodes = list(ranks.nodes)
        self.comm = _NoCommunicator(self.rank, self.size, self.nodes[self.rank])
        self.ledger = Ledger()
        self.others: Any = _ShapedOthers(self)
        self.options = {"check": checks, "timeout": None}
        self._groups: dict[tuple, Group] = {}
        self._owned = []

    def group(self, over: Over = None, *, among: Mapping[str, Sequence[int]] | None = None) -> Group:
        names = self._names(over)
        places = tuple((name, tuple(among[name])) for name in names if name in among) if among else ()
        if (names, places) not in self._groups:
            members = self._members(names, dict(places))
            comm = _NoCommunicator(members.index(self.rank), len(members), self.comm.node)
            classes = self.all.classes[self.all.classes >= 0][members].tolist()  # by rank
            self._groups[names, places] = ShapedGroup(comm, names, places, classes, self)
        return self._groups[names, places]

    def all_ranks(self, name: str) -> Group:
        world = self.others.world
        return ShapedGroup(world, (name,), (), world.members, self)

    def alone(self) -> ShapedMesh:
        return self

    def group_keys(self, communications: Sequence[Communication]) -> list[GroupKey]:
        """The groups that were used, and those of cached passes."""
        keys = dict.fromkeys(self._groups)
        used = {names for names, _ in keys}
        for names in {tuple(communication.axes.split(",")) for communication in communications}:
            if names not in used and set(names) <= set(self.axes):
                keys[names, ()] = None
        return list(keys)

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, *, zero: bool = False) -> ShapedArray:
        array = ShapedArray.new(shape, dtype)
        assert array.memory is not None
        array.memory.shared = True
        return array

    def close(self) -> None:
        """There is nothing to free."""


class _ShapedOthers:
    """The ranks of a job that are not on the mesh: they get the order of a step through the mailbox."""

    def __init__(self, mesh: ShapedMesh) -> None:
        size, self._mailbox = mesh.all.size + mesh.all.others, mesh.all.mailbox
        self.world = _NoCommunicator(mesh.recorder.own_class, size, "")  # where each rank is a class, if it is used
        self.world.hosts = [""] * size

    def send(self, order: Mapping[str, Any], ranks: Sequence[int]) -> None:
        """As ``OtherRanks.send``."""
        self._mailbox.put("order", order)

    def take(self) -> dict[str, Any]:
        """As ``OtherRanks.take``."""
        return deepcopy(self._mailbox.take("order"))


class ShapedGroup(Group):
    """A group without its other ranks. Its calls are checked and counted as usual; nothing is sent."""

    def __init__(
        self, comm: _NoCommunicator, names: tuple[str, ...], places: tuple, classes: Sequence[int], mesh: ShapedMesh
    ) -> None:
        stand_in: Any = comm  # replaces a Communicator
        super().__init__(stand_in, ",".join(names) or "no axis", mesh.ledger, check=False, timeout=None)
        self._mesh, self._mailbox, self._classes = mesh, mesh.all.mailbox, classes
        self._own_class, self._key = mesh.recorder.own_class, (names, places)
        self._others = sorted(set(classes) - {self._own_class})
        self._peers = [index for index, number in enumerate(classes) if number == self._own_class]  # in this class
        self._calls = 0
        self._means: dict[tuple[int, int], tuple[PreparedCall, float]] = {}

    # --- collectives

    def _start(self, call: PreparedCall, x: Array | None, out: Any = None, **options: int) -> Pending:
        operation = call.where[0]
        packed = self._packed(call, x)
        result = self._result(call, x, out)
        sent = self._sent(call, result)
        begun = self._mesh.recorder.begin(**self._facts(operation, call.where[2], call.payload, sent))
        held = x if packed is None else (x, packed)
        return _PendingShape(self._mesh.recorder, begun, lambda: result, held, self._scratch(call, x, result))

    def _packed(self, call: PreparedCall, x: Array | None) -> ShapedArray | None:
        """The copy that makes parts along a later dim contiguous: see ``Collective.packed``."""
        if call.where[0] not in ("reduce_scatter", "all_to_all") or not isinstance(x, ShapedArray):
            return None
        if call.signature.inline or x.ndim == 1 or len(_parts(call)[0]) == 1:
            return None
        return ShapedArray.new((x.size,), x.dtype)

    def _scratch(self, call: PreparedCall, x: Array | None, result: Any) -> int:
        """Bytes that are held while data move: parts before they are joined along a later dim and, on one node, the
        pieces of other ranks' arrays that are summed at a time."""
        operation = call.where[0]
        if call.signature.inline or not isinstance(x, ShapedArray) or not isinstance(result, ShapedArray):
            return 0
        if operation in ("all_gather", "all_to_all"):
            return result.nbytes if call.signature.concat_axis else 0
        if operation not in ("all_reduce", "reduce_scatter") or len(set(self._mesh.nodes)) > 1:
            return 0
        part = result.nbytes if operation == "reduce_scatter" else -(-result.nbytes // self.size)
        apart = x.memory is None or not x.memory.shared
        return min(CACHE // self.size, part) * ((self.size - 1) * apart + (self.size > 2))

    def _sent(self, call: PreparedCall, result: Any) -> float:
        """Bytes sent, as the ledger counts them: the mean over the ranks of this class, as their shards may differ."""
        if len(self._peers) < 2 or call.where[0] not in ("all_reduce", "reduce_scatter", "all_gather"):
            return call.sent(result) if callable(call.sent) else call.sent
        key = id(call), getattr(result, "nbytes", 0)
        if key not in self._means:
            self._means[key] = call, self._mean_sent(call, result)  # keeps the call so that its id is not reused
        return self._means[key][1]

    def _mean_sent(self, call: PreparedCall, result: Any) -> float:
        sent = call.sent(result) if callable(call.sent) else call.sent
        match call.where[0]:
            case "all_reduce":
                share, rest = divmod(prod(call.shape), self.size)  # the first ranks have one more
                mean_share = share + bisect_left(self._peers, rest) / len(self._peers)
                return call.payload + mean_share * call.dtype.itemsize * (self.size - 2)
            case "reduce_scatter":
                parts = _parts(call)
                row = call.payload / max(1, parts[-1][-1].stop)
                rows = sum(parts[place][-1].stop - parts[place][-1].start for place in self._peers)
                return call.payload - rows * row / len(self._peers)
            case "all_gather" if call.sizes is not None:
                row = result.nbytes / max(1, sum(call.sizes))
                return sum(call.sizes[place] for place in self._peers) * row * (self.size - 1) / len(self._peers)
        return sent

    def _facts(self, operation: str, label: str, payload: int, sent: float) -> dict[str, Any]:
        return {
            "operation": operation,
            "axes": self.axes,
            "label": label,
            "ranks": self.size,
            "place": self.rank,
            "payload": payload,
            "sent": sent,
            "classes": tuple(sorted({self._own_class, *self._others})),
        }

    def _result(self, call: PreparedCall, x: Array | None, out: Any) -> Any:
        """The result of the call: values (counts, lengths) if all ranks pass values, else a shape."""
        operation = call.where[0]
        if operation == "barrier":
            return None
        if isinstance(x, ShapedArray) and operation in ("all_reduce", "reduce_scatter"):
            return out if out is not None else ShapedArray.new(call.shape, call.dtype)
        if isinstance(x, ShapedArray) and operation == "all_gather" and call.sizes is not None:
            return out if out is not None else ShapedArray.new((sum(call.sizes), *x.shape[1:]), call.dtype)
        inputs = self._inputs_of_all((call, x))
        shaped = any(isinstance(block, ShapedArray) for _, block in inputs)
        result = (_result_of_shapes if shaped else _result_of_values)(self, call, inputs)
        if out is not None:
            out[...] = result
            result = out
        if not call.returns_lengths:
            return result
        along = call.signature.concat_axis
        return result, [block[self.part_for_me(theirs)].shape[along] for theirs, block in inputs]

    def _inputs_of_all(self, mine: tuple) -> list[tuple]:
        """The call and the input of each rank of the group, by rank."""
        if not self._others:
            return [mine] * self.size
        self._calls += 1
        call, x = mine
        without_memory = ShapedArray(x.shape, x.dtype) if isinstance(x, ShapedArray) else x
        self._mailbox.put(("call", self._key, self._own_class, self._calls), (call, without_memory))
        of_class = {self._own_class: mine}
        for other in self._others:
            of_class[other] = self._mailbox.take(("call", self._key, other, self._calls))
        return [of_class[number] for number in self._classes]

    def part_for_me(self, call: PreparedCall) -> tuple[slice, ...]:
        """The part of another rank's input that goes to this rank."""
        return _parts(call)[self.rank]

    # --- messages

    def start_send(self, to: int, x: Array, *, channel: int | None = None, label: str = "") -> Pending:
        self._check_peer("send", to)
        key = self._message_key("to", to, (to - self.rank) % self.size, self._own_class, channel)
        self._mailbox.put(key, ShapedArray(x.shape, x.dtype) if isinstance(x, ShapedArray) else x)
        facts = self._facts("send", label, x.nbytes, x.nbytes) | {"peer": to, "channel": channel}
        return _PendingShape(self._mesh.recorder, self._mesh.recorder.begin(**facts), lambda: None, held=x)

    def start_receive(
        self, source: int, *, like: Backend = CPU, channel: int | None = None, label: str = ""
    ) -> Pending:
        self._check_peer("receive", source)
        key = self._message_key("from", source, (self.rank - source) % self.size, self._classes[source], channel)
        facts = self._facts("receive", label, 0, 0) | {"peer": source, "channel": channel}
        call = self._mesh.recorder.begin(**facts)

        def received() -> Array:  # values remain values
            x = self._mailbox.take(key)
            return ShapedArray.new(x.shape, x.dtype) if isinstance(x, ShapedArray) else x

        return _PendingShape(self._mesh.recorder, call, received)

    def _message_key(self, direction: str, peer: int, distance: int, sender: int, channel: int | None) -> tuple:
        """The key of a message: its group, the class of its sender, its distance, and its number."""
        number = ("channel", channel) if channel is not None else next(self.connections.messages[direction, peer])
        return "message", self._key, sender, distance, number


class _PendingShape(Pending):
    """A call under way with a known result. It holds its input until the wait, and ``scratch`` more bytes during the
    wait."""

    __slots__ = ("_recorder", "_call", "_make", "_held", "_scratch")

    def __init__(
        self, recorder: Recorder, call: Any, make: Callable[[], Any], held: Any = None, scratch: int = 0
    ) -> None:
        super().__init__()
        self._recorder, self._call, self._make = recorder, call, make
        self._held, self._scratch = held, scratch
        if held is not None:
            recorder.sending.append([0, self])

    def release(self) -> None:
        """Release the input, which the other ranks have received."""
        self._held = None

    @property
    def held(self) -> bool:
        """Whether the input is still held."""
        return self._held is not None

    def wait(self) -> Any:
        if not self.done:
            computation, call = self._recorder.next_computation, self._call
            assert self._make is not None
            self.result, self.done = self._make(), True
            if self._scratch:
                self._recorder.meter.allocate(self._scratch)
            self._make = self._held = None
            received = getattr(self.result, "nbytes", 0)
            call.end(computation, received)
            if call.facts.get("channel") is not None and received:
                self._recorder.arrived(call.begins, received)
            self._recorder.waited(call.begins == computation)
        return self.result


def _parts(call: PreparedCall) -> Sequence[tuple[slice, ...]]:
    assert call.parts is not None, call.where
    return call.parts


def _result_of_shapes(group: ShapedGroup, call: PreparedCall, inputs: list[tuple]) -> ShapedArray:
    operation, axis = call.where[0], call.signature.axis
    if operation == "all_gather":
        first = inputs[0][1].shape
        length = sum(block.shape[axis] for _, block in inputs)
        return ShapedArray.new((*first[:axis], length, *first[axis + 1 :]), call.dtype)
    if operation == "all_to_all":
        parts = [block[group.part_for_me(theirs)].shape for theirs, block in inputs]
        along = call.signature.concat_axis
        shape = list(parts[0])
        shape[along] = sum(part[along] for part in parts)
        return ShapedArray.new(shape, call.dtype)
    root = inputs[call.signature.root][1]
    return ShapedArray.new(root.shape, root.dtype)


def _result_of_values(group: ShapedGroup, call: PreparedCall, inputs: list[tuple]) -> np.ndarray:
    operation, blocks = call.where[0], [block for _, block in inputs]
    if operation == "broadcast":
        return np.array(blocks[call.signature.root])
    if operation == "all_gather":
        return np.concatenate(blocks, axis=call.signature.axis)
    if operation == "all_to_all":
        parts = [block[group.part_for_me(theirs)] for theirs, block in inputs]
        return joined(parts, call.signature.concat_axis, call.dtype)
    summands = [x.astype(call.dtype) for x in blocks]
    if operation == "reduce_scatter":
        summands = [x[group.part_for_me(call)] for x in summands]
    result = np.empty_like(summands[0])
    reduce_into(result, summands, call.signature.reduction)
    return result


# --- The mailbox. One rank represents each class, in its own thread. To gather from ranks of other classes, or to
# --- receive from one, it takes the shapes of their inputs from the mailbox


PATIENCE = 60.0  #: seconds without progress after which a deadlock of the ranks is assumed


class Mailbox:
    """Shapes that classes of ranks have put, by key. A class that takes a shape waits for it. Classes run one at a
    time, each with the lock, since Python runs only one thread.
    """

    def __init__(self) -> None:
        self._items: dict[Hashable, Any] = {}
        self._condition = threading.Condition()
        self.failure: BaseException | None = None

    def put(self, key: Hashable, item: Any) -> None:
        """Put an item for the classes that take ``key``."""
        with self._condition:
            self._items[key] = item
            self._condition.notify_all()

    def take(self, key: Hashable) -> Any:
        """The item under ``key``, as soon as it has been put; raises UsageError if no class puts it."""
        with self._condition:
            while key not in self._items:
                if self.failure is not None:
                    raise _Aborted("the step of another rank failed")
                if not self._condition.wait(PATIENCE):
                    raise UsageError(f"the step would hang: a rank waits for a call that no other rank makes: {key}")
            return self._items[key]

    def run(self, programs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all programs concurrently and return their results; raises the first error of any."""
        if len(programs) == 1:
            with self._condition:
                return [programs[0]()]
        results: list[Any] = [None] * len(programs)

        def body(number: int) -> None:
            with self._condition:
                try:
                    results[number] = programs[number]()
                except BaseException as error:
                    self.failure = error if self.failure is None else self.failure
                    self._condition.notify_all()  # the others abort

        threads = [threading.Thread(target=body, args=(n,), daemon=True) for n in range(len(programs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        return results


class _Aborted(Exception):
    """Ends a rank's step because another rank's step failed."""
