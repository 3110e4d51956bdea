"""A convolution of images whose rows, columns and channels may be sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.elementwise import add_to
from spmd_engine.arrays.images import conv2d, conv2d_input_gradient, conv2d_weight_gradient
from spmd_engine.arrays.windows import Window
from spmd_engine.comm.pending import then, wait_for
from spmd_engine.errors import UsageError
from spmd_engine.layers.declarations import Activation, Image, Parameter, Sized
from spmd_engine.layers.images import ImageWindows, Padding, Pair
from spmd_engine.layers.layer import Layer
from spmd_engine.sharding.placement import Interval

#: From this many multiplications on, inner outputs are computed while the halo is sent; with fewer, computing outputs
#: in five parts costs more than waiting.
OVERLAP_FROM = 20_000_000


class Conv2d(Layer):
    """y[b h w o] = sum over taps k, l and inputs i of x[b h' w' i] · weights[k l i o] (+ bias[o])

    where h', w' is the pixel that output h, w reads by tap k, l of its window, 0 outside of the image. With rows and
    columns sharded over the mesh axes H and W, and channels i over R and o over C:

    Forward
        1. x[b h'/H w'/W i/R] = Halo_HW(x[b h/H w/W i/R])              inner outputs are computed meanwhile
        2. y[b h/H w/W o/C] {U_R} = sum of x · weights[k l i/R o/C],   y = AllReduce_R(...), then + bias[o/C]
    Backward
        3. dx[b h'/H w'/W i/R] {U_C} = sum over k, l, o of dy[b h/H w/W o/C] · weights[k l i/R o/C]
        4. dx[b h/H w/W i/R] = AllReduce_C(AddHalo_HW(dx))             dweights is computed meanwhile
        5. dweights[k l i/R o/C] = sum over b, h, w of x · dy          unreduced over the axes that shard b, h, w

    ``inputs`` and ``outputs`` are a letter and a number of channels each. With different letters, c -> f -> c -> ...,
    and f sharded over a mesh axis, convolutions split their output channels and their input channels in turn, as the
    two products of an MLP do. With one letter, f -> f, each rank computes its shard of the outputs and needs all inputs
    that these read. With ``groups``, these are the channels of its outputs' groups (the i of ``weights`` counts within
    a group), and in a depthwise convolution its own shard. With one group they are all channels: step 1 gathers them
    with the halo, and step 4 is a reduce-scatter. Any number of channels and groups fits any number of ranks.

    ``image`` is the global height and width. ``kernel``, ``stride``, ``dilation``: a number, or one for rows and one
    for columns; ``padding``: see ``Padding``. ``letters`` are those of batch, rows and columns. ``std`` is the standard
    deviation of the initial weights, by default sqrt(2 / (k l i)) (He et al., 2015). ``input_gradient=False`` omits
    steps 3 and 4, for a first layer. ``reduced=False`` leaves dx unreduced over o in step 4: the caller adds it to
    others and reduces the sum. Raises UsageError for groups that do not divide the channels, or have different letters,
    and for windows that do not fit.

    The halo exchange is that of Dryden et al., "Improving strong-scaling of CNN training by exploiting finer-grained
    parallelism" (2019), for any windows and shards.
    """

    def __init__(
        self,
        inputs: Sized,
        outputs: Sized,
        image: Image,
        kernel: Pair,
        *,
        stride: Pair = 1,
        dilation: Pair = 1,
        padding: Padding = 0,
        groups: int = 1,
        bias: bool = True,
        std: float | None = None,
        letters: str = "bhw",
        input_gradient: bool = True,
        reduced: bool = True,
    ) -> None:
        i, o = self.channels = inputs[0], outputs[0]
        if groups > 1 and i != o:
            raise UsageError(f"Conv2d from {i!r} to {o!r} in {groups} groups: give both the same letter")
        if inputs[1] % groups or outputs[1] % groups:
            raise UsageError(f"Conv2d from {inputs[1]} to {outputs[1]} channels: {groups} groups do not divide them")
        batch, y, x = self.letters = letters
        self.windows = ImageWindows.of(image, kernel, stride=stride, dilation=dilation, padding=padding, letters=y + x)
        self.groups = ChannelGroups(inputs[1], outputs[1], groups)
        self.input_gradient, self.reduced = input_gradient, reduced
        self.inputs, self.outputs = (Activation(f"{batch} {y} {x} {channel}", where="inside") for channel in (i, o))
        self.may_cut = letters + "".join(dict.fromkeys(i + o))
        input_letter = i if i != o else "j"
        taps = self.windows.rows.size, self.windows.columns.size
        self.sizes = {"k": taps[0], "l": taps[1], input_letter: inputs[1] // groups, o: outputs[1]}
        if std is None:
            std = sqrt(2 / (prod(taps) * inputs[1] // groups))
        self.parameters = {"weights": Parameter(f"k l {input_letter} {o}", std=std, summed=letters)}
        if bias:
            self.parameters["bias"] = Parameter(o, decay=False, summed=letters)

    @property
    def input_sizes(self):
        return {self.channels[0]: self.groups.inputs}

    def cost(self, length):
        return super().cost(length) * prod(self.windows.outputs)

    def _reads(self):
        i, o = self.channels
        return {**self.windows.reads, **({i: (self.groups.inputs, self.groups)} if i == o else {})}

    def _parts(self, sh):
        """The convolutions of this rank's channels: see ``ChannelGroups``."""
        i, o = self.channels
        if i != o or not sh.is_sharded(i):
            return PartsOfGroups(((slice(None), slice(None), self.groups.number),))
        reach = sh.reach(i, self.groups.inputs, self.groups)
        return PartsOfGroups(tuple(self.groups.parts(reach.outputs, reach.needed)))

    def forward(self, sh, p, x, ctx):
        i, o = self.channels
        windows, parts, w = self.windows.here(sh), self._parts(sh), p["weights"]
        wide = sh.start_with_halo(x, self.inputs.dims, self._reads())
        # Enough must be computed from these inputs to overlap the halo exchange with it.
        if wide is not x and i != o and x.size // max(1, x.shape[3]) * w.size >= OVERLAP_FROM:
            y = backend_of(x).xp.empty((len(x), *windows.output_lengths, w.shape[3]), x.dtype)
            y[windows.at(windows.inner)] = parts.conv2d(x, w, *windows.of(windows.inner, windows.own))
            wide = wide.wait()
            for outputs in windows.around():
                y[windows.at(outputs)] = parts.conv2d(wide, w, *windows.of(outputs, windows.needed))
        else:
            wide = wait_for(wide)
            y = parts.conv2d(wide, w, *windows.local)
        if i != o:
            y = sh.all_reduce(y, over=i)
        if "bias" in p:
            add_to(y, p["bias"])
        return y, wide

    def backward_input(self, sh, p, wide, dy):
        i, o = self.channels
        if not self.input_gradient:
            return None, (wide, dy)
        windows, w = self.windows.here(sh), p["weights"]
        dx = self._parts(sh).input_gradient(dy, w, *windows.local, wide.shape)
        dx = sh.start_add_halo(dx, self.inputs.dims, self._reads())
        if i != o and self.reduced:
            dx = then(dx, lambda dx: sh.start_all_reduce(dx, over=o))
        return dx, (wide, dy)

    def backward_weight(self, sh, rest, g):
        wide, dy = rest
        rows, columns = self.windows.here(sh).local
        g.add("weights", self._parts(sh).weight_gradient(wide, dy, rows, columns))
        if "bias" in self.parameters:
            g.add("bias", dy.sum((0, 1, 2)))


