"""The records of a dry run: computations, communications and memory of every rank in a step.

``analyze`` returns them. Bytes are integers, counted as the ledger counts them. A FLOP is one multiplication or one
addition: a product of [m k] by [k n] has 2 m n k.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from spmd_engine.axes import axes_as_json


class HashedOnce(tuple):
    """A tuple that caches its hash, for long tuples that are often keys, such as the ranks of a group."""

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash


class Phases:
    """The phases of a step, as records and JSON name them."""

    FORWARD = "forward"
    BACKWARD_INPUT = "backward (input)"
    BACKWARD_WEIGHTS = "backward (weights)"
    RECOMPUTED = "forward again"
    LOSS = "loss"
    NORM = "gradient norm"
    UPDATE = "update"
    OTHER = "other"


#: The kinds of memory, in the order in which pictures stack them.
KINDS = (
    "parameters",
    "gradients",
    "optimizer state",
    "gathered groups",
    "whole gradients",
    "activations",
    "communication buffers",
    "temporaries",
)


@dataclass(frozen=True)
class Product:
    """Equal matrix products of [m k] by [k n]: ``calls`` calls of ``batch`` products each."""

    m: int
    n: int
    k: int
    batch: int = 1
    itemsize: int = 4
    calls: int = 1
    #: share of the device's speed that a fused kernel reaches, which consumes the result where it is computed; 0: not
    #: fused, the result goes to memory
    fused: float = 0.0
    kernel: str = ""  #: one of the host's KERNELS; "": BLAS, or a device's library

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.batch * self.calls


class Products(HashedOnce):
    """The products of a computation, shared by equal computations."""

    @cached_property
    def flops(self) -> int:
        return sum(product.flops for product in self)


@dataclass(frozen=True)
class Computation:
    """What a rank computes between two communications, in one layer, one phase and one micro-batch.

    A layer that communicates in between has two computations of the same name.
    """

    name: str  #: "block0/mlp forward"
    layer: str  #: "" for the loss, the gradient norm and the update
    phase: str
    micro_batch: int | None = None
    chunk: int | None = None  #: the chunk of a pipeline
    products: Products = Products()
    elements: int = 0  #: elements of the results of elementwise operations
    calls: int = 0  #: calls of array operations, including products
    bytes_read: int = 0
    bytes_written: int = 0
    loaded: int = 0  #: bytes that come back from where they were offloaded
    stored: int = 0  #: bytes that are offloaded
    launches: int = 0  #: kernels of a device; 0 on a host
    waits: int = 0  #: how often the host waits for the device
    copies: int = 0  #: arrays that are copied to the device

    @property
    def flops(self) -> int:
        """FLOPs of matrix products."""
        return self.products.flops


@dataclass(frozen=True)
class Communication:
    """A collective or a message of one rank.

    It begins before the computation number ``begins`` and is waited for before the computation number ``ends``. Both
    may be the number after the last.
    """

    operation: str  #: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, barrier, send or receive
    axes: str  #: mesh axes of the group, as in the ledger: "data,context"
    label: str
    ranks: int  #: ranks in the group
    place: int  #: index of this rank in the group
    payload: int  #: bytes of the array handed in
    sent: float  #: bytes that this rank sends, as the ledger counts them; the mean of its class if shards differ
    begins: int
    ends: int
    peer: int | None = None  #: for send and receive: the index of the other rank in the group
    channel: int | None = None  #: for send and receive: which of several messages under way
    received: int = 0  #: bytes of the result
    classes: tuple[int, ...] = ()  #: the classes of the ranks in the group, by number

    @property
    def priority(self) -> int:
        """The number of computations that may hide the communication; fewer are more urgent."""
        return self.ends - self.begins

    def moved(self, by: int) -> Communication:
        """The same communication, ``by`` computations later."""
        return replace(self, begins=self.begins + by, ends=self.ends + by)

    @property
    def where(self) -> tuple[str, str, str]:
        """The line of the ledger: operation, axes, label."""
        return self.operation, self.axes, self.label

    @property
    def ends_of_message(self) -> tuple[int, int, int | None] | None:
        """Sender, receiver and channel of a message; None for collectives."""
        if self.peer is None:
            return None
        ends = (self.place, self.peer) if self.operation == "send" else (self.peer, self.place)
        return *ends, self.channel

    @property
    def whole_bytes(self) -> int:
        """S: bytes of the whole array of a collective, or of a message."""
        if self.operation in ("all_gather", "broadcast", "receive", "scatter"):
            return max(self.received, self.payload)
        return self.payload * (self.ranks if self.operation == "all_to_all" else 1)


@dataclass(frozen=True)
class Moment:
    """The peak memory of a computation, in bytes by kind."""

    computation: int
    bytes_by_kind: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True)
class Peak:
    """The moment of a rank's peak memory, and the largest arrays that it then holds."""

    bytes: int
    computation: int
    bytes_by_kind: Mapping[str, int]
    holds: Sequence[tuple[str, str, int]] = ()  #: (kind, phase or group, bytes), the largest first


