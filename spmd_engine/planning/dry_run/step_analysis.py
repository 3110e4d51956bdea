"""What is known of a step before it is made: computations, communications and memory of every rank, as data.

``analyze`` finds it by running the step's own text on shapes. Bytes are whole numbers, counted as the ledger counts
them; a FLOP is one multiplication or one addition, so that a product of [m k] by [k n] has 2 m n k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any


class HashedOnce(tuple):
    """A tuple whose hash is computed once: for long ones that are often keys, such as the ranks of a group."""

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash


FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS, RECOMPUTED = (
    "forward",
    "backward (input)",
    "backward (weights)",
    "forward again",
)
LOSS, NORM, UPDATE, OTHER = "loss", "gradient norm", "update", "other"

#: What memory holds, in the order in which pictures stack it.
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
    """So many matrix products alike, [m k] by [k n] each: ``batch`` of them in a call, ``calls`` calls."""

    m: int
    n: int
    k: int
    batch: int = 1
    itemsize: int = 4
    calls: int = 1
    #: of a kernel that uses up what comes out where it is made, the share of the device's speed that it reaches; 0: the
    #: product is for itself, and what comes out goes to memory
    fused: float = 0.0
    kernel: str = ""  #: that makes it, of the host's KERNELS; "": BLAS, or a device's library

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.batch * self.calls


class Products(HashedOnce):
    """The products of a computation: many computations share them."""

    @cached_property
    def flops(self) -> int:
        return sum(product.flops for product in self)


@dataclass(frozen=True)
class Computation:
    """What a rank computes without a pause: of one layer, one phase and one micro-batch, between two communications.

    A layer that communicates half-way is two computations of the same name.
    """

    name: str  #: "block0/mlp forward"
    layer: str  #: "" for what is no layer's: the loss, the gradient's norm, the update
    phase: str
    micro_batch: int | None = None
    chunk: int | None = None  #: of a pipeline
    products: Products = Products()
    elements: int = 0  #: of elementwise work: results' elements, each counted for each operation
    calls: int = 0  #: of array operations, products among them
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def flops(self) -> int:
        """Of matrix products alone."""
        return self.products.flops


@dataclass(frozen=True)
class Communication:
    """Something that a rank sends, or waits for, while it computes.

    ``begins`` and ``ends`` are numbers of computations (of the list that comes along): it begins before the one, and
    is waited for before the other; both may be one more than the last.
    """

    operation: str  #: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, barrier, send or receive
    axes: str  #: mesh axes of the group, as the ledger writes them: "data,context"
    label: str
    ranks: int  #: in the group
    place: int  #: of this rank in the group
    payload: int  #: bytes of the array handed in
    sent: float  #: bytes that this rank sends, as the ledger counts them; the mean of its class, where parts differ
    begins: int
    ends: int
    peer: int | None = None  #: of send and receive: the other one's place in the group
    channel: int | None = None  #: of send and receive: which message, where several are under way
    received: int = 0  #: bytes of the result
    classes: tuple[int, ...] = ()  #: numbers of the classes whose ranks are in the group

    @property
    def priority(self) -> int:
        """How many computations may hide it: the fewer the more urgent; 0 where nothing does."""
        return self.ends - self.begins

    def moved(self, by: int) -> Communication:
        """The same, by so many computations later."""
        return replace(self, begins=self.begins + by, ends=self.ends + by)

    @property
    def where(self) -> tuple[str, str, str]:
        """Its line in the ledger."""
        return self.operation, self.axes, self.label


@dataclass(frozen=True)
class Moment:
    """Memory while a computation runs: the most that was held at once, by kind."""

    computation: int
    bytes_by_kind: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True)
class Peak:
    """The moment at which a rank holds most, and the largest of what it then holds, with the bytes of each."""

    bytes: int
    computation: int
    bytes_by_kind: Mapping[str, int]
    holds: Sequence[tuple[str, str, int]] = ()  #: kind, what, bytes: the largest first


@dataclass(frozen=True)
class ModelShard:
    """What a rank has of one parameter."""

    name: str
    sharding: str  #: "d f/model"
    shape: tuple[int, ...]  #: of this rank's block while layers use it
    whole_shape: tuple[int, ...]
    dtype: str
    bytes: int  #: of the block
    stored_bytes: int  #: of the part that stays here between uses
    owned_bytes: int  #: of the part that this rank updates
    group: str  #: the parameter group that it is stored and communicated with
    layers: tuple[str, ...]  #: that use it here
    requires: Mapping[str, int]  #: bytes: gradient, optimizer_state, gathered
    depends_on: tuple[str, ...]  #: mesh axes whose ranks must be there: to gather it, or to sum its gradient


#: The axes of a group, and the places of some of these that are left.
GroupKey = tuple[tuple[str, ...], tuple[tuple[str, tuple[int, ...]], ...]]


@dataclass(frozen=True)
class RankStep:
    """One step of one rank: what it computes, in order, what it sends meanwhile, and what it holds."""

    coordinates: Mapping[str, int]
    computations: Sequence[Computation]
    communications: Sequence[Communication]
    timeline: Sequence[Moment]
    peak: Peak
    shards: Sequence[ModelShard] = ()
    before: Mapping[str, int] = field(default_factory=dict)  #: bytes by kind between steps
    saved: Mapping[str, int] = field(default_factory=dict)  #: bytes that a layer's forward leaves, output included
    temporaries: Mapping[str, int] = field(default_factory=dict)  #: bytes at their peak, by a computation's name
    groups: Sequence[GroupKey] = ()  #: that the rank communicates in
    constants: int = 0  #: bytes of what convolutions' loops find once and keep: where they read and write

    @cached_property
    def flops(self) -> int:
        return sum(computation.flops for computation in self.computations)

    @property
    def bytes_sent(self) -> float:
        return sum(communication.sent for communication in self.communications)

    def ledger(self) -> dict[tuple[str, str, str], tuple[int, int, float]]:
        """Calls, payload and bytes sent by operation, axes and label: what the step adds to this rank's ledger."""
        lines: dict[tuple[str, str, str], list[float]] = {}
        for each in self.communications:
            line = lines.setdefault(each.where, [0, 0, 0])
            for place, more in enumerate((1, each.payload, each.sent)):
                line[place] += more
        return {where: (calls, payload, sent) for where, (calls, payload, sent) in lines.items()}


