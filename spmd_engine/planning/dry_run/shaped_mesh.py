"""A mesh without ranks: its collectives are planned by the real text, counted, and answered with shapes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.axes import MeshPosition, Over
from spmd_engine.comm.collectives import PreparedCall
from spmd_engine.comm.dispatch import Tuning
from spmd_engine.comm.group import Group
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.mesh import Mesh
from spmd_engine.comm.pending import Pending, Progress
from spmd_engine.comm.reducing import reduce_into
from spmd_engine.comm.spans import joined
from spmd_engine.comm.transports.shared_memory import CACHE
from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.recorder import Recorder
from spmd_engine.planning.dry_run.step_analysis import Communication, GroupKey


@dataclass(frozen=True)
class ForetoldRanks:
    """Which class each rank of a mesh is of, and where the ranks of different classes meet."""

    axes: Mapping[str, int]
    classes: np.ndarray  #: numbers of classes, by coordinates
    meeting: MeetingPoint
    nodes: Sequence[str]  #: of each rank, by number


class _Nobody:
    """A communicator that only says which rank this is."""

    device_aware, table, lanes, node_table, library, neighbours, spin_tests = True, None, None, None, None, None, 0
    collectives, lane_collectives, tuning = None, None, Tuning()
    hosts = range(2)  # nobody fills parameters for another
    progress = Progress()  # of all alike: nothing is ever under way, and nobody reads what they do

    def __init__(self, rank: int, size: int, node: str) -> None:
        self.rank, self.size, self.node = rank, size, node
        self._messages: dict[tuple, int] = {}

    def next_message(self, way: str, rank: int) -> int:
        """As of a Communicator."""
        self._messages[way, rank] = self._messages.get((way, rank), -1) + 1
        return self._messages[way, rank]

    def free(self) -> None:
        """There is nothing to give back."""


class ShapedMesh(Mesh):
    """One rank's view of a mesh that is not there."""

    def __init__(
        self, ranks: ForetoldRanks, coordinates: Mapping[str, int], recorder: Recorder, *, checks: bool = False
    ) -> None:
        self.all, self.recorder = ranks, recorder
        recorder.own_class = int(ranks.classes[tuple(coordinates.values())])
        MeshPosition.__init__(self, dict(ranks.axes), dict(coordinates))
        self.size = prod(self.axes.values())
        self.ranks = np.arange(self.size).reshape(tuple(self.axes.values()))
        self.rank = self.index(None)
        self.nodes = list(ranks.nodes)
        self.comm = _Nobody(self.rank, self.size, self.nodes[self.rank])
        self.ledger = Ledger()
        self._options = {"check": checks, "timeout": None}
        self._groups: dict[tuple, Group] = {}
        self._owned = []

    def group(self, over: Over = None, *, among: Mapping[str, Sequence[int]] | None = None) -> Group:
        names = self._names(over)
        places = tuple((name, tuple(among[name])) for name in names if name in among) if among else ()
        if (names, places) not in self._groups:
            classes = self._classes(names, dict(places))
            sizes = [len(dict(places).get(name, range(self.axes[name]))) for name in names]
            rank = 0
            for name, size in zip(names, sizes, strict=True):
                rank = rank * size + list(dict(places).get(name, range(self.axes[name]))).index(self.coordinates[name])
            comm = _Nobody(rank, prod(sizes), self.comm.node)
            self._groups[names, places] = ShapedGroup(comm, names, places, classes, self)
        return self._groups[names, places]

    def _classes(self, names: tuple[str, ...], places: Mapping[str, Sequence[int]]) -> list[int]:
        """The class of each rank of a group, in its order."""
        axes = list(self.axes)
        index = [
            list(places.get(axis, range(self.axes[axis]))) if axis in names else [self.coordinates[axis]]
            for axis in axes
        ]
        part = self.all.classes[np.ix_(*index)]
        others = [axis for axis in axes if axis not in names]
        return part.transpose([axes.index(axis) for axis in (*others, *names)]).reshape(-1).tolist()

    def group_keys(self, communications: Sequence[Communication]) -> list[GroupKey]:
        """The groups that were asked for, and those of passes through layers that were not run once more."""
        keys = dict.fromkeys(self._groups)
        known = {names for names, _ in keys}
        for names in {tuple(each.axes.split(",")) for each in communications}:
            if names not in known and set(names) <= set(self.axes):
                keys[names, ()] = None
        return list(keys)

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, *, zero: bool = False) -> ShapedArray:
        array = ShapedArray.new(shape, dtype)
        array.memory.shared = True
        return array

    def close(self) -> None:
        """There is nothing to give back."""


