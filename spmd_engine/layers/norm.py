"""Normalisation of the residual stream: by mean and variance, or by the mean square alone."""

from spmd_engine.arrays.backend import backend_of
from spmd_engine.arrays.normalization import (
    layer_norm,
    layer_norm_backward,
    layer_norm_backward_parameters,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_scale,
)
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.layer import Layer


class LayerNorm(Layer):
    """y[b s d] = (x - mean(x)) / sqrt(var(x) + epsilon) · scale[d] + shift[d], mean and var over d

    Works on whichever part of the stream this rank has, without communication; d must be whole. Without ``scale`` it is
    1, without ``shift`` 0.
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
        y, normal, inverse = layer_norm(x, self._scale(p, x), shift, self.epsilon)
        return y, (normal, inverse)

    def _scale(self, p, like):
        return p["scale"] if "scale" in self.parameters else backend_of(like).xp.ones(like.shape[-1], like.dtype)

    def backward_input(self, sh, p, saved, dy):
        normal, inverse = saved
        return layer_norm_backward(dy, normal, inverse, self._scale(p, dy)), (dy, normal)

    def backward_weight(self, sh, rest, g):
        if self.parameters:
            for name, gradient in zip(("scale", "shift"), layer_norm_backward_parameters(*rest), strict=True):
                if name in self.parameters:
                    g.add(name, gradient)


class RMSNorm(Layer):
    """y[b s d] = x / sqrt(mean(x²) + epsilon) · scale[d], the mean over d

    Works on whichever part of the stream this rank has, without communication; d must be whole.
    """

    def __init__(self, width: int, epsilon: float = 1e-6):
        self.sizes = {"d": width}
        self.epsilon = epsilon
        self.parameters = {"scale": Parameter("d", mean=1.0, decay=False, where="residual")}

    def forward(self, sh, p, x, ctx):
        y, normal, inverse = rms_norm(x, p["scale"], self.epsilon)
        return y, (normal, inverse)

    def backward_input(self, sh, p, saved, dy):
        normal, inverse = saved
        return rms_norm_backward(dy, normal, inverse, p["scale"]), (dy, normal)

    def backward_weight(self, sh, rest, g):
        g.add("scale", rms_norm_backward_scale(*rest))
