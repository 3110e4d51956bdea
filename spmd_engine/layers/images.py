"""Images: windows over rows and columns that may be sharded, pooling, and changes of sharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spmd_engine.arrays.backend import backend_of
from spmd_engine.arrays.images import average_pool, average_pool_gradient, max_pool, max_pool_gradient
from spmd_engine.arrays.windows import Window
from spmd_engine.errors import UsageError
from spmd_engine.layers.declarations import Activation, Image
from spmd_engine.layers.layer import Layer
from spmd_engine.sharding.placement import Interval
from spmd_engine.sharding.shards import Shards

Pair = int | tuple[int, int]  #: one number for rows and one for columns; a number alone stands for both

#: Zeros around an image: one number for all sides; (before, after) of the rows and of the columns; or "same": as many
#: as give ceil(length / stride) outputs, an odd one at the end.
Padding = int | tuple[Interval, Interval] | str


@dataclass(frozen=True)
class ImageWindows:
    """The windows of a layer over a global image, whose letters are ``y`` and ``x``."""

    image: Image  #: rows and columns
    rows: Window
    columns: Window
    y: str = "h"
    x: str = "w"

    @classmethod
    def of(
        cls,
        image: Image,
        kernel: Pair,
        *,
        stride: Pair = 1,
        dilation: Pair = 1,
        padding: Padding = 0,
        letters: str = "hw",
    ) -> ImageWindows:
        """Raises UsageError for windows without an output, and for an invalid padding."""
        sizes, strides, dilations = (
            (size, size) if isinstance(size, int) else size for size in (kernel, stride, dilation)
        )
        windows = []
        for i in (0, 1):
            if padding == "same":
                windows.append(Window.same(sizes[i], strides[i], dilations[i], image[i]))
                continue
            if isinstance(padding, str):
                raise UsageError(f'padding {padding!r}: write "same", a number, or ((before, after), (before, after))')
            before, after = (padding, padding) if isinstance(padding, int) else padding[i]
            windows.append(Window(sizes[i], strides[i], dilations[i], before, after))
        if any(window.outputs(length) < 1 for window, length in zip(windows, image, strict=True)):
            raise UsageError(f"windows of {sizes[0]} x {sizes[1]} do not fit into images of {image[0]} x {image[1]}")
        return cls(image, *windows, *letters)

    @property
    def outputs(self) -> tuple[int, int]:
        """The global number of rows and of columns of outputs."""
        return self.rows.outputs(self.image[0]), self.columns.outputs(self.image[1])

    @property
    def reads(self) -> Mapping[str, tuple[int, Window]]:
        """By letter: length and window, as ``Shards.with_halo`` takes them."""
        return {self.y: (self.image[0], self.rows), self.x: (self.image[1], self.columns)}

    def here(self, sh: Shards) -> WindowsHere:
        """The windows of this rank's outputs."""
        sides = []
        for letter, (length, window) in self.reads.items():
            reach = sh.reach(letter, length, window)
            inner = inner_outputs(window, length, reach.own, reach.outputs) if sh.is_sharded(letter) else reach.outputs
            sides.append((window, reach.own, reach.needed, reach.outputs, inner))
        return WindowsHere(*zip(*sides, strict=True))


