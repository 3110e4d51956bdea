"""Where a model changes from one cut to another: image rows for samples, or for copies; and parts for the whole."""

from __future__ import annotations

from spmd_engine.layers.declarations import Activation
from spmd_engine.layers.layer import Layer


class Reshard(Layer):
    """y = x[b h w c] with other letters, such as [n y x c], which other mesh axes may cut

    With h and w cut over the mesh axes H and W:

    y, x whole, and n cut over those of b, then H and W    samples go round: each rank sends its rows of most samples,
                                                           and receives all rows of some
    y, x whole, and n cut as b                             rows are gathered: every rank along H and W has all samples

    An element that a rank has already stays where it is. The backward goes the same ways back; of copies, which have
    equal gradients, each rank takes its own part. ``image`` is the whole height and width.
    """

    def __init__(self, image: tuple[int, int], before: str = "bhwc", after: str = "nyxc") -> None:
        self.image = image
        self.inputs, self.outputs = (Activation(" ".join(each), where="inside") for each in (before, after))
        self.may_cut = "".join(dict.fromkeys(before + after))

    def forward(self, sh, p, x, ctx):
        shape = len(x), *self.image, x.shape[3]
        return sh.reshard(x, self.inputs.dims, self.outputs.dims, shape), shape

    def backward_input(self, sh, p, shape, dy):
        return sh.reshard(dy, self.outputs.dims, self.inputs.dims, shape), None


class Gather(Layer):
    """y[b k] = x[n k], or any letters: with all that the ranks have who differ along the axes that cut n and not b

    All of these ranks compute what follows alike; in the backward, each takes its part of dy. This restores the samples
    that a Reshard split (n k -> b k), and all channels where each rank computed some (b h w f -> b h w c).
    """

    def __init__(self, before: str, after: str) -> None:
        self.inputs, self.outputs = (Activation(" ".join(each), where="inside") for each in (before, after))
        self.may_cut = "".join(dict.fromkeys(before + after))

    def forward(self, sh, p, x, ctx):
        return sh.gather_further(x, self.inputs.dims, self.outputs.dims), None

    def backward_input(self, sh, p, saved, dy):
        return sh.cut_further(dy, self.outputs.dims, self.inputs.dims), None
