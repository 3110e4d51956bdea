"""Compares the ranks' parts of a tensor with one device's tensor, which rank 0 has."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.comm.group import Group
from spmd_engine.engine.base import ShardedEngine
from spmd_engine.errors import UsageError
from spmd_engine.verification.diagnosis import ComparedBlock, diagnose, difference, first_and_largest
from spmd_engine.verification.report import Disagreement

Index = tuple[slice | np.ndarray, ...]  # of each dim, which places: a range; of one dim perhaps a list of them
#: Tensors whose largest element is smaller than this part of the largest of all tensors of the kind are compared
#: relative to that part: a gradient that is 0 but for the rounding of its terms has no scale of its own.
SMALLEST_SCALE = 1e-3
TOGETHER = 1 << 20  # bytes: small arrays up to here travel in one message


@dataclass(frozen=True)
class LocalPart:
    """What this rank has of a tensor."""

    found: Array
    index: Index  #: in the whole
    before: Array | None = None  #: what it had a step ago
    base: Array | None = None  #: to which the rest was added


@dataclass(frozen=True)
class ComparedTensor:
    """Something that both engines have computed."""

    kind: str
    whole: Callable[[], Array | None]  #: one device's; called on rank 0 alone
    #: of this rank, given the shape of the whole; None: it has none
    part: Callable[[tuple[int, ...]], LocalPart | None]
    name: str = ""
    layer: str = ""
    micro_batch: int | None = None


@dataclass(frozen=True)
class Measured:
    """How far a tensor is off."""

    tensor: ComparedTensor
    most: float  #: the largest difference on any rank
    scale: float  #: in relation to which that is large or small

    @property
    def distance(self) -> float:
        return self.most / self.scale

    def is_off(self, tolerance: float) -> bool:
        return self.most > tolerance * self.scale


def measure(world: Group, tensors: Sequence[ComparedTensor]) -> list[Measured]:
    """Differences of all ranks' blocks from one device's tensors. Collective; the same on every rank."""
    figures = np.zeros((2, len(tensors)))
    for number, (tensor, whole) in enumerate(zip(tensors, _wholes(world, tensors), strict=True)):
        part = _part(tensor, whole)
        figures[1, number] = np.abs(whole[np.isfinite(whole)]).max(initial=0.0)
        if part is not None:
            figures[0, number] = difference(_host(part.found), _block(whole, part.index)).max(initial=0.0)
    most, scales = world.all_reduce(figures, "max", label="verify").tolist()
    largest: dict[str, float] = {}
    for tensor, scale in zip(tensors, scales, strict=True):
        largest[tensor.kind] = max(scale, largest.get(tensor.kind, 0.0))
    scales = [max(scale, SMALLEST_SCALE * largest[t.kind]) or 1.0 for t, scale in zip(tensors, scales, strict=True)]
    return [Measured(*each) for each in zip(tensors, most, scales, strict=True)]


def examine(
    engine: ShardedEngine, measured: Measured, tolerance: float, *, step: int, micro_batches: int
) -> Disagreement:
    """Where a tensor is off, and why. Collective; rank 0 meanwhile holds all ranks' blocks of it."""
    world, tensor, mesh = engine.group(), measured.tensor, engine.mesh
    (whole,) = _wholes(world, [tensor])
    part, block = _part(tensor, whole), None
    if part is not None:
        block = ComparedBlock(
            mesh.rank,
            mesh.coordinates,
            tuple(np.arange(n)[places] for n, places in zip(whole.shape, part.index, strict=True)),
            _host(part.found),
            _block(whole, part.index),
            None if part.before is None else _host(part.before),
            None if part.base is None else _host(part.base),
        )
    limit = tolerance * measured.scale
    summed = micro_batches if tensor.micro_batch is None else 1
    disagreement = None
    if (blocks := to_first(world, block)) is not None:
        blocks = [each for each in blocks if each is not None]
        disagreement = Disagreement(
            step,
            tensor.kind,
            tensor.name,
            tensor.layer,
            tensor.micro_batch if micro_batches > 1 else None,
            measured.distance,
            tuple(each.rank for each in blocks if (each.difference > limit).any()),
            *first_and_largest(blocks, limit),
            diagnose(blocks, mesh.axes, limit, kind=tensor.kind, micro_batches=summed),
        )
    return from_first(world, disagreement)


def to_first(world: Group, thing: Any) -> list[Any] | None:
    """Every rank's ``thing``, in rank order, on the first rank; None elsewhere."""
    if world.rank:
        world.send(0, np.frombuffer(pickle.dumps(thing), np.uint8), label="verify")
        return None
    others = (world.receive(rank, label="verify") for rank in range(1, world.size))
    return [thing, *(pickle.loads(other.tobytes()) for other in others)]


def from_first(world: Group, thing: Any) -> Any:
    """The first rank's ``thing`` on every rank."""
    data = np.frombuffer(pickle.dumps(thing), np.uint8) if world.rank == 0 else None
    return pickle.loads(world.broadcast(data, label="verify").tobytes())


def _wholes(world: Group, tensors: Sequence[ComparedTensor]) -> Iterator[np.ndarray]:
    """One device's arrays, on every rank, one after the other; small ones travel together."""
    sent = 0
    while sent < len(tensors):
        together: list[np.ndarray] = []
        if world.rank == 0:
            size = 0
            while sent + len(together) < len(tensors) and size < TOGETHER:
                together.append(_host(tensors[sent + len(together)].whole()))
                size += together[-1].nbytes
        arrays = from_first(world, together)
        yield from arrays
        sent += len(arrays)


def _part(tensor: ComparedTensor, whole: np.ndarray) -> LocalPart | None:
    part = tensor.part(whole.shape)
    if part is not None and (shape := _block(whole, part.index).shape) != part.found.shape:
        raise UsageError(
            f"{tensor.kind} of {tensor.name or tensor.layer or 'the engine'}: this rank has shape {part.found.shape}, "
            f"but its sharding gives it {shape} of the whole {whole.shape}"
        )
    return part


def _block(whole: np.ndarray, index: Index) -> np.ndarray:
    return whole[(..., *index)]  # an array also of a number


def _host(array: Array) -> np.ndarray:
    return np.asarray(backend_of(array).to_host(array))