@dataclass(frozen=True)
class ParameterShard:
    """A rank's shard of one parameter."""

    name: str
    sharding: str  #: "d f/model"
    shape: tuple[int, ...]  #: the shape of this rank's block when unsharded
    whole_shape: tuple[int, ...]
    dtype: str
    bytes: int  #: bytes of the block
    stored_bytes: int  #: bytes of the part that this rank stores between uses
    owned_bytes: int  #: bytes of the part that this rank updates
    group: str  #: the parameter group that contains it
    layers: tuple[str, ...]  #: the layers of this rank that use it
    requires: Mapping[str, int]  #: bytes: gradient, optimizer_state, gathered
    depends_on: tuple[str, ...]  #: mesh axes over which it is gathered, or its gradient is summed


#: The axes of a group and, for axes of which the group has only some indices, these indices.
GroupKey = tuple[tuple[str, ...], tuple[tuple[str, tuple[int, ...]], ...]]


@dataclass(frozen=True)
class RankStep:
    """One step of one rank: its computations in order, its communications, and its memory."""

    coordinates: Mapping[str, int]
    computations: Sequence[Computation]
    communications: Sequence[Communication]
    timeline: Sequence[Moment]
    peak: Peak
    shards: Sequence[ParameterShard] = ()
    before: Mapping[str, int] = field(default_factory=dict)  #: bytes by kind, held between steps
    saved: Mapping[str, int] = field(default_factory=dict)  #: bytes that a layer's forward keeps, output included
    #: peak bytes above what is kept, by a computation's name
    temporaries: Mapping[str, int] = field(default_factory=dict)
    groups: Sequence[GroupKey] = ()  #: the groups that the rank communicates in
    constants: int = 0  #: bytes of the index tables that convolution kernels keep

    @cached_property
    def flops(self) -> int:
        return sum(computation.flops for computation in self.computations)

    @property
    def peak_moment(self) -> str:
        """What the rank computes at its peak."""
        if not self.computations:
            return "the start"
        computation = self.computations[self.peak.computation]
        micro_batch = computation.micro_batch
        return computation.name + (f" of micro-batch {micro_batch}" if micro_batch is not None else "")

    @property
    def bytes_sent(self) -> float:
        return sum(communication.sent for communication in self.communications)

    def ledger(self) -> dict[tuple[str, str, str], tuple[int, int, float]]:
        """Calls, payload and bytes sent, by operation, axes and label: what the step adds to this rank's ledger."""
        lines: dict[tuple[str, str, str], tuple[int, int, float]] = {}
        for communication in self.communications:
            calls, payload, sent = lines.get(communication.where, (0, 0, 0))
            lines[communication.where] = calls + 1, payload + communication.payload, sent + communication.sent
        return lines

    @property
    def launches(self) -> int:
        """Kernels that the rank's host launches on its device; 0 on a host."""
        return sum(computation.launches for computation in self.computations)

    @property
    def waits(self) -> int:
        """How often the host waits for the device, besides communication."""
        return sum(computation.waits for computation in self.computations)

    @property
    def copies(self) -> int:
        """Arrays that the host copies to the device."""
        return sum(computation.copies for computation in self.computations)


