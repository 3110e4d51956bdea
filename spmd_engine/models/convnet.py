"""Convolutional networks: a small one, and residual networks after He et al. (2016). Images[b h w c] to scores[b k].

Letters that may be sharded: samples b, rows h, columns w, and channels f. Channels c between blocks and classes k are
not sharded. ``reshard_after`` makes a network a hybrid: after that number of blocks its samples, now n, are sharded
over the ranks that sharded rows and columns before, and each rank has whole images (letters y and x), which are small
at that depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import spmd_engine.layers as layers
from spmd_engine.axes import all_positions, axes_text
from spmd_engine.errors import UsageError
from spmd_engine.layers import Layer
from spmd_engine.models.model import Model, class_accuracy, class_loss
from spmd_engine.requirements import Case, effect_along, requirement

if TYPE_CHECKING:
    from spmd_engine.layers.images import ImageWindows


@dataclass(frozen=True)
class ImageShape:
    """The size of all images of a data set, and the number of classes."""

    height: int = 8
    width: int = 8
    channels: int = 1
    classes: int = 10

    def __str__(self) -> str:
        return f"images of {self.height} x {self.width} x {self.channels} in {self.classes} classes"


Named = tuple[str, Layer]


def convnet(
    shape: ImageShape = ImageShape(),  # noqa: B008 (immutable)
    name: str = "convnet",
    *,
    channels: Sequence[int] = (32, 32, 64, 64),
    reshard_after: int | None = None,
) -> Model:
    """Blocks of a 3 x 3 convolution, batch norm and ReLU; 2 x 2 max pooling after each pair; the mean; a dense head.

    Channels alternate: c -> f -> c. Raises UsageError for an odd number of blocks and images smaller than 2 x 2.
    """
    if len(channels) % 2:
        raise UsageError(f"{name}: {len(channels)} blocks; they come in pairs")
    net = _Network(shape, name, reshard_after)
    for number, width in enumerate(channels):
        net.begin_block(number)
        into, out = "cf" if number % 2 == 0 else "fc"
        net.add(f"block{number}/conv", net.conv(into, out, width, 3, padding=1))
        net.add(f"block{number}/norm", net.norm(out, width))
        net.add(f"block{number}/relu", layers.ReLU(net.letters + out))
        if number % 2 and number + 1 < len(channels) and min(net.image) > 1:
            net.add(f"block{number}/pool", net.pool(2, out))
    return net.finish(len(channels))


def resnet(
    shape: ImageShape,
    name: str,
    *,
    blocks: Sequence[int],
    width: int = 64,
    bottleneck: bool = False,
    large: bool = True,
    reshard_after: int | None = None,
) -> Model:
    """Stages of ``blocks`` residual blocks each; each stage doubles the channels and halves the size.

    Basic blocks have two convolutions, c -> f -> c; bottlenecks have three, c -> f -> f -> c, with four times the
    channels at the ends. For ``large`` images the stem is a 7 x 7 convolution and 3 x 3 max pooling, both at stride 2;
    for others a 3 x 3 convolution. The stem and the shortcuts' projections output channels f, which are then gathered.
    """
    net = _Network(shape, name, reshard_after)
    kernel, stride = (7, 2) if large else (3, 1)
    net.add("stem/conv", net.conv("c", "f", width, kernel, stride=stride, padding=kernel // 2))
    net.add("stem/norm", net.norm("f", width))
    net.add("stem/relu", layers.ReLU(net.letters + "f"))
    if large:
        net.add("stem/pool", net.pool(3, "f", stride=2, padding=1))
    net.add("stem/gather", net.gather())
    number = 0
    for stage, count in enumerate(blocks):
        for k in range(count):
            net.begin_block(number)
            stride = 2 if stage and k == 0 else 1
            net.add(f"block{number}/residual", _residual_block(net, width << stage, stride, bottleneck))
            number += 1
    return net.finish(number)


def _residual_block(net: _Network, width: int, stride: int, bottleneck: bool) -> layers.ResidualBlock:
    image, channels = net.image, net.channels
    out = 4 * width if bottleneck else width
    if bottleneck:
        steps = [("c", "f", width, 1, 1), ("f", "f", width, 3, stride), ("f", "c", out, 1, 1)]
    else:
        steps = [("c", "f", width, 3, stride), ("f", "c", width, 3, 1)]
    branch: list[Named] = []
    for i, (into, to, number, kernel, by) in enumerate(steps):
        branch.append((f"conv{i}", net.conv(into, to, number, kernel, stride=by, padding=kernel // 2, reduced=i > 0)))
        branch.append((f"norm{i}", net.norm(to, number)))
        if i + 1 < len(steps):
            branch.append((f"relu{i}", layers.ReLU(net.letters + to)))
    shortcut = None
    if stride > 1 or channels != out:
        net.image, net.channels = image, channels
        projection = net.conv("c", "f", out, 1, stride=stride, reduced=False)
        shortcut = layers.Chain(("conv", projection), ("norm", net.norm("f", out)), ("gather", net.gather()))
    return layers.ResidualBlock(layers.Chain(*branch), shortcut, over="f")


class _Network:
    """A network during its construction: its layers so far, and the size of their output."""

    def __init__(self, shape: ImageShape, name: str, reshard_after: int | None) -> None:
        self.shape, self.name, self.reshard_after = shape, name, reshard_after
        self.image, self.channels, self.letters = (shape.height, shape.width), shape.channels, "bhw"
        self.layers: list[Named] = []

    def add(self, name: str, layer: Layer) -> None:
        self.layers.append((name, layer))

    def conv(self, into: str, out: str, channels: int, kernel: int, *, stride: int = 1, **options) -> layers.Conv2d:
        """Return a convolution of the last output, without a bias, since a batch norm follows."""
        layer = layers.Conv2d(
            (into, self.channels),
            (out, channels),
            self.image,
            kernel,
            stride=stride,
            bias=False,
            letters=self.letters,
            input_gradient=bool(self.layers),
            **options,
        )
        self.image, self.channels = layer.windows.outputs, channels
        return layer

    def norm(self, letter: str, channels: int) -> layers.BatchNorm:
        return layers.BatchNorm((letter, channels), letters=self.letters)

    def gather(self) -> layers.Gather:
        """Return a layer that gathers the channels of the last output, of which a rank may have computed a part."""
        return layers.Gather(self.letters + "f", self.letters + "c")

    def pool(self, kernel: int, letter: str, *, stride: int | None = None, padding: int = 0) -> layers.MaxPool:
        layer = layers.MaxPool(self.image, kernel, stride=stride, padding=padding, letters=self.letters + letter)
        self.image = layer.windows.outputs
        return layer

    def begin_block(self, number: int) -> None:
        """Add a change of the sharding if it belongs before this block."""
        if number == self.reshard_after:
            channel = self.layers[-1][1].outputs.dims[-1] if self.layers else "c"
            self.add("recut", layers.Reshard(self.image, self.letters + channel, "nyx" + channel))
            self.letters = "nyx"

    def finish(self, blocks: int) -> Model:
        """Return the model with its head. Raises UsageError unless ``reshard_after`` is from 1 to ``blocks`` - 1."""
        after, shape = self.reshard_after, self.shape
        if after is not None and not 0 < after < blocks:
            raise UsageError(
                f"{self.name}: --reshard-after {after}: the model has {blocks} blocks; choose 1 to {blocks - 1}"
            )
        batch = self.letters[0]
        self.add("mean", layers.GlobalPool(self.image, self.letters + "c"))
        self.add("head", layers.Linear(("f", self.channels), ("k", shape.classes), slice_input=True, batch=batch))
        if batch != "b":
            self.add("gather", layers.Gather("nk", "bk"))
        return Model(
            self.name,
            tuple(self.layers),
            "b h w c",
            "b k",
            "b",
            class_loss("k", shape.classes),
            sample=(shape.height, shape.width, shape.channels),
            metrics={"accuracy": class_accuracy("k", shape.classes)},
        )


# --- What options for images need


@requirement("mesh", "shares", of_model=True)
def _size_of_halos(case: Case) -> str | None:
    """shards of images that are larger than the halos of a forward"""
    from spmd_engine.sharding.halos import Reach

    model, axes, shares = case.model, case.axes, case.options.work_shares
    sharded = {axis: axes[axis] for axis in ("rows", "columns") if axes.get(axis, 1) > 1}
    if not sharded:
        return None
    windows = [w for _, layer in model.layers for w in _windows(layer) if (w.y, w.x) == ("h", "w")]
    halos = owned = 0
    for place in all_positions(sharded):
        for w in windows:
            sides = (w.image[0], w.rows, "rows"), (w.image[1], w.columns, "columns")
            reaches = [
                Reach.of(n, window, (axis,) if axis in sharded else (), place, shares) for n, window, axis in sides
            ]
            shard = prod(reach.own[1] - reach.own[0] for reach in reaches)
            needed = prod(reach.needed[1] - reach.needed[0] for reach in reaches)
            local = prod(max(0, min(r.needed[1], r.own[1]) - max(r.needed[0], r.own[0])) for r in reaches)
            halos, owned = halos + needed - local, owned + shard
    if halos <= owned:
        return None
    mesh = axes_text(sharded)
    return (
        f"--mesh {mesh} shards the images of {model.name} so thin that ranks fetch more than they have: "
        f"{halos / owned:.1f} times as much in halos; take fewer ranks there, and more on data"
    )


REQUIREMENTS = (effect_along("reshard_after", "rows", "columns"), _size_of_halos)


def _windows(layer: Layer) -> Iterator[ImageWindows]:
    """Yield the windows of a layer and of the layers in it."""
    parts: dict[str, Layer] = {}
    if isinstance(layer, layers.Chain):
        parts = dict(layer.layers)
    elif isinstance(layer, layers.ResidualBlock):
        parts = dict(layer.paths)
    for part in parts.values():
        yield from _windows(part)
    if isinstance(layer, (layers.Conv2d, layers.MaxPool, layers.AveragePool)):
        yield layer.windows
