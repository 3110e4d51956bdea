"""The window of a convolution or pooling along one dim: which inputs each output reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spmd_engine.errors import UsageError


@dataclass(frozen=True)
class Window:
    """Output p reads the inputs p * stride - before + tap * dilation, for every tap in [0, size).

    ``before`` and ``after`` are the numbers of padding elements at either end; negative ones omit elements of the
    input. Raises UsageError if size, stride or dilation are less than 1.
    """

    size: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        for name in ("size", "stride", "dilation"):
            if getattr(self, name) < 1:
                raise UsageError(f"{self}: {name} must be at least 1")

    @classmethod
    def same(cls, size: int, stride: int, dilation: int, length: int) -> Window:
        """Padded so that there are ceil(length / stride) outputs: half on either side, an odd element at the end.

        This is the padding that TensorFlow calls SAME and ONNX calls SAME_UPPER.
        """
        outputs = -(-length // stride)
        span = (size - 1) * dilation + 1
        padding = max((outputs - 1) * stride + span - length, 0)
        return cls(size, stride, dilation, padding // 2, padding - padding // 2)

    @property
    def span(self) -> int:
        """The number of elements from the first that an output reads to the last, both included."""
        return (self.size - 1) * self.dilation + 1

    def outputs(self, length: int) -> int:
        """The number of outputs of ``length`` inputs: windows that fit into the padded input."""
        room = length + self.before + self.after - self.span
        return room // self.stride + 1 if room >= 0 else 0

    def needs(self, first: int, stop: int, length: int) -> tuple[int, int]:
        """The interval of inputs in [0, length) that the outputs [first, stop) read; empty if they read none."""
        begin = first * self.stride - self.before
        end = begin + (stop - 1 - first) * self.stride + self.span if stop > first else begin
        return min(max(begin, 0), length), min(max(end, 0), length)

    def taps(self, length: int, first: int = 0, stop: int | None = None) -> Iterator[tuple[int, slice, slice]]:
        """(tap, outputs, inputs): where a tap reads the input and not padding. Outputs count from ``first``.

        Only outputs in [first, stop) are considered, by default all. Taps that read only padding are left out.
        """
        stop = self.outputs(length) if stop is None else stop
        for tap in range(self.size):
            offset = tap * self.dilation - self.before
            begin, end = max(first, -(offset // self.stride)), min(stop, (length - 1 - offset) // self.stride + 1)
            if begin < end:
                inputs = slice(begin * self.stride + offset, (end - 1) * self.stride + offset + 1, self.stride)
                yield tap, slice(begin - first, end - first), inputs

    def reads(self, output: int, length: int) -> int:
        """The number of elements of the input, not of the padding, that an output reads."""
        return sum(1 for _ in self.taps(length, output, output + 1))


def outputs_of(x: tuple[int, ...], rows: Window, columns: Window, channels: int) -> tuple[int, int, int, int]:
    """The shape [b p q f] of the outputs of windows over x[b h w c]."""
    return x[0], rows.outputs(x[1]), columns.outputs(x[2]), channels


def check_convolution(x: tuple[int, ...], w: tuple[int, ...], rows: Window, columns: Window, groups: int) -> None:
    """Raise ValueError unless the shapes x[b h w c] and w[k l i f] belong together."""
    if groups < 1 or x[3] != w[2] * groups or w[3] % groups or w[:2] != (rows.size, columns.size):
        raise ValueError(
            f"x[b h w c] of shape {x} and w[k l i f] of shape {w} in {groups} groups, for windows of {rows.size} x "
            f"{columns.size}: c must be groups * i, f a multiple of groups, and k, l the windows' sizes"
        )


def check_gradient(dy: tuple[int, ...], x: tuple[int, ...], rows: Window, columns: Window, channels: int) -> None:
    """Raise ValueError unless the shape of dy[b p q f] is that of the outputs of x[b h w c]."""
    expected = outputs_of(x, rows, columns, channels)
    if dy != expected:
        raise ValueError(f"dy[b p q f] of shape {dy} for x[b h w c] of shape {x}: the outputs have shape {expected}")