@dataclass(frozen=True)
class RankClass:
    """Ranks whose steps are equal except for their coordinates: the step of one, and the numbers of all."""

    step: RankStep
    ranks: Sequence[int]  #: their numbers, in row-major order of the mesh's axes

    @property
    def count(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class StepAnalysis:
    """One step of all ranks."""

    model: str
    axes: Mapping[str, int]
    classes: Sequence[RankClass]
    micro_batches: int
    parameters: int  #: parameters of the whole model
    composition: Mapping[str, Any] = field(default_factory=dict)  #: as JSON
    approximate: Sequence[str] = ()  #: assumptions about quantities that depend on values
    tables: Sequence[int] = ()  #: bytes of slot tables on each rank; (): none

    @property
    def ranks(self) -> int:
        """All ranks: those of the mesh and, with the next numbers, helper ranks."""
        return sum(rank_class.count for rank_class in self.classes)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by all ranks, as ``metrics.jsonl`` counts them."""
        return round(sum(rank_class.count * rank_class.step.bytes_sent for rank_class in self.classes))

    @property
    def calls(self) -> int:
        """Collectives and messages of all ranks; one is counted on each rank that takes part."""
        return sum(rank_class.count * len(rank_class.step.communications) for rank_class in self.classes)

    @property
    def flops(self) -> int:
        return sum(rank_class.count * rank_class.step.flops for rank_class in self.classes)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the rank that needs most."""
        return max(self.peak_bytes_by_rank())

    def of_rank(self, rank: int) -> RankStep:
        """The step of a rank; its coordinates are those of another rank of the class."""
        return next(rank_class.step for rank_class in self.classes if rank in rank_class.ranks)

    def peak_bytes_by_rank(self) -> list[int]:
        peaks = [0] * self.ranks
        for rank_class in self.classes:
            for rank in rank_class.ranks:
                peaks[rank] = rank_class.step.peak.bytes + rank_class.step.constants + self.tables_of_rank(rank)
        return peaks

    def tables_of_rank(self, rank: int) -> int:
        """Bytes of the slot tables that this rank holds throughout a step."""
        return self.tables[rank] if self.tables else 0

    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Calls and bytes sent by all ranks, by operation and axes."""
        calls: dict[tuple[str, str], int] = defaultdict(int)
        sent: dict[tuple[str, str], float] = defaultdict(float)
        for rank_class in self.classes:
            for (operation, axes, _), line in rank_class.step.ledger().items():
                calls[operation, axes] += rank_class.count * line[0]
                sent[operation, axes] += rank_class.count * line[2]
        return {key: (calls[key], round(sent[key])) for key in calls}

    def critical_path(self) -> CriticalPath:
        """The longest chain of computations. Communication takes no time, but computations wait for it."""
        return _longest_chain([rank_class.step for rank_class in self.classes])

    def as_json(self) -> dict[str, Any]:
        """The analysis as JSON."""
        plain: dict[str, Any] = asdict(self) | {"axes": axes_as_json(self.axes)}
        for entry, rank_class in zip(plain["classes"], self.classes, strict=True):
            entry["ranks"] = list(rank_class.ranks)
        totals = [
            {"operation": operation, "axes": axes, "calls": calls, "bytes": sent}
            for (operation, axes), (calls, sent) in self.totals().items()
        ]
        return plain | {"bytes_sent": self.bytes_sent, "peak_bytes": self.peak_bytes_by_rank(), "totals": totals}


# --- The critical path: the longest chain of computations through all ranks, by FLOPs, that the end of a step waits for


Node = tuple[int, int]  # class of ranks, number of the computation


@dataclass(frozen=True)
class CriticalPath:
    """A chain of computations, each of which waits for the one before, on its own rank or on another."""

    flops: int  #: FLOPs of the chain, which a step executes in sequence on any number of ranks
    nodes: Sequence[Node]

    @property
    def classes(self) -> list[int]:
        """The classes of ranks that the chain passes through, in order."""
        passed = [number for number, _ in self.nodes]
        return [number for index, number in enumerate(passed) if not index or passed[index - 1] != number]


def _longest_chain(steps: Sequence[RankStep]) -> CriticalPath:
    """Executes the steps of all classes of ranks, and notes what each computation waited for."""
    keys = [list(_list_keys(step)) for step in steps]
    parties: dict[Any, set[int]] = defaultdict(set)
    for number, of_class in enumerate(keys):
        for key, call in of_class:
            parties[key].update([number] if call.peer is not None else call.classes)
    done: list[list[int]] = [[] for _ in steps]  # FLOPs before the end of each computation
    after: dict[Node, Node | None] = {}  # what each computation waited for
    #: for each communication, by class: the FLOPs before it began, and the computation before it
    begun: dict[Any, dict[int, tuple[int, Node | None]]] = defaultdict(dict)

    def advance(number: int) -> bool:
        """Execute one class of ranks until it waits; return whether it executed a computation."""
        ended, first = done[number], len(done[number])
        while True:
            index = len(ended)
            last = (ended[-1], (number, index - 1)) if ended else (0, None)
            for key, call in keys[number]:
                if call.begins <= index:
                    begun[key].setdefault(number, last)
            waits = [key for key, call in keys[number] if call.ends == index and call.operation != "send"]
            if index == len(steps[number].computations) or any(set(begun[key]) < parties[key] for key in waits):
                return index > first
            flops, node = max([last, *(end for key in waits for end in begun[key].values())], key=lambda x: x[0])
            ended.append(flops + steps[number].computations[index].flops)
            after[number, index] = node

    while any([advance(number) for number in range(len(steps))]):
        pass  # if none advances before the end, the rest waits for calls that are not recorded: the path ends there
    ends = [(flops[-1], number) for number, flops in enumerate(done) if flops]
    if not ends:
        return CriticalPath(0, ())
    flops, number = max(ends)
    nodes, node = [], (number, len(done[number]) - 1)
    while node is not None:
        nodes.append(node)
        node = after[node]
    return CriticalPath(flops, nodes[::-1])


def _list_keys(step: RankStep) -> Iterator[tuple[Any, Communication]]:
    """A key for each communication, equal on all ranks that take part in it."""
    counts: dict[Any, int] = defaultdict(int)
    for communication in step.communications:
        if communication.peer is not None:
            key: Any = ("message", communication.axes, communication.ends_of_message, communication.classes)
        else:
            key = (communication.where, communication.classes)
        counts[key] += 1
        yield (key, counts[key]), communication
