"""Normalisation of the residual stream (layer norm, RMS norm) and of images (group norm, batch norm)."""

from __future__ import annotations

from functools import partial
from math import prod

from spmd_engine.arrays import normalization
from spmd_engine.arrays.backend import Array, at_least_one, backend_of, number_of
from spmd_engine.arrays.precision import accumulated_in, rounded, widened
from spmd_engine.errors import UsageError
from spmd_engine.layers.declarations import Activation, Buffer, Image, Parameter, Sized
from spmd_engine.layers.layer import Extra, Layer


class LayerNorm(Layer):
    """y[b s d] = (x - mean(x)) / sqrt(var(x) + epsilon) · scale[d] + shift[d], mean and var over d

    Needs no communication: the stream may be sharded, but not d. Without ``scale`` the scale is 1, without ``shift``
    the shift 0.
    """

    def __init__(self, width: int, epsilon: float = 1e-5, *, scale: bool = True, shift: bool = True):
        self.sizes = {"d": width}
        self.epsilon = epsilon
        self.parameters = {}
        if scale:
            self.parameters["scale"] = Parameter("d", mean=1.0, decay=False, where="residual")
        if shift:
            self.parameters["shift"] = Parameter("d", decay=False, where="residual")

    def forward(self, sh, p, x, ctx):
        shift = p["shift"] if "shift" in self.parameters else backend_of(x).xp.zeros(x.shape[-1], x.dtype)
        y, normal, inverse = normalization.layer_norm(x, self._scale(p, x), shift, self.epsilon)
        return y, (normal, inverse)

    def _scale(self, p, like):
        return p["scale"] if "scale" in self.parameters else backend_of(like).xp.ones(like.shape[-1], like.dtype)

    def backward_input(self, sh, p, saved, dy):
        normal, inverse = saved
        return normalization.layer_norm_backward(dy, normal, inverse, self._scale(p, dy)), (dy, normal)

    def backward_weight(self, sh, rest, g):
        if self.parameters:
            for name, gradient in zip(
                ("scale", "shift"), normalization.layer_norm_backward_parameters(*rest), strict=True
            ):
                if name in self.parameters:
                    g.add(name, gradient)


class RMSNorm(Layer):
    """y[b s d] = x / sqrt(mean(x²) + epsilon) · scale[d], the mean over d

    Needs no communication: the stream may be sharded, but not d.
    """

    def __init__(self, width: int, epsilon: float = 1e-6):
        self.sizes = {"d": width}
        self.epsilon = epsilon
        self.parameters = {"scale": Parameter("d", mean=1.0, decay=False, where="residual")}

    def forward(self, sh, p, x, ctx):
        y, normal, inverse = normalization.rms_norm(x, p["scale"], self.epsilon)
        return y, (normal, inverse)

    def backward_input(self, sh, p, saved, dy):
        normal, inverse = saved
        return normalization.rms_norm_backward(dy, normal, inverse, p["scale"]), (dy, normal)

    def backward_weight(self, sh, rest, g):
        g.add("scale", normalization.rms_norm_backward_scale(*rest))


# --- Group normalisation: within each image, and each group of its channels


class GroupNorm(Layer):
    """y[b h w c] = (x - mean[b g]) / sqrt(variance[b g] + epsilon) · scale[c] + shift[c], g being the group of c

    Mean and variance are over h, w and the channels of a group, for each image. If h, w or the channels of a group are
    sharded, sums are reduced over these ranks: twice forward, for the mean and for the squares about it, and once
    backward. Samples are independent. After Wu and He, "Group normalization" (2018).

    ``channels`` are a letter and their number, ``groups`` (of as many consecutive channels each) divide it, ``image``
    is the global height and width, ``letters`` those of batch, rows and columns. Raises UsageError for other groups.
    """

    def __init__(
        self,
        channels: Sized,
        groups: int,
        image: Image,
        *,
        letters: str = "bhw",
        epsilon: float = 1e-5,
    ) -> None:
        c, number = channels
        if number % groups:
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

    def _mean(self, sh, x, members):
        """The means of x[b h w c] over each group, [b g], replicated."""
        return sh.all_reduce(x.sum((1, 2)) @ members, over=self.over) / self.terms

    def forward(self, sh, p, x, ctx):
        xp, (channel, number), dtype, x = backend_of(x).xp, *self.sizes.items(), x.dtype, widened(x)
        span = sh.span(channel, number)
        group = xp.arange(span.start, span.stop) * self.groups // number  # of each channel of this rank
        members = (group[:, None] == xp.arange(self.groups)).astype(x.dtype)  # [c g]: 1 for a channel in a group
        normal = x - (self._mean(sh, x, members) @ members.T)[:, None, None]
        variance = self._mean(sh, normal * normal, members)
        inverse = ((1 / xp.sqrt(variance + self.epsilon)) @ members.T)[:, None, None]
        normal *= inverse
        return rounded(normal * p["scale"] + p["shift"], dtype), (rounded(normal, dtype), inverse, members)

    def backward_input(self, sh, p, saved, dy):
        normal, inverse, members = saved
        xp, saved_dy, dy, normal = backend_of(dy).xp, dy, widened(dy), widened(normal)
        scaled = dy * widened(p["scale"])
        sums = xp.stack([scaled.sum((1, 2)) @ members, (scaled * normal).sum((1, 2)) @ members])
        means = (sh.all_reduce(sums, over=self.over) / self.terms) @ members.T
        dx = scaled - means[0][:, None, None]
        dx -= normal * means[1][:, None, None]
        dx *= inverse
        return rounded(dx, saved_dy.dtype), (saved[0], saved_dy)

    def backward_weight(self, sh, rest, g):
        normal, dy = map(widened, rest)
        g.add("shift", dy.sum((0, 1, 2)))
        g.add("scale", (dy * normal).sum((0, 1, 2)))