@dataclass(frozen=True)
class RankClass:
    """Ranks whose steps are the same but for where they are: the step of one, and who they all are."""

    step: RankStep
    ranks: Sequence[int]  #: numbers, row-major on the mesh's axes

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
    parameters: int  #: of the whole model
    composition: Mapping[str, Any] = field(default_factory=dict)  #: as JSON
    approximate: Sequence[str] = ()  #: what only data decide, and what was assumed of it
    tables: Sequence[int] = ()  #: bytes of each rank in which groups meet: see ``tables_of``; (): none

    @property
    def ranks(self) -> int:
        return prod(self.axes.values())

    @property
    def bytes_sent(self) -> int:
        """Of the step, by all ranks, as ``metrics.jsonl`` counts them."""
        return round(sum(each.count * each.step.bytes_sent for each in self.classes))

    @property
    def calls(self) -> int:
        """Collectives and messages of the step that ranks take part in, each counted by every one."""
        return sum(each.count * len(each.step.communications) for each in self.classes)

    @property
    def flops(self) -> int:
        return sum(each.count * each.step.flops for each in self.classes)

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(self.peak_bytes_by_rank())

    def of_rank(self, rank: int) -> RankStep:
        """The step of one rank; that of another of its class is the same but for its coordinates."""
        return next(each.step for each in self.classes if rank in each.ranks)

    def peak_bytes_by_rank(self) -> list[int]:
        peaks = [0] * self.ranks
        for each in self.classes:
            for rank in each.ranks:
                peaks[rank] = each.step.peak.bytes + each.step.constants + self.tables_of_rank(rank)
        return peaks

    def tables_of_rank(self, rank: int) -> int:
        """Bytes in which this rank's groups meet, all through a step."""
        return self.tables[rank] if self.tables else 0

    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Calls and bytes sent, of all ranks, by operation and axes."""
        calls: Counter = Counter()
        sent: Counter = Counter()
        for each in self.classes:
            for (operation, axes, _), line in each.step.ledger().items():
                calls[operation, axes] += each.count * line[0]
                sent[operation, axes] += each.count * line[2]
        return {key: (calls[key], round(sent[key])) for key in calls}

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        plain = asdict(self)
        for each, kind in zip(plain["classes"], self.classes, strict=True):
            each["ranks"] = list(kind.ranks)
        totals = [
            {"operation": operation, "axes": axes, "calls": calls, "bytes": sent}
            for (operation, axes), (calls, sent) in self.totals().items()
        ]
        return plain | {"bytes_sent": self.bytes_sent, "peak_bytes": self.peak_bytes_by_rank(), "totals": totals}

    def __iter__(self) -> Iterator[RankClass]:
        return iter(self.classes)