@dataclass(frozen=True)
class WindowsHere:
    """Windows over the rows and columns of a rank, as intervals of the global image and of the global outputs."""

    windows: tuple[Window, Window]
    own: tuple[Interval, Interval]  #: inputs that this rank has
    needed: tuple[Interval, Interval]  #: inputs that its outputs read, with the halo
    outputs: tuple[Interval, Interval]  #: outputs that it computes
    inner: tuple[Interval, Interval]  #: outputs that read only its own inputs

    @property
    def lengths(self) -> tuple[int, int]:
        """The number of rows and of columns that the rank needs."""
        return _lengths(self.needed)

    @property
    def output_lengths(self) -> tuple[int, int]:
        """The number of rows and of columns of outputs that the rank computes."""
        return _lengths(self.outputs)

    @property
    def local(self) -> tuple[Window, Window]:
        """The windows of all outputs over the needed inputs, padded only at the border of the image."""
        return self.of(self.outputs, self.needed)

    def of(self, outputs: tuple[Interval, Interval], inputs: tuple[Interval, Interval]) -> tuple[Window, Window]:
        """The windows of these outputs over these inputs."""
        rows, columns = (part_of(*part) for part in zip(self.windows, outputs, inputs, strict=True))
        return rows, columns

    def at(self, outputs: tuple[Interval, Interval]) -> tuple[slice, ...]:
        """The index of these outputs in the rank's array of outputs, whose rows and columns are dims 1 and 2."""
        sides = zip(outputs, self.outputs, strict=True)
        return slice(None), *(slice(start - first, stop - first) for (start, stop), (first, _) in sides)

    def around(self) -> list[tuple[Interval, Interval]]:
        """The outputs around the inner ones, as rectangles that are not empty: above, below, left, right."""
        (rows, columns), (inner_rows, inner_columns) = self.outputs, self.inner
        parts = [
            ((rows[0], inner_rows[0]), columns),
            ((inner_rows[1], rows[1]), columns),
            (inner_rows, (columns[0], inner_columns[0])),
            (inner_rows, (inner_columns[1], columns[1])),
        ]
        return [part for part in parts if all(start < stop for start, stop in part)]


def _lengths(sides: tuple[Interval, Interval]) -> tuple[int, int]:
    (h0, h1), (w0, w1) = sides
    return h1 - h0, w1 - w0


def part_of(window: Window, outputs: Interval, inputs: Interval) -> Window:
    """The window that computes an interval of this window's outputs from an interval of its inputs.

    >>> part_of(Window(3, before=1, after=1), outputs=(0, 2), inputs=(0, 3))  # padded on one side only
    Window(size=3, stride=1, dilation=1, before=1, after=0)
    """
    if outputs[0] == outputs[1]:
        return replace(window, before=inputs[0] - inputs[1], after=0)  # reads nothing
    begin = outputs[0] * window.stride - window.before
    end = (outputs[1] - 1) * window.stride - window.before + window.span
    return replace(window, before=inputs[0] - begin, after=end - inputs[1])


