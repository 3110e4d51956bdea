"""Normalisation of the residual stream: by mean and variance, or by the mean square alone."""

from spmd_engine.arrays.normalization import layer_norm, layer_norm_backward, layer_norm_backward_parameters
from spmd_engine.arrays.root_mean_square import rms_norm, rms_norm_backward, rms_norm_backward_scale
from spmd_engine.layers.declarations import Parameter
from spmd_engine.layers.layer import Layer


class LayerNorm(Layer):
    """y[b s d] = (x - mean(x)) / sqrt(var(x) + epsilon) · scale[d] + shift[d], mean and var over d

    Works on whichever part of the stream this rank has, without communication; d must be whole.
    """

    def __init__(self, width: int, epsilon: float = 1e-5):
        self.sizes = {"d": width}
        self.epsilon = epsilon
        self.parameters = {
            "scale": Parameter("d", mean=1.0, decay=False, where="residual"),
            "shift": Parameter("d", decay=False, where="residual"),
        }

    def forward(self, sh, p, x, ctx):
        y, normal, inverse = layer_norm(x, p["scale"], p["shift"], self.epsilon)
        return y, (normal, inverse)

    def backward_input(self, sh, p, saved, dy):
        normal, inverse = saved
        return layer_norm_backward(dy, normal, inverse, p["scale"]), (dy, normal)

    def backward_weight(self, sh, rest, g):
        dscale, dshift = layer_norm_backward_parameters(*rest)
        g.add("scale", dscale)
        g.add("shift", dshift)


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
