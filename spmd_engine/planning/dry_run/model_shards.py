"""The shards of a model: what each rank computes, holds and sends in a step for each of its chunks of layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spmd_engine.axes import PIPE, position_of, uneven_axes
from spmd_engine.planning.dry_run.step_analysis import Communication, ParameterShard, RankStep, StepAnalysis


@dataclass(frozen=True)
class CommunicationPoint:
    """What a shard sends in a step, by operation, axes and label."""

    operation: str
    axes: str
    label: str
    shards: tuple[str, ...]  #: the others that take part
    calls: int
    bytes: float
    priority: int  #: the fewest computations that hide a call; fewer are more urgent


@dataclass(frozen=True)
class ModelShard:
    """A rank's part of one chunk of layers; without a pipeline, of all layers."""

    id: str  #: the rank and, in a pipeline, the chunk: "3", "3:1"
    kind: str  #: what is sharded: layers, tensors, state; or replica
    rank: int
    node: str
    layers: tuple[str, ...]  #: empty for an engine that is no list of layers
    parameters: tuple[ParameterShard, ...]
    bytes: int  #: size of parameters, gradients and optimizer state, between steps
    flops: int  #: those of matrix products, in a step
    activations: int  #: bytes that the forward of a micro-batch keeps
    communication: tuple[CommunicationPoint, ...]
    depends_on: tuple[str, ...]  #: the shards whose outputs are its inputs


def model_shards(analysis: StepAnalysis, nodes: Sequence[str] | None = None) -> list[ModelShard]:
    """The shards of all ranks, by rank and chunk, of any composition or engine that was analyzed.

    ``nodes`` names the node of each rank; None: one node.
    """
    return list(_ShardTable(analysis, nodes or ["here"] * analysis.ranks).shards())


class _ShardTable:
    def __init__(self, analysis: StepAnalysis, nodes: Sequence[str]) -> None:
        self._axes, self._nodes, self._pipe = analysis.axes, nodes, analysis.axes.get(PIPE, 1) > 1
        self._positions = [position_of(rank, analysis.axes).coordinates for rank in range(analysis.ranks)]
        self._steps = [analysis.of_rank(rank) for rank in range(analysis.ranks)]
        self._chunks = [_layers_by_chunk(step) for step in self._steps]

    def shards(self) -> Iterator[ModelShard]:
        for rank, step in enumerate(self._steps):
            calls = _calls_by_chunk(step)
            for chunk, layers in self._chunks[rank].items():
                mine = set(layers)  # a stage may hold layers that it does not compute
                parameters = tuple(part for part in step.shards if not (mine and part.layers) or mine & {*part.layers})
                states = (part.requires["gradient"] + part.requires["optimizer_state"] for part in parameters)
                others = self._members(rank, (PIPE, *uneven_axes(self._axes)))
                before = [other for other in others if chunk - 1 in self._chunks[other]]
                yield ModelShard(
                    self._id(rank, chunk),
                    self._kind(parameters),
                    rank,
                    self._nodes[rank],
                    layers,
                    parameters,
                    sum(part.stored_bytes for part in parameters) + sum(states),
                    sum(computation.flops for computation in step.computations if (computation.chunk or 0) == chunk),
                    sum(step.saved.get(layer, 0) for layer in layers),
                    tuple(self._points(rank, chunk, calls[chunk])),
                    tuple(self._id(other, chunk - 1) for other in before),
                )

    def _id(self, rank: int, chunk: int) -> str:
        return f"{rank}:{chunk}" if self._pipe else str(rank)

    def _kind(self, parameters: Sequence[ParameterShard]) -> str:
        kinds = {
            "layers": self._pipe,
            "tensors": any(parameter.shape != parameter.whole_shape for parameter in parameters),
            "state": any(parameter.owned_bytes < parameter.bytes for parameter in parameters),
        }
        return ", ".join(kind for kind, is_sharded in kinds.items() if is_sharded) or "replica"

    def _members(self, rank: int, axes: Sequence[str]) -> list[int]:
        """The other ranks that differ from this one in their coordinates on these axes only."""
        mine, fixed = self._positions[rank], [axis for axis in self._axes if axis not in axes]
        others = enumerate(self._positions)
        return [other for other, place in others if other != rank and all(place[axis] == mine[axis] for axis in fixed)]

    def _points(self, rank: int, chunk: int, calls: Sequence[Communication]) -> Iterator[CommunicationPoint]:
        by_kind: dict[tuple[tuple[str, str, str], int | None], list[Communication]] = defaultdict(list)
        for call in calls:
            by_kind[call.where, call.peer].append(call)
        for ((operation, axes, label), peer), alike in by_kind.items():
            members = self._members(rank, axes.split(","))
            if peer is not None:
                members = [sorted([*members, rank])[peer]]
            ids = [self._id(other, self._nearest(other, chunk, label)) for other in members]
            sent, priority = sum(call.sent for call in alike), min(call.priority for call in alike)
            yield CommunicationPoint(operation, axes, label, tuple(ids), len(alike), sent, priority)

    def _nearest(self, rank: int, chunk: int, label: str) -> int:
        """The chunk of another rank that a call of this chunk is for: gradients go to the chunk before."""
        wanted = chunk - 0.1 if label == "gradient" else chunk + 0.1
        return min(self._chunks[rank], key=lambda other: abs(other - wanted))


def _layers_by_chunk(step: RankStep) -> dict[int, tuple[str, ...]]:
    """The layers of each chunk, in the order of the forward."""
    layers: dict[int, dict[str, None]] = defaultdict(dict)
    for computation in step.computations:
        if computation.layer:
            layers[computation.chunk or 0][computation.layer] = None
    return {chunk: tuple(layers[chunk]) for chunk in sorted(layers)} or {0: ()}


def _calls_by_chunk(step: RankStep) -> dict[int, list[Communication]]:
    """The calls that send something, by the chunk that waits for them, or that has computed what they send."""
    calls: dict[int, list[Communication]] = defaultdict(list)
    chunks = [0]  # the chunk of each computation, or of the last one before that has layers
    for computation in step.computations:
        chunks.append((computation.chunk or 0) if computation.layer else chunks[-1])
    for call in step.communications:
        if call.sent:
            at = min(call.ends + 1, len(chunks) - 1) if call.operation == "all_gather" else call.begins
            calls[chunks[at]].append(call)
    return calls
