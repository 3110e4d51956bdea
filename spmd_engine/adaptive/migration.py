"""Live migration: a job changes its shape while its steps go on.

After Clark et al., "Live Migration of Virtual Machines" (2005), but what changed since the snapshot is not sent again:
every weight changes in every step, so that such rounds would never end. Instead the destination makes the updates
itself, from the gradients of each step. The elements that change ranks are copied in portions, a few after each step:

1. After a step, each rank packs the gradients of the portions that were copied before, and the next portion: parameters
   and optimizer state after the update of this step.
2. All ranks agree that none has failed, and exchange what they packed.
3. The destinations make the update of this step on their copies, and add the new portion to them.

When all is copied, each rank has all elements of its place in the new shape, and the shape changes without a transfer.
A failure of any rank before that leaves the old shape as it was: the copies are dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil, prod
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic, perf_counter
from typing import Any

from spmd_engine.arrays.backend import Array
from spmd_engine.arrays.meta.backend import on_shapes
from spmd_engine.arrays.meta.meter import Meter, metered
from spmd_engine.axes import count_ranks, rank_grid
from spmd_engine.comm import Group
from spmd_engine.comm.agreement.rank_zero import failure_text, gather_json, on_all_ranks, text_from_rank_zero
from spmd_engine.comm.shared_memory.arena import memory_here
from spmd_engine.engine import LayeredEngine
from spmd_engine.engine.reshape import Reshaper, Shape
from spmd_engine.engine.state.engine_state import Copies
from spmd_engine.engine.zero.parameter_store import Placements, parts_of, placements_of
from spmd_engine.errors import UsageError
from spmd_engine.planning.dry_run.recorder import Recorder
from spmd_engine.planning.dry_run.shaped_mesh import DryRunRanks, Mailbox, ShapedMesh
from spmd_engine.sharding.placement import ArrayPlacement, Held, Placement, Rectangles, exchange_placements
from spmd_engine.sharding.routes import Blocks
from spmd_engine.sharding.transfer import PartOfTransfer, TransferPlan, plan_transfer
from spmd_engine.units import readable_bytes

MOST_STEPS = 200  #: in which all is copied, however little time a step has for it
LEAST = 64 << 10  #: bytes of a rank after a step, if as much is left
SHARE = 0.03  #: share of a step's time that is spent on the copy
LABELS = "migration: copy", "migration: gradients"  # in the ledger
TRIAL = "migration: trial"  # likewise
TRIALS = 3  # portions that are exchanged to learn the speed; the size of each follows from the speed of the one before
BYTES_PER_SECOND = 1e8  # that a rank copies: the first guess, until it is measured


@dataclass(frozen=True)
class MigrationPlan:
    """What moves from where to where, and what it costs: the same on all ranks."""

    before: str  #: the present shape
    after: str  #: the new shape
    moves: Mapping[tuple[int, int], int]  #: bytes of the snapshot by sending and receiving rank
    order: Sequence[str]  #: the arrays of which elements move, in the order of their copy
    nbytes: int  #: size of the snapshot: parameters, optimizer state and buffers
    forwarded: int  #: bytes of gradients after a step, once all is copied
    seconds: float  #: predicted, with the steps in between
    rollback: str = "drop the copies: the old shape is in use until all ranks agree on the new one"

    @property
    def what(self) -> list[str]:
        """The layers and experts of which elements move."""
        return list(dict.fromkeys(name.rpartition("/")[0] or name for name in self.order))

    def as_json(self) -> dict[str, Any]:
        """As a line of ``events.jsonl`` has it."""
        return {
            "what": self.what,
            "from": self.before,
            "to": self.after,
            "moves": moves_as_json(self.moves),
            "bytes": self.nbytes,
            "bytes_of_gradients": self.forwarded,
            "seconds": round(self.seconds, 3),
            "order": list(self.order),
            "rollback": self.rollback,
        }


@dataclass(frozen=True)
class _Flow:
    """Arrays of one kind that move: parameters with their state, or buffers."""

    plan: TransferPlan
    sets: int  #: arrays that are copied of each
    targets: Sequence[Blocks]  #: on this rank: copies of each set

    @property
    def busiest(self) -> int:
        """Bytes that the busiest rank sends or receives of one set."""
        ranks = range(self.plan.source.ranks)
        return max((max(self.plan.bytes_sent(rank), self.plan.bytes_received(rank)) for rank in ranks), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes that all ranks receive of one set."""
        return sum(map(self.plan.bytes_received, range(self.plan.source.ranks)))


