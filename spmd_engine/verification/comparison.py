"""Compares the ranks' parts of a tensor with the tensor of one device, which rank 0 holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any

import numpy as np

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.dtypes import describe, described
from spmd_engine.arrays.precision import widened
from spmd_engine.comm import Group
from spmd_engine.engine import ShardedEngine
from spmd_engine.errors import UsageError
from spmd_engine.verification.diagnosis import ComparedBlock, diagnose, difference, first_and_largest
from spmd_engine.verification.report import Disagreement

# --- Values that ranks send each other, as bytes: JSON for their structure, then the arrays
#
# Reading a message runs no code that it names: it makes only records of this package, which are dataclasses, named
# tuples and enumerations.


_LENGTH = 8  # bytes of the length of the JSON


def packed(value: Any) -> np.ndarray:
    """The bytes of a value that consists of plain values, arrays, collections, and records of this package."""
    arrays: list[np.ndarray] = []
    head = json.dumps(_as_json(value, arrays)).encode()
    parts = [len(head).to_bytes(_LENGTH, "little"), head, *(np.ascontiguousarray(x).tobytes() for x in arrays)]
    return np.frombuffer(b"".join(parts), np.uint8)


def unpacked(message: np.ndarray) -> Any:
    """The value that ``packed`` turned into these bytes. Raises ValueError for other bytes."""
    data = message.tobytes()
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    rest = memoryview(data)[end:]

    def array(dtype: str, shape: list[int]) -> np.ndarray:
        nonlocal rest
        x = np.empty(shape, described(dtype))
        x.reshape(-1).view(np.uint8)[...] = np.frombuffer(rest[: x.nbytes], np.uint8)
        rest = rest[x.nbytes :]
        return x

    def value(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        kind, *parts = content
        if kind == "array":
            return array(*parts)
        if kind == "number":
            return array(*parts)[()]
        values = [value(part) for part in parts]
        if kind == "dict":
            return dict(zip(values[::2], values[1::2], strict=True))
        return _COLLECTIONS[kind](values) if kind in _COLLECTIONS else _record(kind)(*values)

    return value(json.loads(data[_LENGTH:end]))


_COLLECTIONS = {"list": list, "tuple": tuple, "set": set}


def _as_json(value: Any, arrays: list[np.ndarray]) -> Any:
    """The structure of a value: a list of its kind and its parts, or a plain value. Its arrays are appended."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        arrays.append(np.asarray(value))
        return ["array" if isinstance(value, np.ndarray) else "number", describe(value.dtype), list(value.shape)]
    if isinstance(value, Mapping):
        parts = [part for item in value.items() for part in item]
        return ["dict", *(_as_json(part, arrays) for part in parts)]
    if kind.__name__ in _COLLECTIONS:
        return [kind.__name__, *(_as_json(part, arrays) for part in value)]
    if isinstance(value, Enum):
        parts = [value.value]
    else:
        parts = [getattr(value, entry.name) for entry in fields(value)] if is_dataclass(value) else list(value)
    return [f"{kind.__module__}:{kind.__name__}", *(_as_json(part, arrays) for part in parts)]


def _record(kind: str) -> Any:
    """The class of a record. Raises ValueError for a class that is none of this package's records."""
    module, _, name = kind.partition(":")
    record = getattr(import_module(module), name, None) if module.startswith(f"{__package__}.") else None
    if isinstance(record, type) and (is_dataclass(record) or issubclass(record, (Enum, tuple))):
        return record
    raise ValueError(f"a message has a value of {kind}, which is no record of a verification")


Index = tuple[slice | np.ndarray, ...]  # the positions along each dim: a range, or an array of positions
#: The smallest scale of a tensor, relative to the largest element of all tensors of its kind. A gradient that is 0
#: except for the rounding of its terms has no scale of its own.
SMALLEST_SCALE = 1e-3
TOGETHER = 1 << 20  # bytes: small arrays are sent in one message up to this size


@dataclass(frozen=True)
class LocalPart:
    """The part of a tensor on this rank."""

    found: Array
    index: Index  #: in the global array
    before: Array | None = None  #: the values one step before
    base: Array | None = None  #: the array to which the rest was added


@dataclass(frozen=True)
class ComparedTensor:
    """A tensor that both engines have computed."""

    kind: str
    whole: Callable[[], Array | None]  #: returns one device's array; called on rank 0 only
    #: returns this rank's part of a global array of that shape; None: this rank has no part
    part: Callable[[tuple[int, ...]], LocalPart | None]
    name: str = ""
    layer: str = ""
    micro_batch: int | None = None


@dataclass(frozen=True)
class Measured:
    """The distance of a tensor from one device's."""

    tensor: ComparedTensor
    most: float  #: the largest difference on any rank
    scale: float  #: to which the largest difference is relative

    @property
    def distance(self) -> float:
        return self.most / self.scale

    def is_off(self, tolerance: float) -> bool:
        return self.most > tolerance * self.scale