def inner_outputs(window: Window, length: int, own: Interval, outputs: Interval) -> Interval:
    """The interval of ``outputs`` that read only the interval ``own`` of ``length`` inputs.

    >>> inner_outputs(Window(3, before=1, after=1), 8, own=(4, 8), outputs=(4, 8))
    (5, 8)
    """
    first, stop = outputs
    if own[0] > 0:
        first = max(first, -(-(own[0] + window.before) // window.stride))
    if own[1] < length:
        stop = min(stop, (own[1] + window.before - window.span) // window.stride + 1)
    return (first, stop) if first < stop and own[0] < own[1] else (outputs[0], outputs[0])


# --- Pooling of images whose rows, columns and channels may be sharded: maxima, averages, and the global average


class _Pool(Layer):
    """A layer without parameters that reduces each window of each channel to a number.

    Inputs and outputs are [b h w c]; ``letters`` are the caller's for batch, rows, columns and channels. ``image`` is
    the global height and width; ``stride`` is the ``kernel`` by default; ``padding``: see ``Padding``.
    """

    def __init__(
        self,
        image: Image,
        kernel: Pair,
        *,
        stride: Pair | None = None,
        dilation: Pair = 1,
        padding: Padding = 0,
        letters: str = "bhwc",
    ) -> None:
        sizes = {"stride": kernel if stride is None else stride, "dilation": dilation, "padding": padding}
        self.windows = ImageWindows.of(image, kernel, letters=letters[1:3], **sizes)
        self.inputs = self.outputs = Activation(" ".join(letters), where="inside")
        self.may_cut = letters


class MaxPool(_Pool):
    """y[b h w c] = the maximum of x over the window; among equals, the first in row-major order has the gradient

    The rank of an output reads its complete window, so that ties do not depend on the sharding. Padding is never the
    maximum.
    """

    def forward(self, sh, p, x, ctx):
        wide = sh.with_halo(x, self.inputs.dims, self.windows.reads)
        return max_pool(wide, *self.windows.here(sh).local)

    def backward_input(self, sh, p, chosen, dy):
        windows = self.windows.here(sh)
        dx = max_pool_gradient(dy, chosen, *windows.local, windows.lengths)
        return sh.start_add_halo(dx, self.inputs.dims, self.windows.reads), None


class AveragePool(_Pool):
    """y[b h w c] = the mean of x over the window

    With ``count_include_pad``, padding counts as zeros, the default of PyTorch; else the mean is over fewer elements,
    as in TensorFlow.
    """

    def __init__(self, image: Image, kernel: Pair, *, count_include_pad: bool, **windows: Any) -> None:
        super().__init__(image, kernel, **windows)
        self.count_include_pad = count_include_pad

    def forward(self, sh, p, x, ctx):
        wide = sh.with_halo(x, self.inputs.dims, self.windows.reads)
        return average_pool(wide, *self.windows.here(sh).local, self.count_include_pad), None

    def backward_input(self, sh, p, saved, dy):
        windows = self.windows.here(sh)
        dx = average_pool_gradient(dy, *windows.local, self.count_include_pad, windows.lengths)
        return sh.start_add_halo(dx, self.inputs.dims, self.windows.reads), None


class GlobalPool(Layer):
    """y[b c] = the mean of x[b h w c] over h and w, reduced over the axes that shard these

    y and its gradient are replicated along the axes of h and w.
    """

    def __init__(self, image: Image, letters: str = "bhwc") -> None:
        b, h, w, c = letters
        self.image, self.over = image, h + w
        self.inputs, self.outputs = Activation(f"{b} {h} {w} {c}", "inside"), Activation(f"{b} {c}", "inside")
        self.may_cut = letters

    def forward(self, sh, p, x, ctx):
        y = sh.all_reduce(x.sum((1, 2)), over=self.over)
        y /= self.image[0] * self.image[1]
        return y, x.shape

    def backward_input(self, sh, p, shape, dy):
        xp, share = backend_of(dy).xp, dy / (self.image[0] * self.image[1])
        return xp.array(xp.broadcast_to(share[:, None, None], shape)), None


# --- Changes of sharding in a model: from image rows to samples, or to replicas; and from shards to gathered dims


class Reshard(Layer):
    """y = x[b h w c] with other letters, such as [n y x c], which other mesh axes may shard

    With h and w sharded over the mesh axes H and W:

    n sharded over the axes of b, then H and W    an all-to-all: each rank sends its rows of most samples,
                                                  and receives all rows of some
    n sharded as b                                an all-gather of rows: all samples on each rank of H, W

    Neither shards y and x. Elements that a rank has already are not sent. The backward is the reverse; replicas have
    equal gradients, of which each rank takes its shard. ``image`` is the global height and width.
    """

    def __init__(self, image: Image, before: str = "bhwc", after: str = "nyxc") -> None:
        self.image = image
        self.inputs, self.outputs = (Activation(" ".join(letters), where="inside") for letters in (before, after))
        self.may_cut = "".join(dict.fromkeys(before + after))

    def forward(self, sh, p, x, ctx):
        shape = len(x), *self.image, x.shape[3]
        return sh.reshard(x, self.inputs.dims, self.outputs.dims, shape), shape

    def backward_input(self, sh, p, shape, dy):
        return sh.reshard(dy, self.outputs.dims, self.inputs.dims, shape), None


class Gather(Layer):
    """y[b k] = x[n k], or any letters: an all-gather along the axes that shard n and not b

    These ranks then compute the same; in the backward, each takes its shard of dy. This restores the samples that a
    Reshard split (n k -> b k), or all channels if each rank computed some (b h w f -> b h w c).
    """

    def __init__(self, before: str, after: str) -> None:
        self.inputs, self.outputs = (Activation(" ".join(letters), where="inside") for letters in (before, after))
        self.may_cut = "".join(dict.fromkeys(before + after))

    def forward(self, sh, p, x, ctx):
        return sh.gather_further(x, self.inputs.dims, self.outputs.dims), None

    def backward_input(self, sh, p, saved, dy):
        return sh.shard_further(dy, self.outputs.dims, self.inputs.dims), None