class LiveMigration:
    """The copy of what changes ranks between the present shape and another one, in portions after steps.

    The constructor and ``advance`` are collective over the world, with the idle ranks. If a rank fails, or refuses,
    both raise one UsageError on all ranks, and the old shape goes on. ``step_seconds`` is the time of a step on rank 0;
    ``within`` the seconds after which the migration is given up.
    """

    def __init__(self, reshaper: Reshaper, shape: Shape, step_seconds: float, within: float | None = None) -> None:
        self._reshaper, self.shape, self._within = reshaper, shape, within
        reshaper.check_live(shape)
        assert reshaper.optimizer is not None
        self._engine, self._optimizer, self._group = reshaper.engine, reshaper.optimizer, reshaper.all_ranks
        self._began, self._failure = monotonic(), ""
        self._copied, self._seconds, self._nbytes, self.rate = 0, 0.0, 0.0, BYTES_PER_SECOND
        self.steps = 0  #: with a part of the copy so far
        if reshaper.placed is not None:
            self._optimizer.prepare(reshaper.placed)
        described = self._attempt("describing the new shape", lambda: describe_change(reshaper, shape))
        ranks = self._agree({"step": step_seconds})
        old, new = exchange_change(self._group, described)
        self._attempt("planning", lambda: self._make_flows(old, new))
        self._check_memory(self._agree({"needed": self._attempt("counting", self._bytes_needed)}))
        self._attempt("allocating", self._allocate)
        self._agree({})
        rates = []
        for _ in range(TRIALS):  # these elements are copied again later
            self._next = self._portion(ranks[0]["step"])
            self._exchange((TRIAL, TRIAL), {"update": None})
            self._learn_speed(self._agree({"copy": self._seconds}))
            rates.append(self.rate)
        self.rate = max(rates)  # another program may have delayed some of them
        self._next = self._portion(ranks[0]["step"])
        self.plan = self._planned(ranks[0]["step"])

    # --- failures of one rank, which all ranks learn

    def _attempt(self, what: str, do: Callable[[], Any]) -> Any:
        """The result of ``do()``, which calls no collective; a failure is kept until the ranks agree."""
        if not self._failure:
            try:
                return do()
            except Exception as error:
                self._failure = f"{what}: {failure_text(error)}"
        return None

    def _agree(self, mine: Mapping[str, Any], ends: str = "") -> list[dict[str, Any]]:
        """What all ranks say. Raises UsageError on all of them if the migration ``ends``, as rank 0 says, or if a rank
        has failed. Collective."""
        ranks = gather_json(self._group, {**mine, "ends": ends, "failure": self._failure}, "migration")
        if ranks[0]["ends"]:
            raise UsageError(f"the live migration is given up: {ranks[0]['ends']}")
        for rank, facts in enumerate(ranks):
            if facts["failure"]:
                raise UsageError(f"rank {rank} of {len(ranks)}: {facts['failure']}")
        return ranks

    # --- the plan

    def _make_flows(self, old: Placements, new: Placements) -> None:
        """Plan the transfers of what ranks will store, or update, and do not now."""
        self._decays = {name: parameter.decay for name, (parameter, _) in self._engine.model.parameters()}
        buffers = dict(self._engine.model.buffers())
        lacking: dict[str, dict[str, list[Rectangles]]] = {"parameters": {}, "frozen": {}, "changing": {}, "stored": {}}
        for name, wanted in new[False].items():
            stored = [_difference(*pair) for pair in zip(wanted.held, old[False][name].held, strict=True)]
            if name in buffers:
                lacking["frozen" if buffers[name][0].frozen else "changing"][name] = stored
            else:  # with ZeRO, a rank may update elements in future that it only stores now
                updated = zip(new[True][name].held, old[True][name].held, stored, strict=True)
                more = [_difference(_difference(after, before), has) for after, before, has in updated]
                lacking["parameters"][name] = [(*one, *other) for one, other in zip(stored, more, strict=True)]
            lacking["stored"][name] = stored
        placed = {
            kind: Placement({
                name: ArrayPlacement.of_rectangles(new[False][name].shape, new[False][name].dtype, held)
                for name, held in names.items()
                if any(held)
            })
            for kind, names in lacking.items()
        }  # fmt: skip
        nodes = list(self._group.comm.hosts)
        sets = {"parameters": 1 + len(self._optimizer.kinds), "frozen": 1, "changing": 1}
        self._flows: dict[str, _Flow] = {}
        for kind, number in sets.items():
            source = Placement({name: old[kind == "parameters"][name] for name in placed[kind]})
            self._flows[kind] = _Flow(plan_transfer(source, placed[kind], nodes=nodes), number, [])
        self._placements = {True: placed["parameters"], False: placed["stored"]}
        busiest = sum(flow.busiest * flow.sets for flow in self._flows.values())
        self._portions = max(1, min(MOST_STEPS, ceil(busiest / LEAST)))

    def _bytes_needed(self) -> int:
        """Bytes of this rank's copies, with the gradients of those of parameters."""
        rank = self._group.rank
        return sum(
            flow.plan.target.nbytes(rank) * (flow.sets + (kind == "parameters")) for kind, flow in self._flows.items()
        )

    def _check_memory(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Refuse copies for which a node has no memory."""
        hosts, node = self._group.comm.hosts, self._group.comm.node
        needed = sum(facts["needed"] for facts, host in zip(ranks, hosts, strict=True) if host == node)
        if needed > memory_here():
            self._failure = f"the copies on node {node} need {readable_bytes(needed)}; stop-and-copy needs none"

    def _allocate(self) -> None:
        """Make this rank's copies, and memory for gradients of those of parameters."""
        rank, zeros = self._group.rank, self._engine.backend.xp.zeros

        def new(placement: Placement) -> Blocks:
            return {name: [zeros(part.shape, one.dtype) for part in one.held[rank]] for name, one in placement.items()}

        for kind, flow in self._flows.items():
            targets = [new(flow.plan.target) for _ in range(flow.sets)]
            self._flows[kind] = _Flow(flow.plan, flow.sets, targets)
        self._gradients = new(self._flows["parameters"].plan.target)

    def _planned(self, step_seconds: float) -> MigrationPlan:
        """The plan, with the seconds that it takes at the measured speed."""
        moves = moves_of([(flow.plan, flow.sets) for flow in self._flows.values()])
        copied, seconds = 0, 0.0
        while copied < self._portions:
            fresh = self._portion(step_seconds, copied)
            seconds += step_seconds + self._busiest_bytes(fresh, copied) / self.rate
            copied += fresh
        return MigrationPlan(
            str(self._reshaper.shape),
            str(self.shape),
            moves,
            [name for flow in self._flows.values() for name in flow.plan.target],
            sum(moves.values()),
            self._flows["parameters"].nbytes,
            seconds,
        )

    def _portion(self, step_seconds: float, copied: int | None = None) -> int:
        """The number of portions for which a step has time, beside the gradients of those that are ``copied``."""
        copied = self._copied if copied is None else copied
        fresh, forwarded = self._busiest_bytes(1, 0), self._busiest_bytes(0, copied)
        fitting = int((SHARE * step_seconds * self.rate - forwarded) / fresh) if fresh else self._portions
        return min(max(1, fitting), self._portions - copied)

    def _busiest_bytes(self, fresh: int, copied: int) -> float:
        """Bytes of the busiest rank after a step: of fresh portions, and of the gradients of copied ones."""
        parameters, frozen = self._flows["parameters"], self._flows["frozen"]
        nbytes = fresh * (parameters.busiest * parameters.sets + frozen.busiest) + copied * parameters.busiest
        return nbytes / self._portions

    # --- the copy

    @property
    def is_last(self) -> bool:
        """Whether the next portion is the last one."""
        return self._copied + self._next == self._portions

    def advance(self, step: int, step_seconds: float, ends: str = "") -> bool:
        """Call this after each step, with its number. Returns whether all is copied.

        ``ends``: why the migration must end now, if it must. Raises UsageError on all ranks if it has failed.
        """
        if self._within is not None and monotonic() - self._began > self._within:
            ends = ends or f"it is not complete after {self._within:g} s"
        made, is_last = self._optimizer.last, self.is_last
        mine = {"update": made if made.get("step") == step else None, "step": step_seconds}
        ranks = self._exchange(LABELS, mine, ends)
        if is_last:
            self._agree({})
        self._copied, self.steps = self._copied + self._next, self.steps + 1
        self._next = self._portion(ranks[0]["step"])
        return is_last

    def _exchange(self, labels: tuple[str, str], mine: Mapping[str, Any], ends: str = "") -> list[dict[str, Any]]:
        """Exchange the next portion, and the gradients of those that are copied, and time it. Returns what all ranks
        say, as ``_agree`` does."""
        began, copied, after = perf_counter(), self._copied, self._copied + self._next
        parts, packed = self._attempt("packing", lambda: self._pack(copied, after)) or ([], [])
        packing = perf_counter() - began
        ranks = self._agree({**mine, "copy": self._seconds}, ends)
        self._learn_speed(ranks)  # from the exchange before
        began = perf_counter()
        received = [
            part.exchange(self._group, pieces, labels[kind == "gradients"])
            for (kind, part), pieces in zip(parts, packed, strict=True)
        ]
        self._attempt("updating", lambda: self._take(parts, received, ranks[0]["update"]))
        self._seconds, self._nbytes = packing + perf_counter() - began, self._busiest_bytes(self._next, copied)
        return ranks

    def _learn_speed(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Take the speed of the last exchange, by what all ranks say that it took."""
        if self._nbytes and (slowest := max(facts["copy"] for facts in ranks)):
            self.rate = self._nbytes / slowest

    def _pack(self, copied: int, after: int) -> tuple[list[tuple[str, PartOfTransfer]], list]:
        """The parts to exchange after this step, each with its kind; and what this rank sends of each."""
        rank, of = self._group.rank, self._portions
        plans = {kind: flow.plan for kind, flow in self._flows.items()}
        parts = [("gradients", plans["parameters"].part(rank, 0, copied, of))] if copied else []
        parts += [(kind, plans[kind].part(rank, copied, after, of)) for kind in ("parameters", "frozen")]
        if after == of:
            parts.append(("changing", plans["changing"].part(rank, 0, 1, 1)))
        return parts, [part.pack(self._sources(kind), self._engine.backend) for kind, part in parts]

    def _sources(self, kind: str) -> list[Blocks]:
        """This rank's arrays of a kind: what it updates, or buffers."""
        engine, rank = self._engine, self._group.rank
        if self._reshaper.placed is None:
            return [{}] * (1 if kind == "gradients" else self._flows[kind].sets)
        if kind == "gradients":
            sets = [engine.named(engine.gradients)]
        elif kind == "parameters":
            state = self._optimizer.state
            sets = [engine.named(arrays) for arrays in (engine.owned, *(state[name] for name in self._optimizer.kinds))]
        else:
            sets = [engine.buffers]
        source = self._flows["parameters" if kind == "gradients" else kind].plan.source
        return [{name: [arrays[name]] if one.held[rank] else [] for name, one in source.items()} for arrays in sets]

    def _take(
        self, parts: Sequence[tuple[str, PartOfTransfer]], received: Sequence[Sequence[Array]], update: Any
    ) -> None:
        """Make the update of the step on the copies, unless it was skipped, and then add the new portions to them."""
        for (kind, part), arrays in zip(parts, received, strict=True):
            if kind != "gradients":
                part.unpack(arrays, self._flows[kind].targets)
            elif update:
                part.unpack(arrays, [self._gradients])
                copies = self._flows[kind := "parameters"].targets
                for name, gradients in self._gradients.items():
                    for number, gradient in enumerate(gradients):
                        parameter, *state = (arrays[name][number] for arrays in copies)
                        self._optimizer.repeat(update, parameter, gradient, *state, decays=self._decays[name])

    def copies(self) -> Copies:
        """What this rank has of its arrays in the new shape, once all is copied."""
        (parameters, *states), model = self._flows["parameters"].targets, {}
        for name, one in self._placements[False].items():
            if name in parameters:
                model[name] = parameters[name][: len(one.held[self._group.rank])]
        for kind in ("frozen", "changing"):
            model |= self._flows[kind].targets[0]
        return Copies(self._placements, {None: model, **dict(zip(self._optimizer.kinds, states, strict=True))})


def describe_change(reshaper: Reshaper, shape: Shape) -> dict[str, Held]:
    """The parts of all arrays that this rank has, "old", and those that it will have in another shape, "new": by its
    storage, without memory."""
    old, new = parts_of(reshaper.placed, "old "), parts_of(None, "new ")
    if (position := reshaper.position_in(shape)) is not None:
        axes, model = shape.axes, reshaper.model_in(shape.composition)
        ranks = DryRunRanks(axes, rank_grid(axes), Mailbox(), ["here"] * count_ranks(axes))
        recorder = Recorder(Meter())
        with on_shapes() as backend, metered(recorder.meter):
            mesh = ShapedMesh(ranks, position.coordinates, recorder)
            how, layout = shape.composition.changed(assign=None).how_on(axes), reshaper.layout_in(shape, model, mesh)
            options = {"dtype": reshaper.engine.dtype, "backend": backend, "drawn": False, **how}
            new = parts_of(LayeredEngine(model, mesh, layout, **options), "new ")
    return old | new


def exchange_change(group: Group, described: Mapping[str, Held]) -> tuple[Placements, Placements]:
    """The old and the new placements, from what ``describe_change`` returns on each rank. Collective."""
    exchanged = exchange_placements(group, described)
    return placements_of(exchanged, "old "), placements_of(exchanged, "new ")


def moves_of(plans: Sequence[tuple[TransferPlan, int]]) -> dict[tuple[int, int], int]:
    """Bytes by sending and receiving rank, of transfers that each move so many sets of arrays."""
    moves: dict[tuple[int, int], int] = {}
    for plan, sets in plans:
        for dtype, routes in plan.routes.items():
            for route in routes:
                for receiver in route.receivers:
                    if receiver != route.sender:
                        key = route.sender, receiver
                        moves[key] = moves.get(key, 0) + route.size * dtype.itemsize * sets
    return moves


def moves_as_json(moves: Mapping[tuple[int, int], int]) -> dict[str, int]:
    """``moves_of`` with keys such as "0->1"."""
    return {f"{sender}->{receiver}": nbytes for (sender, receiver), nbytes in sorted(moves.items())}


def _difference(wanted: Rectangles, held: Rectangles) -> Rectangles:
    """The elements of ``wanted`` that are not ``held``, as disjoint rectangles."""
    rest = list(wanted)
    for part in held:
        rest = [piece for one in rest for piece in one - part]
    return tuple(piece for piece in rest if piece.size)


# --- What a change of shape would move, and how long it would take, by each protocol: see ``migrate --dry-run``

FILE = 1 << 23  #: bytes of the file by which the disk is timed


def estimate_change(reshaper: Reshaper, shape: Shape, step_seconds: float, folder: Path) -> dict[str, dict[str, Any]]:
    """By protocol: the ``bytes`` that ranks send, their ``moves`` by sender and receiver, ``seconds`` until the job has
    the new shape, and those of them in which it ``stops``; or why it is ``refused``. Collective over the world.

    Three times are measured: that of a trial of the exchange; that of the other work, such as to make the new mesh and
    arrays; and that of a small file in the ``folder``. No array of the job changes. Raises UsageError on all ranks if
    the model cannot be placed.
    """
    group, began = reshaper.all_ranks, perf_counter()
    described = on_all_ranks(group, lambda: describe_change(reshaper, shape))
    old, new = exchange_change(group, described)
    assert reshaper.optimizer is not None
    kinds, nodes = len(reshaper.optimizer.kinds), list(group.comm.hosts)
    plans = [(plan_transfer(old[owned], new[owned], nodes=nodes), kinds if owned else 1) for owned in (False, True)]
    reshaper.rehearse(shape)
    beside = perf_counter() - began  # rank 0 writes its own times
    try:
        live = LiveMigration(reshaper, shape, step_seconds)
    except UsageError as error:
        live, why = None, str(error)
    rate = live.rate if live else BYTES_PER_SECOND
    held = [sum(sets * plan.target.nbytes(rank) for plan, sets in plans) for rank in range(group.size)]
    sent = [sum(sets * plan.bytes_sent(rank) for plan, sets in plans) for rank in range(group.size)]
    filling = max(held) / rate  # each rank writes all of its new arrays
    moves = moves_of(plans)
    estimates = {"stop-and-copy": _estimate(moves, beside + max(filling, max(sent) / rate))}
    whole = [sum(prod(one.shape) * one.dtype.itemsize for one in plan.source.values()) for plan, _ in plans]
    saved = sum(sets * nbytes for (_, sets), nbytes in zip(plans, whole, strict=True))
    disk = text_from_rank_zero(group, lambda: str(_disk_speed(folder)))
    seconds = beside + (saved + max(held)) / float(disk)
    estimates["checkpoint-based"] = {**_estimate({}, seconds), "saved": saved, "loaded": sum(held)}
    if live is None:
        return {**estimates, "live": {"refused": why}}
    plan = live.plan
    return {**estimates, "live": _estimate(plan.moves, plan.seconds + beside + filling, beside + filling)}


def _estimate(moves: Mapping[tuple[int, int], int], seconds: float, stops: float | None = None) -> dict[str, Any]:
    times = {"seconds": round(seconds, 4), "stops": round(seconds if stops is None else stops, 4)}
    return {"bytes": sum(moves.values()), "moves": moves_as_json(moves), **times}


def _disk_speed(folder: Path) -> float:
    """Bytes a second that are hashed, written to the folder and synced."""
    content = os.urandom(FILE)
    began = perf_counter()
    sha256(content)
    with TemporaryFile(dir=folder) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FILE / (perf_counter() - began)