class ShapedGroup(Group):
    """Ranks of which only this one is there. What it calls is checked and counted as ever; nothing is sent."""

    def __init__(
        self, comm: _Nobody, names: tuple[str, ...], places: tuple, classes: Sequence[int], mesh: ShapedMesh
    ) -> None:
        super().__init__(comm, ",".join(names) or "nobody", mesh.ledger, check=False, timeout=None)
        self._mesh, self._meeting, self._classes = mesh, mesh.all.meeting, classes
        self._own, self._key = mesh.recorder.own_class, (names, places)
        self._others = sorted(set(classes) - {self._own})
        self._alike = [place for place, each in enumerate(classes) if each == self._own]
        self._calls = 0
        self._means: dict[tuple[int, int], tuple[PreparedCall, float]] = {}

    # --- collectives

    def _start(self, call: PreparedCall, x: Array | None, out: Any = None, **how: int) -> Pending:
        operation = call.where[0]
        packed = self._packed(call, x)
        result = self._result(call, x, out)
        sent = self._sent(call, result)
        begun = self._mesh.recorder.begin(**self._facts(operation, call.where[2], call.payload, sent))
        passing = self._passing(call, x, result)
        return _Answer(self._mesh.recorder, begun, lambda: result, x if packed is None else (x, packed), passing)

    def _packed(self, call: PreparedCall, x: Array | None) -> ShapedArray | None:
        """The copy in which parts that are cut along a later axis lie in one piece each: see ``Collective.packed``."""
        if call.where[0] not in ("reduce_scatter", "all_to_all") or not isinstance(x, ShapedArray):
            return None
        if call.signature.inline or x.ndim == 1 or len(call.parts[0]) == 1:
            return None
        return ShapedArray.new((x.size,), x.dtype)

    def _passing(self, call: PreparedCall, x: Array | None, result: Any) -> int:
        """Bytes that are held while data move: what is joined along a later axis, before it is in its place, and, on
        one node, pieces of neighbours' own memory that are added up at a time."""
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
        """As the ledger counts it; where this rank stands for several whose parts differ a little, the mean."""
        if len(self._alike) < 2 or call.where[0] not in ("all_reduce", "reduce_scatter", "all_gather"):
            return call.sent(result) if callable(call.sent) else call.sent
        key = id(call), getattr(result, "nbytes", 0)
        if key not in self._means:
            self._means[key] = call, self._mean_sent(call, result)  # with the call, so that its id stays its own
        return self._means[key][1]

    def _mean_sent(self, call: PreparedCall, result: Any) -> float:
        sent = call.sent(result) if callable(call.sent) else call.sent
        match call.where[0]:
            case "all_reduce":
                whole, rest = divmod(prod(call.shape), self.size)  # the first ranks have one more
                mine = whole + bisect_left(self._alike, rest) / len(self._alike)
                return call.payload + mine * call.dtype.itemsize * (self.size - 2)
            case "reduce_scatter":
                parts = (part[-1] for part in map(call.parts.__getitem__, self._alike))
                row = call.payload / max(1, call.parts[-1][-1].stop)
                return call.payload - sum(part.stop - part.start for part in parts) * row / len(self._alike)
            case "all_gather" if call.sizes is not None:
                row = result.nbytes / max(1, sum(call.sizes))
                return sum(call.sizes[place] for place in self._alike) * row * (self.size - 1) / len(self._alike)
        return sent

    def _facts(self, operation: str, label: str, payload: int, sent: int) -> dict[str, Any]:
        return {
            "operation": operation,
            "axes": self.axes,
            "label": label,
            "ranks": self.size,
            "place": self.rank,
            "payload": payload,
            "sent": sent,
            "classes": tuple(sorted({self._own, *self._others})),
        }

    def _result(self, call: PreparedCall, x: Array | None, out: Any) -> Any:
        """What the call returns, of values where it is of values (counts, lengths), else a shape."""
        operation = call.where[0]
        if operation == "barrier":
            return None
        if isinstance(x, ShapedArray) and operation in ("all_reduce", "reduce_scatter"):
            return out if out is not None else ShapedArray.new(call.shape, call.dtype)
        if isinstance(x, ShapedArray) and operation == "all_gather" and call.sizes is not None:
            return out if out is not None else ShapedArray.new((sum(call.sizes), *x.shape[1:]), call.dtype)
        given = self._everyones((call, x))
        shaped = any(isinstance(each, ShapedArray) for _, each in given)
        result = (_of_shapes if shaped else _of_values)(self, call, given)
        if out is not None:
            out[...] = result
            result = out
        if not call.returns_lengths:
            return result
        along = call.signature.concat_axis
        return result, [each[self.part_for_me(theirs)].shape[along] for theirs, each in given]

    def _everyones(self, mine: Any) -> list[Any]:
        """What each rank of the group gives in this call, by rank."""
        if not self._others:
            return [mine] * self.size
        self._calls += 1
        call, x = mine
        told = ShapedArray(x.shape, x.dtype) if isinstance(x, ShapedArray) else x  # whose memory nobody holds for it
        self._meeting.leave(("call", self._key, self._own, self._calls), (call, told))
        of_class = {self._own: mine}
        for other in self._others:
            of_class[other] = self._meeting.take(("call", self._key, other, self._calls))
        return [of_class[each] for each in self._classes]

    def part_for_me(self, call: PreparedCall) -> tuple[slice, ...]:
        """Which part of what another rank gives is for this one."""
        return call.parts[self.rank]

    # --- messages

    def start_send(self, to: int, x: Array, *, channel: int | None = None, label: str = "") -> Pending:
        self._check_peer("send", to)
        key = self._message_key("to", to, (to - self.rank) % self.size, self._own, channel)
        self._meeting.leave(key, (x.shape, x.dtype))
        facts = self._facts("send", label, x.nbytes, x.nbytes) | {"peer": to, "channel": channel}
        return _Answer(self._mesh.recorder, self._mesh.recorder.begin(**facts), lambda: None, held=x)

    def start_receive(
        self, source: int, *, like: Backend = CPU, channel: int | None = None, label: str = ""
    ) -> Pending:
        self._check_peer("receive", source)
        key = self._message_key("from", source, (self.rank - source) % self.size, self._classes[source], channel)
        facts = self._facts("receive", label, 0, 0) | {"peer": source, "channel": channel}
        call = self._mesh.recorder.begin(**facts)
        return _Answer(self._mesh.recorder, call, lambda: ShapedArray.new(*self._meeting.take(key)))

    def _message_key(self, way: str, peer: int, distance: int, sender: int, channel: int | None) -> tuple:
        """What a message is left under: who sends it, how far, and which one it is."""
        number = ("channel", channel) if channel is not None else self.comm.next_message(way, peer)
        return "message", self._key, sender, distance, number


