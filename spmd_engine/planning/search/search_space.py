"""The search space of the planner: meshes, ZeRO stages, schedules, micro-batches and recomputation, as candidates.

Choices without effect, and those that ``ParallelConfig.check`` refuses, are left out. ZeRO-1 never needs more memory
than replicas, but both are candidates, since one collective is faster than two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd, prod
from typing import Any

from spmd_engine.axes import MeshPosition, axes_text, checked_axes, count_ranks
from spmd_engine.engine import ParallelConfig
from spmd_engine.engine.offload.config import Offload
from spmd_engine.engine.state.assignment import BATCH, PIPE, misfit
from spmd_engine.errors import SpmdError, UsageError
from spmd_engine.models import Model, layout_for
from spmd_engine.models.layouts import with_queries_apart
from spmd_engine.planning.dry_run.step_analysis import HashedOnce
from spmd_engine.sharding.layout import TENSOR

LONG_CONTEXT = 8192  #: context length from which the sequence may be sharded, unless axes are named
HYBRID = ("replicate", "shard")  #: axes of hybrid sharding, instead of data
REPLICAS = ("replicate",)  #: axes along which ranks store the same shard of ZeRO
SUMMED = (*BATCH, "context")  #: axes over which gradients are summed
STORED = tuple(axis for axis in SUMMED if axis not in REPLICAS)  #: those of them over which ZeRO shards
Axes = tuple[tuple[str, int], ...]  #: a mesh's axes with their sizes, in order


def can_offload(kinds: str | None, zero: int, *, of_devices: bool = False) -> bool:
    """Whether the engine offloads these: from devices only optimizer state, under ZeRO 1 and 2 no parameters, since
    they are whole on every rank."""
    try:
        Offload.parse(kinds).check(on_device=of_devices)
    except UsageError:
        return False
    return zero not in (1, 2) or "parameters" not in (kinds or "")


@dataclass(frozen=True)
class Candidate:
    """A mesh with options that distributes a step over ranks."""

    axes: Axes
    batch_size: int  #: samples per step
    micro_batches: int
    zero: int = 0
    sequence_parallel: bool = False
    context_method: str | None = None
    schedule: str | None = None
    chunks: int = 1
    recompute: str = "none"
    stages: tuple[int, ...] | None = None  #: the first layer of each chunk; None: chosen by the planner
    shares: str | None = None  #: shares of the work, by rank; None: even, or those of the base
    state_shares: str | None = None  #: shares of ZeRO's state, by rank; None: even, or those of the base
    order: tuple[int, ...] | None = None  #: the rank at each position of the mesh; None: as the machine has them
    offload: str | None = None  #: what is offloaded, as ``--offload``
    overlap: int = 0  #: layers on each side of a boundary that both stages hold
    assign: str | None = None  #: layers of helper ranks, as ``--assign``

    @property
    def mesh(self) -> dict[str, int]:
        return dict(self.axes)

    @cached_property
    def ranks(self) -> int:
        return count_ranks(self.mesh) + len(ParallelConfig(assign=self.assign).ranks_outside if self.assign else ())

    @cached_property
    def pipe(self) -> int:
        return next((size for axis, size in self.axes if axis == PIPE), 1)

    @cached_property
    def batch_ranks(self) -> int:
        """The number of ranks over which the samples of a micro-batch are sharded."""
        return prod(size for axis, size in self.axes if axis in BATCH)

    @cached_property
    def samples(self) -> int:
        """The most samples of a micro-batch on a rank."""
        return -(-(self.batch_size // self.micro_batches) // self.batch_ranks)

    @cached_property
    def places(self) -> Mapping[str, str]:
        """The places of what does not live in memory: see ``ZeroConfig``."""
        return Offload.parse(self.offload).by_kind

    @property
    def plain(self) -> Candidate:
        """The candidate with even shares of samples and state, and ranks as the machine lists them."""
        return replace(self, shares=None, state_shares=None, order=None)

    def composition(self, base: ParallelConfig = ParallelConfig()) -> ParallelConfig:  # noqa: B008 (immutable)
        """The candidate as a ParallelConfig; ``base`` has the options that are not searched."""
        pipeline = self.pipe > 1
        return base.changed(
            mesh=self.mesh,
            zero=self.zero or None,
            sequence_parallel=self.sequence_parallel,
            context_method=self.context_method,
            schedule=self.schedule if pipeline else None,
            chunks=self.chunks if pipeline and self.chunks > 1 else None,
            stages=",".join(map(str, self.stages)) if pipeline and self.stages else None,
            overlap_layers=base.overlap_layers if pipeline else None,
            recompute=self.recompute,
            shares=self.shares or base.shares,
            state_shares=self.state_shares or base.state_shares,
            rank_order=",".join(map(str, self.order)) if self.order else base.rank_order,
            offload=self.offload,
            assign=self.assign or base.assign,
        )

    def __str__(self) -> str:
        parts = [axes_text(self.mesh)]
        parts += [f"zero {self.zero}"] * bool(self.zero)
        parts += ["sequence parallel"] * self.sequence_parallel
        parts += [f"{self.schedule}" + (f" of {self.chunks} chunks" if self.chunks > 1 else "")] * (self.pipe > 1)
        parts += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        parts += [f"recompute {self.recompute}"] * (self.recompute != "none")
        parts += [f"offload {self.offload}"] * bool(self.offload)
        parts += [f"shares {self.shares}"] * bool(self.shares)
        parts += [f"state shares {self.state_shares}"] * bool(self.state_shares)
        parts += [f"rank order {','.join(map(str, self.order or ()))}"] * bool(self.order)
        parts += [f"assign {self.assign}"] * bool(self.assign)
        return "; ".join(parts)


def fields_of(base: ParallelConfig) -> dict[str, Any]:
    """The fields of a candidate that a composition decides, if they are not searched."""
    return {"offload": base.offload}


@dataclass(frozen=True)
class SearchSpace:
    """The choices of a search; a field that is not None is fixed."""

    model: Model
    ranks: Sequence[int]  #: numbers of ranks to consider
    batch_sizes: Sequence[int]
    node_ranks: int  #: ranks per node: axes with much communication stay inside a node if possible
    mesh: Mapping[str, int] | None = None
    micro_batches: int | None = None
    zero: int | None = None
    sequence_parallel: bool | None = None
    schedule: str | None = None
    chunks: int | None = None
    recompute: str | None = None
    stages: tuple[int, ...] | None = None
    axes: Sequence[str] | None = None  #: mesh axes to use; None: all that shard this model
    offload: Sequence[str | None] = (None,)  #: what may be offloaded
    nodes: Sequence[int] = ()  #: the ranks of each node, if the stages are to have uneven sizes
    base: ParallelConfig = ParallelConfig()  #: with given shares, order of ranks, overlap, and method of axis context


FIXABLE = ("mesh", "micro_batches", "zero", "sequence_parallel", "schedule", "chunks", "recompute", "stages")


def broken_choices(candidate: Candidate, fixed: Mapping[str, Any]) -> frozenset[str]:
    """The names of the fixed choices, of FIXABLE, that a candidate breaks."""
    free = ("schedule", "chunks", "stages") if candidate.pipe == 1 else ()
    wanted = {name: dict(choice) if name == "mesh" else choice for name, choice in fixed.items() if name not in free}
    return frozenset(name for name, choice in wanted.items() if getattr(candidate, name) != choice)


def candidates(space: SearchSpace) -> Iterator[Candidate]:
    """All candidates of the search space, each once."""
    shares = {**space.base.work_shares, **space.base.storage.shares}
    for axes in meshes(space):
        if misfit(shares, axes):
            continue
        for batch_size in space.batch_sizes:
            yield from _candidates_on(space, axes, batch_size)


def meshes(space: SearchSpace) -> Iterator[dict[str, int]]:
    """The meshes that the model can be sharded on."""
    if space.mesh is not None:
        yield dict(space.mesh)
        return
    if space.nodes:
        yield from _with_uneven_stages(space)
        return
    model = space.model
    limits = _limits(model, space.axes or ())
    names = [axis for axis in limits if space.axes is None or axis in space.axes]
    lengths = dict(zip(model.inputs.split()[1:], model.sample or (), strict=False))
    square = lengths.get("h") == lengths.get("w")
    for ranks in sorted(set(space.ranks)):
        for sizes in _factorings(ranks, [limits[axis] for axis in names]):
            axes = {axis: size for axis, size in zip(names, sizes, strict=True) if size > 1} or {"data": 1}
            if axes.get("columns", 1) > axes.get("rows", 1) and square and space.axes is None:
                continue  # exchanging rows and columns costs the same, except that rows are contiguous
            if space.axes is None or "queries" in space.axes:
                axes = with_queries_apart(model, axes)
            for ordered in _orders(axes, space.node_ranks):
                if _can_shard(model, ordered):
                    yield ordered
                    yield from _hybrid(space, ordered)


def _with_uneven_stages(space: SearchSpace) -> Iterator[dict[str, int]]:
    """Meshes whose stages are nodes, or equal parts of a node, as many of nodes of one size; the ranks of a stage are
    along ``model`` and, as many in each, ``data``."""
    most, sizes = _limits(space.model).get("model", 1), list(dict.fromkeys(space.nodes))
    for numbers in product(*map(_divisors, sizes)):
        parts = dict(zip(sizes, numbers, strict=True))
        stages = [size // parts[size] for size in space.nodes for _ in range(parts[size])]
        for data in _divisors(gcd(*stages)) if len(set(stages)) > 1 else ():
            along_model = tuple(stage // data for stage in stages)
            axes = {PIPE: len(stages), "data": data, "model": along_model}
            axes = checked_axes({axis: size for axis, size in axes.items() if size != 1})
            named = space.axes is None or set(axes) <= set(space.axes)
            fits = len(stages) <= len(space.model.layers) and max(along_model) <= most
            if named and fits and _can_shard(space.model, axes):
                yield axes


def _hybrid(space: SearchSpace, axes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The mesh with ``data`` split into replicas of shards that stay inside a node: ZeRO gathers inside the node, and
    between nodes only shards of gradients are summed. The largest group inside a node stores least."""
    if space.zero == 0 or "data" not in axes or not {*HYBRID} <= {*(space.axes or HYBRID)}:
        return
    order = list(axes)
    inner = prod(axes[axis] for axis in order[order.index("data") + 1 :])
    shard, rest = divmod(space.node_ranks, inner)
    if rest or not 1 < shard < axes["data"] or axes["data"] % shard:
        return
    hybrid_axes = {"replicate": axes["data"] // shard, "shard": shard}
    yield {name: n for axis in order for name, n in (hybrid_axes.items() if axis == "data" else [(axis, axes[axis])])}


def across_nodes(axes: Mapping[str, int], node_ranks: int) -> tuple[list[str], list[str]]:
    """Axes whose groups are inside a node, and axes whose groups cross nodes, where ranks fill nodes in order."""
    inside, across, stride = [], [], 1
    for axis, size in list(axes.items())[::-1]:
        stride *= size
        (inside if stride <= node_ranks and node_ranks % stride == 0 else across).insert(0, axis)
    return inside, across


def first_group(axes: Sequence[tuple[str, int]], over: Collection[str]) -> HashedOnce:
    """The ranks of the first group over some of the axes; the last axis varies fastest."""
    members, stride = [0], 1
    for axis, size in axes[::-1]:
        if axis in over:
            members = [stride * index + member for index in range(size) for member in members]
        stride *= size
    return HashedOnce(members)


def axes_that_shard(model: Model) -> list[str]:
    """Mesh axes that can shard a model, the outermost first, including those that are used only if they are named."""
    queries = ["queries"] * any("r" in layer.sizes for _, layer in model.layers)
    return [*_limits(model, ["context"]), *queries, *HYBRID]


def _limits(model: Model, named: Sequence[str] = ()) -> dict[str, int]:
    """Axes that can shard the model, the outermost first, with the most shards along each."""
    letters = set(model.inputs.split())
    sizes: dict[str, int] = {}
    for _, layer in model.layers:
        for letter, size in layer.sizes.items():
            sizes[letter] = max(sizes.get(letter, 0), size)
    limits = {PIPE: len(model.layers), "data": 1 << 30}
    if "e" in sizes:
        limits["expert"] = sizes["e"]
    if {"h", "w"} <= letters:
        limits |= {"rows": 8, "columns": 8}
    if "s" in letters and (model.context >= LONG_CONTEXT or "context" in named):
        limits["context"] = max(1, min(model.context // 64, 64))
    tensor = sizes.get("h", 0) * sizes.get("r", 1) if "h" in sizes and "s" in letters else sizes.get("f", 0)
    if tensor:
        limits["model"] = tensor
    return limits


def _factorings(number: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All lists of factors with the product ``number``, each at most its limit."""
    if not limits:
        if number == 1:
            yield ()
        return
    for factor in _divisors(number):
        if factor <= limits[0]:
            for rest in _factorings(number // factor, limits[1:]):
                yield factor, *rest


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _orders(axes: dict[str, int], node_ranks: int) -> Iterator[dict[str, int]]:
    """The orders of axes that differ in what stays inside a node: a pipeline outside of data, or inside."""
    yield axes
    inner = prod(size for axis, size in axes.items() if axis not in (PIPE, "data"))
    if {PIPE, "data"} <= set(axes) and inner < node_ranks < prod(axes.values()):
        rest = {axis: size for axis, size in axes.items() if axis not in (PIPE, "data")}
        yield {"data": axes["data"], PIPE: axes[PIPE], **rest}


def _can_shard(model: Model, axes: Mapping[str, int]) -> bool:
    try:
        layout_for(model, MeshPosition(axes, dict.fromkeys(axes, 0)))
    except SpmdError:
        return False
    return True


def _candidates_on(space: SearchSpace, axes: Mapping[str, int], batch_size: int) -> Iterator[Candidate]:
    """Candidates on one mesh."""
    model, pipe, base = space.model, axes.get(PIPE, 1), space.base
    overlap, order = base.storage.overlap, base.order
    assert isinstance(overlap, int), "a search has no ranges of overlapping layers"
    shards = prod(size for axis, size in axes.items() if axis in BATCH)
    stored = prod(size for axis, size in axes.items() if axis in SUMMED)
    micro = [space.micro_batches] if space.micro_batches else micro_batch_numbers(batch_size, shards, pipe)
    hybrid = space.mesh is None and "shard" in axes  # hybrid sharding differs from data only if ZeRO shards
    zeros = [space.zero] if space.zero is not None else range(int(hybrid), 4) if stored > 1 else [0]
    parallel = [False]
    if "s" in model.inputs.split() and any(axes.get(axis, 1) > 1 for axis in TENSOR):
        parallel = [space.sequence_parallel] if space.sequence_parallel is not None else [False, True]
    elif space.sequence_parallel:
        return
    attends = any(layer.attends for _, layer in model.layers)
    blocks = any("/" in name for name, _ in model.layers)
    recompute = [space.recompute] if space.recompute else ["none"] + ["attention"] * attends + ["block"] * blocks
    for m in micro:
        if batch_size // m < shards:
            continue
        schedules = [
            (schedule, chunks)
            for schedule, chunks in _schedules(space, pipe, m, len(model.layers))
            if (space.stages is None or len(space.stages) == pipe * chunks)  # they are the first layers of all chunks
            and (not overlap or chunks == 1)
        ]
        choices = product(schedules, zeros, parallel, recompute, space.offload)
        for (schedule, chunks), zero, sequence, recomputed, offload in choices:
            if not can_offload(offload, zero):
                continue
            yield Candidate(
                tuple(axes.items()),
                batch_size,
                m,
                zero,
                sequence,
                base.context_method if "context" in axes else None,
                schedule=schedule,
                chunks=chunks,
                recompute=recomputed,
                stages=space.stages,
                order=order,
                offload=offload,
                overlap=overlap if pipe > 1 else 0,
            )


def micro_batch_numbers(batch_size: int, shards: int, pipe: int) -> list[int]:
    """Numbers of micro-batches to consider: divisors of the batch that leave each rank a sample, or 1."""
    possible = [m for m in _divisors(batch_size) if batch_size // m >= shards]
    return [m for m in possible if m > 1 or pipe == 1 or batch_size == 1] or [1]


def _schedules(space: SearchSpace, pipe: int, m: int, layers: int) -> Iterator[tuple[str | None, int]]:
    if pipe == 1:
        yield None, 1
        return
    for name in [space.schedule] if space.schedule else ("1f1b", "interleaved", "zero-bubble", "gpipe"):
        if name == "interleaved":
            for chunks in [space.chunks] if space.chunks else (2, 3, 4):
                if m % pipe == 0 and pipe * chunks <= layers:
                    yield name, chunks
        elif pipe <= layers and space.chunks in (None, 1):
            yield name, 1