# --- Batch normalisation over the global micro-batch


class BatchNorm(Layer):
    """y[b h w c] = (x - mean[c]) / sqrt(variance[c] + epsilon) · scale[c] + shift[c]

    Mean and variance are over b, h and w of the global micro-batch, with n elements per channel:

    Forward
        1. mean[c] = AllReduce_BHW(sum of x) / AllReduce_BHW(count)             one reduction
        2. variance[c] = AllReduce_BHW(sum of (x - mean)²) / n                  about the global mean
    Backward, with x̂ = (x - mean) / sqrt(variance + epsilon)
        3. dscale[c] {U_BHW} = sum of dy · x̂,   dshift[c] {U_BHW} = sum of dy
        4. dx = scale / sqrt(variance + epsilon) · (dy - AllReduce_BHW(dshift) / n - x̂ · AllReduce_BHW(dscale) / n)

    Channels may be sharded over other axes: each rank normalises its own. The running mean and variance are buffers:
    each micro-batch updates them to (1 - ``momentum``) · old + ``momentum`` · new, the variance with n - 1 in place of
    n; evaluation uses them as mean and variance. After Ioffe and Szegedy, "Batch normalization" (2015); momentum and
    variances are as in PyTorch.

    ``channels`` are a letter and their number, ``letters`` those of batch, rows and columns.
    """

    def __init__(
        self,
        channels: Sized,
        *,
        letters: str = "bhw",
        momentum: float = 0.1,
        epsilon: float = 1e-5,
        scale: float = 1.0,
    ) -> None:
        c, self.over, self.epsilon = channels[0], letters, epsilon
        self.sizes = dict([channels])
        self.inputs = self.outputs = Activation(" ".join(letters + c), where="inside")
        self.may_cut = letters + c
        self.parameters = {
            "scale": Parameter(c, mean=scale, decay=False, summed=letters),
            "shift": Parameter(c, decay=False, summed=letters),
        }
        running = partial(_running, momentum)
        self.buffers = {"mean": Buffer(c, running), "variance": Buffer(c, running, initial=1.0)}

    def forward(self, sh, p, x, ctx):
        xp = backend_of(x).xp
        if not ctx.training:
            inverse = 1 / xp.sqrt(p["variance"] + self.epsilon)
            return normalization.scale_channels(x, p["mean"], inverse * p["scale"], p["shift"]), None
        channels = x.shape[3]
        sums = xp.empty(channels + 1, accumulated_in(x.dtype))
        sums[:channels] = normalization.channel_sums(x)
        sums[channels] = prod(x.shape[:3])
        sums = sh.all_reduce(sums, over=self.over)
        count = at_least_one(number_of(sums[channels]))
        mean = sums[:channels] / count
        squares = sh.all_reduce(normalization.channel_squares(x, mean), over=self.over)
        inverse = 1 / xp.sqrt(squares / count + self.epsilon)
        y = normalization.scale_channels(x, mean, inverse * p["scale"], p["shift"])
        extra = Extra({"mean": mean, "variance": squares / at_least_one(count - 1)})
        return y, (x, mean, inverse, count), extra

    def backward_input(self, sh, p, saved, dy):
        x, mean, inverse, count = saved
        sums = backend_of(dy).xp.stack(normalization.channel_gradients(dy, x, mean, inverse))
        means = sh.all_reduce(sums.copy(), over=self.over) / count
        dx = normalization.normalized_gradient(dy, x, mean, inverse, p["scale"], means[0], means[1])
        return dx, sums

    def backward_weight(self, sh, rest, g):
        g.add("scale", rest[0])
        g.add("shift", rest[1])


def _running(momentum: float, old: Array, new: Array) -> Array:
    return (1 - momentum) * old + momentum * new
