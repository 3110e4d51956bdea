"""Work of other systems, from a file that lists their operations: a model for the planner.

Its layers execute the listed operations on shapes: matrix products by their letters, passes over elements by their
bytes, and collectives. Sharding, the products of the backward, pipelines and overlap follow from the engine's code, as
for any model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

from other_systems.description import PARTS, RECOMPUTED, System, SystemWork, Transformer
from spmd_engine.arrays.meta.array import ShapedArray
from spmd_engine.arrays.meta.meter import meter
from spmd_engine.comm.pending import then, wait_for
from spmd_engine.engine.optimizers import Optimizer
from spmd_engine.errors import UsageError
from spmd_engine.layers import Parameter
from spmd_engine.layers.declarations import Activation
from spmd_engine.layers.layer import Layer
from spmd_engine.models import Model

ITEMSIZE = 2  #: bytes per element of products and messages


def model_of(system: System, transformer: Transformer, recompute: str = "none") -> Model:
    """The model of a transformer in this system, with layers "first", "block0/attention", "block0/mlp", ..., "last".

    ``recompute``: "selective" repeats the operations that the file marks, in the backward. The engine recomputes whole
    blocks (``Candidate.recompute``), which requires "none" here. Raises UsageError for another value, and for a system
    whose file does not list its work.
    """
    if recompute not in RECOMPUTED[:2]:
        raise UsageError(f"recompute {recompute!r}: choose one of {', '.join(RECOMPUTED[:2])}")
    if missing := [part for part in PARTS if not any(operation.part == part for operation in system.work)]:
        raise UsageError(f"{system.name}: its file does not list the work of {', '.join(missing)}")
    matrices: dict[str, dict[str, str]] = {"first": dict(system.first), "last": dict(system.last)}
    for name, dims in system.matrices.items():
        part, _, matrix = name.partition("/")
        matrices.setdefault(part, {})[matrix] = dims
    tied = {name: f"first/{name}" for name, dims in system.last.items() if system.first.get(name) == dims}
    first, attention, mlp, last = (
        _WorkLayer(part, system, matrices[part], transformer, recompute, tied if part == "last" else {})
        for part in PARTS
    )
    layers: list[tuple[str, Layer]] = [("first", first)]
    for number in range(transformer.layers):
        layers += [(f"block{number}/attention", attention), (f"block{number}/mlp", mlp)]
    layers.append(("last", last))
    options = {"context": transformer.sequence, "vocabulary": transformer.vocabulary}
    return Model(system.name, tuple(layers), "b s", "b s d", "b s", _no_loss, **options)


ROUNDING = 4 + 2  #: bytes per parameter that the engine moves after an update, from masters to 16-bit parameters


class SystemUpdate(Optimizer):
    """An optimizer that moves as many bytes per parameter as the system's."""

    def __init__(self, system: System) -> None:
        super().__init__()
        self._bytes = system.update

    def _update(self, *arrays, step, rate, scale, decays):
        size = arrays[0].size
        meter().elementwise(size, round(size * (self._bytes - ROUNDING)), 0)


