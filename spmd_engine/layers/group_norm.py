"""Group normalisation: within each image, and each group of its channels."""

from __future__ import annotations

from spmd_engine.arrays.backend import backend_of
from spmd_engine.errors import UsageError
from spmd_engine.layers.declarations import Activation, Parameter
from spmd_engine.layers.layer import Layer


class GroupNorm(Layer):
    """y[b h w c] = (x - mean[b g]) / sqrt(variance[b g] + epsilon) · scale[c] + shift[c], g being the group of c

    Mean and variance are over h, w and the channels of a group, of one image each; with h or w cut, or channels so
    that a group lies on several ranks, sums are reduced over these: twice forward, about a mean that all share, and
    once backward. Samples need nothing of each other. After Wu and He, "Group normalization" (2018).

    ``channels`` are a letter and their number, ``groups`` (of as many consecutive channels each) divide it, ``image``
    is the whole height and width, ``letters`` those of batch, rows and columns. Raises UsageError for other groups.
    """

    def __init__(
        self,
        channels: tuple[str, int],
        groups: int,
        image: tuple[int, int],
        *,
        letters: str = "bhw",
        epsilon: float = 1e-5,
    ) -> None:
        c, number = channels
        if groups < 1 or number % groups:
            raise UsageError(f"GroupNorm: {number} channels are not {groups} groups of equal size")
        self.groups, self.epsilon = groups, epsilon
        self.terms = image[0] * image[1] * number // groups
        self.sizes = {c: number}
        self.inputs = self.outputs = Activation(" ".join(letters + c), where="inside")
        self.may_cut, self.over = letters + c, letters[1:] + c
        self.parameters = {
            "scale": Parameter(c, mean=1.0, decay=False, summed=letters),
            "shift": Parameter(c, decay=False, summed=letters),
        }

    def _membership(self, sh, like):
        """[c g]: 1 where a channel of this rank belongs to a group."""
        xp, (channel, number) = backend_of(like).xp, *self.sizes.items()
        here = sh.span(channel, number)
        group = xp.arange(here.start, here.stop) * self.groups // number
        return (group[:, None] == xp.arange(self.groups)).astype(like.dtype)

    def _mean(self, sh, x, members):
        """The means of x[b h w c] over each group, [b g], whole."""
        return sh.all_reduce(x.sum((1, 2)) @ members, over=self.over) / self.terms

    def forward(self, sh, p, x, ctx):
        members = self._membership(sh, x)
        normal = x - (self._mean(sh, x, members) @ members.T)[:, None, None]
        variance = self._mean(sh, normal * normal, members)
        inverse = ((1 / backend_of(x).xp.sqrt(variance + self.epsilon)) @ members.T)[:, None, None]
        normal *= inverse
        return normal * p["scale"] + p["shift"], (normal, inverse, members)

    def backward_input(self, sh, p, saved, dy):
        normal, inverse, members = saved
        xp, scaled = backend_of(dy).xp, dy * p["scale"]
        sums = xp.stack([scaled.sum((1, 2)) @ members, (scaled * normal).sum((1, 2)) @ members])
        means = (sh.all_reduce(sums, over=self.over) / self.terms) @ members.T
        dx = scaled - means[0][:, None, None]
        dx -= normal * means[1][:, None, None]
        dx *= inverse
        return dx, (normal, dy)

    def backward_weight(self, sh, rest, g):
        normal, dy = rest
        g.add("shift", dy.sum((0, 1, 2)))
        g.add("scale", (dy * normal).sum((0, 1, 2)))