def measure(world: Group, tensors: Sequence[ComparedTensor]) -> list[Measured]:
    """Differences of all ranks' blocks from one device's tensors. Collective; the same on every rank."""
    figures = np.zeros((2, len(tensors)))
    for number, (tensor, expected) in enumerate(zip(tensors, _broadcast_expected(world, tensors), strict=True)):
        part = _part(tensor, expected)
        figures[1, number] = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
        if part is not None:
            figures[0, number] = difference(on_host(part.found), _block(expected, part.index)).max(initial=0.0)
    most, scales = world.all_reduce(figures, "max", label="verify").tolist()
    largest: dict[str, float] = {}
    for tensor, scale in zip(tensors, scales, strict=True):
        largest[tensor.kind] = max(scale, largest.get(tensor.kind, 0.0))
    scales = [max(scale, SMALLEST_SCALE * largest[t.kind]) or 1.0 for t, scale in zip(tensors, scales, strict=True)]
    return [Measured(*values) for values in zip(tensors, most, scales, strict=True)]


def examine(
    engine: ShardedEngine, measured: Measured, tolerance: float, *, step: int, micro_batches: int
) -> Disagreement:
    """Return where a tensor differs, and why. Collective; rank 0 temporarily holds all ranks' blocks."""
    world, tensor, mesh = engine.group(), measured.tensor, engine.mesh
    (expected,) = _broadcast_expected(world, [tensor])
    part, block = _part(tensor, expected), None
    if part is not None:
        block = ComparedBlock(
            mesh.rank,
            mesh.coordinates,
            tuple(np.arange(n)[places] for n, places in zip(expected.shape, part.index, strict=True)),
            on_host(part.found),
            _block(expected, part.index),
            None if part.before is None else on_host(part.before),
            None if part.base is None else on_host(part.base),
        )
    limit = tolerance * measured.scale
    summed = micro_batches if tensor.micro_batch is None else 1
    disagreement = None
    if (blocks := to_first(world, block)) is not None:
        blocks = [block for block in blocks if block is not None]
        disagreement = Disagreement(
            step,
            tensor.kind,
            tensor.name,
            tensor.layer,
            tensor.micro_batch if micro_batches > 1 else None,
            measured.distance,
            tuple(block.rank for block in blocks if (block.difference > limit).any()),
            *first_and_largest(blocks, limit),
            diagnose(blocks, mesh.all_axes, limit, kind=tensor.kind, micro_batches=summed),
        )
    return from_first(world, disagreement)


def to_first(world: Group, value: Any) -> list[Any] | None:
    """Return every rank's ``value``, in the order of the group, on the lowest rank of the job; None on other ranks."""
    if world.rank != world.lowest:
        world.send(world.lowest, packed(value), label="verify")
        return None
    others = [rank for rank in range(world.size) if rank != world.rank]
    values = {rank: unpacked(world.receive(rank, label="verify")) for rank in others}
    return [values.get(rank, value) for rank in range(world.size)]


def from_first(world: Group, value: Any) -> Any:
    """Return the ``value`` of the lowest rank of the job on every rank."""
    data = packed(value) if world.rank == world.lowest else None
    return unpacked(world.broadcast(data, world.lowest, label="verify"))


def _broadcast_expected(world: Group, tensors: Sequence[ComparedTensor]) -> Iterator[np.ndarray]:
    """Yield one device's arrays on every rank; small ones are sent in one message."""
    sent = 0
    while sent < len(tensors):
        together: list[np.ndarray] = []
        if world.rank == world.lowest:
            size = 0
            while sent + len(together) < len(tensors) and size < TOGETHER:
                together.append(on_host(tensors[sent + len(together)].whole()))
                size += together[-1].nbytes
        arrays = from_first(world, together)
        yield from arrays
        sent += len(arrays)


def _part(tensor: ComparedTensor, expected: np.ndarray) -> LocalPart | None:
    part = tensor.part(expected.shape)
    if part is not None and (shape := _block(expected, part.index).shape) != part.found.shape:
        raise UsageError(
            f"{tensor.kind} of {tensor.name or tensor.layer or 'the engine'}: this rank has shape {part.found.shape}, "
            f"but its sharding assigns it {shape} of the global shape {expected.shape}"
        )
    return part


def _block(array: np.ndarray, index: Index) -> np.ndarray:
    return array[(..., *index)]  # `...` makes an array of a number, too


def on_host(array: Array) -> np.ndarray:
    """A copy or view of an array on the host; 16-bit floats in the dtype of their sums."""
    return widened(np.asarray(backend_of(array).to_host(array)))