# --- The input channels that output channels read, and the convolution of a rank that has only some of both


@dataclass(frozen=True)
class ChannelGroups:
    """Which input channels the output channels read: all outputs of a group read all inputs of it."""

    inputs: int
    all_outputs: int
    number: int = 1

    def outputs(self, length: int) -> int:
        """The number of outputs, as ``Shards.with_halo`` takes it."""
        return self.all_outputs

    def needs(self, first: int, stop: int, length: int) -> Interval:
        """The interval of inputs that these outputs read: those of their groups."""
        per_output, per_input = self.all_outputs // self.number, self.inputs // self.number
        begin = first // per_output
        end = -(-stop // per_output) if stop > first else begin
        return begin * per_input, end * per_input

    def parts(self, outputs: Interval, inputs: Interval) -> Iterator[tuple[slice, slice, int]]:
        """Split an interval of outputs into convolutions: a part of a group, complete groups, a part of a group.

        Yields the inputs and outputs of each, as slices of these intervals, and its number of groups.

        >>> for part in ChannelGroups(6, 9, 3).parts((1, 7), (0, 6)):
        ...     print(*part)
        slice(0, 2, None) slice(0, 2, None) 1
        slice(2, 4, None) slice(2, 5, None) 1
        slice(4, 6, None) slice(5, 6, None) 1
        """
        per_output = self.all_outputs // self.number
        first, stop = -(-outputs[0] // per_output), outputs[1] // per_output  # complete groups
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
    """Convolutions side by side, each with its input channels, its output channels and its number of groups.

    Together they compute all outputs. A single one with all channels is an ordinary convolution.
    """

    parts: tuple[tuple[slice, slice, int], ...]

    @property
    def _groups(self) -> int | None:
        """The number of groups, if there is one convolution with all channels."""
        all_channels = slice(None)
        return self.parts[0][2] if self.parts and self.parts[0][:2] == (all_channels, all_channels) else None

    def conv2d(self, x: Array, w: Array, rows: Window, columns: Window) -> Array:
        """y[b p q f], as ``arrays.images.conv2d``."""
        if self._groups:
            return conv2d(x, w, rows, columns, self._groups)
        shape = len(x), rows.outputs(x.shape[1]), columns.outputs(x.shape[2]), w.shape[3]
        y = backend_of(x).xp.empty(shape, x.dtype)
        for inputs, outputs, groups in self.parts:
            y[..., outputs] = conv2d(x[..., inputs], w[..., outputs], rows, columns, groups)
        return y

    def input_gradient(self, dy: Array, w: Array, rows: Window, columns: Window, shape: tuple[int, ...]) -> Array:
        """dx[b h w c] of this ``shape``: the sum over the parts."""
        if self._groups:
            return conv2d_input_gradient(dy, w, rows, columns, self._groups, shape[1:3])
        dx = backend_of(dy).xp.zeros(shape, dy.dtype)
        for inputs, outputs, groups in self.parts:
            part = dy[..., outputs], w[..., outputs]
            dx[..., inputs] += conv2d_input_gradient(*part, rows, columns, groups, shape[1:3])
        return dx

    def weight_gradient(self, x: Array, dy: Array, rows: Window, columns: Window) -> Array:
        """dw[k l i f]."""
        if self._groups:
            return conv2d_weight_gradient(x, dy, rows, columns, self._groups)
        parts = [
            conv2d_weight_gradient(x[..., inputs], dy[..., outputs], rows, columns, groups)
            for inputs, outputs, groups in self.parts
        ]
        return backend_of(x).xp.concatenate(parts, axis=3) if parts else 0.0
