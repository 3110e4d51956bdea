"""Which channels of a convolution read which, and the convolution of a rank that has only some of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.images.convolution import conv2d, conv2d_input_gradient, conv2d_weight_gradient
from spmd_engine.arrays.images.window import Window
from spmd_engine.sharding.placement import Interval


@dataclass(frozen=True)
class ChannelGroups:
    """Which input channels the output channels read, in so many groups: all outputs of a group all inputs of it."""

    inputs: int
    all_outputs: int
    number: int = 1

    def outputs(self, length: int) -> int:
        """How many there are, as ``Shards.with_halo`` asks."""
        return self.all_outputs

    def needs(self, first: int, stop: int, length: int) -> Interval:
        """The interval of inputs that these outputs read: those of their groups."""
        per_output, per_input = self.all_outputs // self.number, self.inputs // self.number
        begin = first // per_output
        end = -(-stop // per_output) if stop > first else begin
        return begin * per_input, end * per_input

    def parts(self, outputs: Interval, inputs: Interval) -> Iterator[tuple[slice, slice, int]]:
        """An interval of outputs in parts that are convolutions: of one group a part, whole groups, of one a part.

        Of each part which of these inputs and outputs it has, and in how many groups.

        >>> for part in ChannelGroups(6, 9, 3).parts((1, 7), (0, 6)):
        ...     print(*part)
        slice(0, 2, None) slice(0, 2, None) 1
        slice(2, 4, None) slice(2, 5, None) 1
        slice(4, 6, None) slice(5, 6, None) 1
        """
        per_output = self.all_outputs // self.number
        first, stop = -(-outputs[0] // per_output), outputs[1] // per_output  # whole groups
        if first > stop:
            parts = [(*outputs, 1)]
        else:
            ends = outputs[0], first * per_output, stop * per_output, outputs[1]
            parts = zip(ends, ends[1:], (1, stop - first, 1), strict=False)
        for begin, end, groups in parts:
            if begin < end:
                needed = self.needs(begin, end, self.inputs)
                yield slice(*(n - inputs[0] for n in needed)), slice(begin - outputs[0], end - outputs[0]), groups


@dataclass(frozen=True)
class PartsOfGroups:
    """Convolutions side by side: of each, which input channels x and which output channels y it has, and its groups.

    Together they make all outputs. One that has all channels is the convolution itself.
    """

    parts: tuple[tuple[slice, slice, int], ...]

    @property
    def _groups(self) -> int | None:
        """Into how many groups the one part divides, if there is one that has all channels."""
        everything = slice(None)
        return self.parts[0][2] if self.parts and self.parts[0][:2] == (everything, everything) else None

    def conv2d(self, x: Array, w: Array, rows: Window, columns: Window) -> Array:
        """y[b p q f], as ``arrays.convolution.conv2d``."""
        if self._groups:
            return conv2d(x, w, rows, columns, self._groups)
        shape = len(x), rows.outputs(x.shape[1]), columns.outputs(x.shape[2]), w.shape[3]
        y = backend_of(x).xp.empty(shape, x.dtype)
        for of_x, of_y, groups in self.parts:
            y[..., of_y] = conv2d(x[..., of_x], w[..., of_y], rows, columns, groups)
        return y

    def input_gradient(self, dy: Array, w: Array, rows: Window, columns: Window, shape: tuple[int, ...]) -> Array:
        """dx[b h w c], of this ``shape``: what parts read in common adds up."""
        if self._groups:
            return conv2d_input_gradient(dy, w, rows, columns, self._groups, shape[1:3])
        dx = backend_of(dy).xp.zeros(shape, dy.dtype)
        for of_x, of_y, groups in self.parts:
            part = dy[..., of_y], w[..., of_y]
            dx[..., of_x] += conv2d_input_gradient(*part, rows, columns, groups, shape[1:3])
        return dx

    def weight_gradient(self, x: Array, dy: Array, rows: Window, columns: Window) -> Array:
        """dw[k l i f]."""
        if self._groups:
            return conv2d_weight_gradient(x, dy, rows, columns, self._groups)
        parts = [
            conv2d_weight_gradient(x[..., of_x], dy[..., of_y], rows, columns, groups)
            for of_x, of_y, groups in self.parts
        ]
        return backend_of(x).xp.concatenate(parts, axis=3) if parts else 0.0