class _Answer(Pending):
    """A call under way, whose result is known; what was handed in is held until it is waited for, and then for a moment
    ``passing`` bytes more."""

    __slots__ = ("_recorder", "_call", "_make", "_held", "_passing")

    def __init__(self, recorder: Recorder, call: Any, make: Any, held: Any = None, passing: int = 0) -> None:
        super().__init__(None, None)
        self._recorder, self._call, self._make, self._held, self._passing = recorder, call, make, held, passing
        if held is not None:
            recorder.sending.append([0, self])

    def has_left(self) -> None:
        """What was handed in is needed no longer: others have it."""
        self._held = None

    @property
    def held(self) -> bool:
        """Whether what was handed in is still needed."""
        return self._held is not None

    def wait(self) -> Any:
        if not self.done:
            place, call = self._recorder.place, self._call
            self.result, self.done = self._make(), True
            if self._passing:
                self._recorder.meter.allocate(self._passing)
            self._make = self._held = None
            received = getattr(self.result, "nbytes", 0)
            call.end(place, received)
            if call.facts.get("channel") is not None and received:
                self._recorder.arrived(call.begins, received)
            self._recorder.waited(call.begins == place)
        return self.result


def _of_shapes(group: ShapedGroup, call: PreparedCall, given: list[Any]) -> ShapedArray:
    operation, axis = call.where[0], call.signature.axis
    if operation == "all_gather":
        first = given[0][1].shape
        whole = sum(each.shape[axis] for _, each in given)
        return ShapedArray.new((*first[:axis], whole, *first[axis + 1 :]), call.dtype)
    if operation == "all_to_all":
        parts = [each[group.part_for_me(theirs)].shape for theirs, each in given]
        along = call.signature.concat_axis
        shape = list(parts[0])
        shape[along] = sum(part[along] for part in parts)
        return ShapedArray.new(shape, call.dtype)
    root = given[call.signature.root][1]
    return ShapedArray.new(root.shape, root.dtype)


def _of_values(group: ShapedGroup, call: PreparedCall, given: list[Any]) -> np.ndarray:
    operation, blocks = call.where[0], [each for _, each in given]
    if operation == "broadcast":
        return np.array(blocks[call.signature.root])
    if operation == "all_gather":
        return np.concatenate(blocks, axis=call.signature.axis)
    if operation == "all_to_all":
        parts = [each[group.part_for_me(theirs)] for theirs, each in given]
        return joined(parts, call.signature.concat_axis, call.dtype)
    mine = [x.astype(call.dtype) for x in blocks]
    if operation == "reduce_scatter":
        mine = [x[call.parts[group.rank]] for x in mine]
    result = np.empty_like(mine[0])
    reduce_into(result, mine, call.signature.reduction)
    return result


# --- Where ranks that are run on shapes tell each other the few things that one must know of another
#
# One rank stands for all that are like it (a *class*), and each class runs in a thread of its own. Whoever gathers
# from ranks of other classes, or receives from one, needs the shape of what these give; they leave it here.


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