class _WorkLayer(Layer):
    """Executes, on shapes, the operations that a system's file lists for a part of the model."""

    costs_only = True
    may_cut = "bshrfv"

    def __init__(
        self,
        part: str,
        system: System,
        matrices: Mapping[str, str],
        transformer: Transformer,
        recompute: str,
        tied: Mapping[str, str],
    ) -> None:
        self.operations = [operation for operation in system.work if operation.part == part]
        self.repeated = [operation for operation in self.operations if recompute in operation.repeated]
        self.across = {"attention": "h", "mlp": "f"}.get(part, "v")
        texts = [*matrices.values(), *(text for operation in self.operations for text in _texts(operation))]
        letters = {letter for text in texts for letter in text.replace(",", " ").split()} | {"d", self.across}
        self.sizes = {letter: size for letter, size in transformer.sizes.items() if letter in letters}
        self.parameters = {name: Parameter(dims) for name, dims in matrices.items()}
        self.tied, self.sequence, self.accumulate = tied, transformer.sequence, system.accumulate
        self.overlap = system.overlap
        self.is_first = part == "first"
        if self.is_first:
            self.inputs = Activation("b s", where="inside")

    def forward(self, sh, p, x, ctx):
        x = self._forward(sh, self.operations, x)
        return (self._stream(sh, len(x), "residual") if self.is_first else ShapedArray.new(x.shape, x.dtype)), None

    def _forward(self, sh, operations: Sequence[SystemWork], x):
        samples = len(x)
        for operation in operations:
            if operation.product is not None:
                rows, summed, columns = operation.product.split(",")
                self._product(sh, samples, operation.each, rows, columns, summed)
            elif operation.fused is not None:
                self._fused(sh, samples, operation, operation.products[0], operation.reached[0])
            elif operation.elements is not None:
                self._elementwise(sh, samples, operation, operation.bytes[0])
            elif operation.gather is not None:
                x = self._gathered(sh, x, operation.gather)
            else:
                x = sh.reduce_scatter(self._stream(sh, samples, "inside"), "b s d", over=operation.reduce, onto="s")
        return x

    def backward_input(self, sh, p, saved, dy):
        samples = len(dy)
        self._forward(sh, self.repeated, dy)
        dx = self._backward(sh, self.operations[::-1], samples, dy)
        return (None if self.is_first else dx), samples

    def _backward(self, sh, operations: Sequence[SystemWork], samples: int, dy):
        """The gradient of the input; pending if a started collective must complete first."""
        for number, operation in enumerate(operations, start=1):
            if operation.product is not None:
                rows, summed, columns = operation.product.split(",")
                self._product(sh, samples, operation.each, rows, summed, columns)
                if not operation.weights:
                    self._product(sh, samples, operation.each, summed, columns, rows)
            elif operation.fused is not None:
                self._fused(sh, samples, operation, operation.products[1], operation.reached[1])
            elif operation.elements is not None:
                self._elementwise(sh, samples, operation, operation.bytes[1])
            elif operation.reduce is not None:
                dy = self._gathered(sh, dy, operation.reduce)
            else:
                stream, over = self._stream(sh, samples, "inside"), operation.gather
                summed = sh.start_reduce_scatter(stream, "b s d", over=over, onto="s")
                rest = partial(self._backward, sh, operations[number:], samples)
                return then(summed, rest) if self.overlap else rest(wait_for(summed))
        return ShapedArray.new(dy.shape, dy.dtype)

    def backward_weight(self, sh, rest, g):
        for operation in self.operations:
            if operation.weights and operation.product is not None:
                rows, summed, columns = operation.product.split(",")
                self._product(sh, rest, operation.each, summed, columns, rows)
        for parameter in self.parameters.values():
            size = self._count(sh, rest, parameter.dims, "inside")
            meter().elementwise(size, round(size * self.accumulate), 0)

    def _product(self, sh, samples: int, batch_dims: str, rows: str, columns: str, summed: str) -> None:
        batch, m, n, k = (self._count(sh, samples, dims, "inside") for dims in (batch_dims, rows, columns, summed))
        meter().product(batch, m, n, k, ITEMSIZE)

    def _fused(self, sh, samples: int, operation: SystemWork, products: float, reached: float) -> None:
        """Count ``products`` at this fraction of the speed, in one kernel that does not store their results."""
        parts = (operation.each, *(operation.fused or "").split(","))
        batch, m, k, n = (self._count(sh, samples, dims, "inside") for dims in parts)
        meter().product(batch, m, n, round(products * k), ITEMSIZE, fused=reached)

    def _elementwise(self, sh, samples: int, operation: SystemWork, size: float) -> None:
        count = self._count(sh, samples, operation.elements or "", operation.where)
        if size:
            meter().elementwise(count, round(count * size), 0)

    def _gathered(self, sh, x: ShapedArray, letter: str) -> ShapedArray:
        return sh.all_gather(x, "b s d", "s", across=letter)

    def _stream(self, sh, samples: int, where: str) -> ShapedArray:
        shape = samples, self._count(sh, samples, "s", where), self.sizes["d"]
        return ShapedArray.new(shape, f"f{ITEMSIZE}")

    def _count(self, sh, samples: int, dims: str, where: str) -> int:
        """The number of a rank's elements with these dims."""
        sizes = {**self.sizes, "s": self.sequence}

        def length(dim: str) -> int:
            if dim.isdigit():
                return int(dim)
            if dim == "b":
                return samples
            part = sh.span(dim, sizes[dim], where)
            return part.stop - part.start

        return prod(length(dim) for dim in dims.split())


def _texts(operation: SystemWork) -> list[str]:
    return [operation.product or "", operation.fused or "", operation.each, operation.elements or ""]


def _no_loss(sh, outputs, targets, **options):
    return 0.0, outputs
