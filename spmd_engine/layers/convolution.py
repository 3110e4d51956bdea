"""A convolution of images whose rows, columns and channels may be cut."""

from __future__ import annotations

from math import prod, sqrt

from spmd_engine.arrays.backend import backend_of
from spmd_engine.errors import UsageError
from spmd_engine.layers.channel_groups import ChannelGroups, PartsOfGroups
from spmd_engine.layers.declarations import Activation, Parameter
from spmd_engine.layers.image_windows import ImageWindows, Padding, Pair
from spmd_engine.layers.later import then, wait_for
from spmd_engine.layers.layer import Layer

#: Multiplications from which on the inner outputs are computed while the halo travels: with fewer, computing outputs
#: in five parts costs more than waiting.
OVERLAP_FROM = 20_000_000


class Conv2d(Layer):
    """y[b h w o] = sum over taps k, l and inputs i of x[b h' w' i] · weights[k l i o] (+ bias[o])

    where h', w' is what output h, w reads by tap k, l of its window; beyond the image there are zeros. With rows and
    columns cut over the mesh axes H and W, and channels i over R and o over C:

    Forward
        1. x[b h'/H w'/W i/R] = Halo_HW(x[b h/H w/W i/R])              what outputs read; inner ones meanwhile
        2. y[b h/H w/W o/C] {U_R} = sum of x · weights[k l i/R o/C],   y = AllReduce_R(...), then + bias[o/C]
    Backward
        3. dx[b h'/H w'/W i/R] {U_C} = sum over k, l, o of dy[b h/H w/W o/C] · weights[k l i/R o/C]
        4. dx[b h/H w/W i/R] = AllReduce_C(AddHalo_HW(dx))             travels while dweights is made
        5. dweights[k l i/R o/C] = sum over b, h, w of x · dy          left unreduced over what cuts b, h and w

    ``inputs`` and ``outputs`` are a letter and the number of channels each. Different letters, c -> f -> c -> ...: with
    f cut over a mesh axis, convolutions split their output channels and their input channels in turn, as the two
    products of an MLP do. One letter, f -> f: each rank makes its part of the outputs and needs all inputs that these
    read. In ``groups``, those are the channels of its outputs' groups (the i of ``weights`` counts within a group);
    in a depthwise convolution they are its own. In one group they are all channels: step 1 gathers them with the halo,
    and step 4 reduces and scatters. Any number of channels and groups may be cut over any number of ranks.

    ``image`` is the whole height and width. ``kernel``, ``stride``, ``dilation``: a number, or one for rows and one
    for columns; ``padding``: see ``Padding``. ``letters`` are those of batch, rows and columns. ``std`` is the initial
    weights' deviation, by default sqrt(2 / (k l i)) (He et al., 2015). With ``input_gradient=False`` steps 3 and 4
    are left out: for a first layer, of which the inputs are data. With ``reduced=False`` dx is left unreduced over o in
    step 4, for somebody to add it to others and to reduce them at once. Raises UsageError for groups that do not divide
    the channels, or have different letters, and for windows that do not fit.

    After Dryden et al., "Improving strong-scaling of CNN training by exploiting finer-grained parallelism" (2019),
    whose halos these are, here for any window over any blocks.
    """

    def __init__(
        self,
        inputs: tuple[str, int],
        outputs: tuple[str, int],
        image: tuple[int, int],
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
        if groups < 1 or inputs[1] % groups or outputs[1] % groups:
            raise UsageError(f"Conv2d from {inputs[1]} to {outputs[1]} channels: {groups} groups do not divide them")
        batch, y, x = self.letters = letters
        self.windows = ImageWindows.of(
            image, kernel, stride=stride, dilation=dilation, padding=padding, letters=y + x
        )
        self.groups = ChannelGroups(inputs[1], outputs[1], groups)
        self.input_gradient, self.reduced = input_gradient, reduced
        self.inputs, self.outputs = (Activation(f"{batch} {y} {x} {each}", where="inside") for each in (i, o))
        self.may_cut = letters + "".join(dict.fromkeys(i + o))
        each = i if i != o else "j"
        taps = self.windows.rows.size, self.windows.columns.size
        self.sizes = {"k": taps[0], "l": taps[1], each: inputs[1] // groups, o: outputs[1]}
        if std is None:
            std = sqrt(2 / (prod(taps) * inputs[1] // groups))
        self.parameters = {"weights": Parameter(f"k l {each} {o}", std=std, summed=letters)}
        if bias:
            self.parameters["bias"] = Parameter(o, decay=False, summed=letters)

    def cost(self, length):
        return super().cost(length) * prod(self.windows.outputs)

    def _reads(self):
        i, o = self.channels
        return {**self.windows.reads, **({i: (self.groups.inputs, self.groups)} if i == o else {})}

    def _parts(self, sh):
        """How the convolution of this rank's channels is made: see ``ChannelGroups``."""
        i, o = self.channels
        if i != o or not sh.is_cut(i):
            return PartsOfGroups(((slice(None), slice(None), self.groups.number),))
        reach = sh.reach(i, self.groups.inputs, self.groups)
        return PartsOfGroups(tuple(self.groups.parts(reach.outputs, reach.needed)))

    def forward(self, sh, p, x, ctx):
        i, o = self.channels
        here, parts, w = self.windows.here(sh), self._parts(sh), p["weights"]
        wide = sh.start_with_halo(x, self.inputs.dims, self._reads())
        if wide is not x and i != o and self._is_much(x, w):
            y = backend_of(x).xp.empty((len(x), *here.output_lengths, w.shape[3]), x.dtype)
            y[here.at(here.inner)] = parts.conv2d(x, w, *here.of(here.inner, here.own))
            wide = wide.wait()
            for outputs in here.around():
                y[here.at(outputs)] = parts.conv2d(wide, w, *here.of(outputs, here.needed))
        else:
            wide = wait_for(wide)
            y = parts.conv2d(wide, w, *here.local)
        if i != o:
            y = sh.all_reduce(y, over=i)
        if "bias" in p:
            y += p["bias"]
        return y, wide

    def _is_much(self, x, w):
        """Whether so much is computed of these inputs that a halo can travel meanwhile."""
        return x.size // max(1, x.shape[3]) * w.size >= OVERLAP_FROM

    def backward_input(self, sh, p, wide, dy):
        i, o = self.channels
        if not self.input_gradient:
            return None, (wide, dy)
        here, w = self.windows.here(sh), p["weights"]
        dx = self._parts(sh).input_gradient(dy, w, *here.local, wide.shape)
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
