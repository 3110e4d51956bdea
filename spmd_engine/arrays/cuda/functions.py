"""The functions marked ``@fused`` as launches of CUDA kernels: every chain of elementwise steps is one launch.

Each has the name, signature and result of its NumPy text, where both are documented. Not here, since a library's
single call serves them: matrix products, sums and maxima of rows, and ``sum_of_squares``, a dot product. Nor are those
of images, ``@fused_of_images``, whose text is a few large matrix products and additions of slices.
"""

from types import ModuleType, SimpleNamespace

from spmd_engine.arrays.cuda.kernels import ELEMENTWISE, REDUCTIONS
from spmd_engine.arrays.factors import adamw_factors, halves, over_heads


class CudaFunctions:
    """Kernels for ``xp``, CuPy. CuPy compiles each for the dtypes and the device at hand when it is first launched."""

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        kernels = {name: xp.ElementwiseKernel(*text, name=name) for name, text in ELEMENTWISE.items()}
        kernels |= {name: xp.ReductionKernel(**text._asdict(), name=name) for name, text in REDUCTIONS.items()}
        self._launch = SimpleNamespace(**kernels)

    def takes(self, x):
        return x.dtype.char in "fd"

    # Activations

    def relu(self, z, want_slope=True):
        return self._launch.relu(z) if want_slope else (self._launch.relu_value(z), None)

    def gelu(self, z, want_slope=True):
        return self._launch.gelu(z) if want_slope else (self._launch.gelu_value(z), None)

    def silu_gate(self, z, u, want_slopes=True):
        if not want_slopes:
            return self._launch.silu_gate_value(z, u), None
        h, *slopes = self._launch.silu_gate(z, u)
        return h, tuple(slopes)

    # Rotary positions

    def rotate(self, x, turn, neighbours, *, back=False):
        y, width = self._xp.empty(x.shape, x.dtype), 2 * turn[0].shape[-1]
        pair, turned = (halves(each[..., :width], neighbours) for each in (x, y))
        self._launch.rotate(*pair, *(over_heads(each, x.ndim) for each in turn), -1 if back else 1, *turned)
        y[..., width:] = x[..., width:]
        return y

    # Norms: a row's sums in one kernel, what is done with them in another.

    def layer_norm(self, x, scale, shift, epsilon):
        rows = x.reshape(-1, x.shape[-1])
        mean, inverse = self._two(rows.shape[0], rows.dtype)
        self._launch.moments(rows, epsilon, mean, inverse, axis=1)
        y, normal = self._launch.normalize(rows, mean[:, None], inverse[:, None], scale, shift)
        return y.reshape(x.shape), normal.reshape(x.shape), inverse.reshape(x.shape[:-1])

    def layer_norm_backward(self, dy, normal, inverse, scale):
        by_rows, total, projection, share = self._sums_of_rows(dy, normal, inverse, scale)
        return self._launch.normalize_backward(*by_rows, scale, total, projection, share).reshape(dy.shape)

    def layer_norm_backward_parameters(self, dy, normal):
        width = dy.shape[-1]
        dscale, dshift = self._two(width, dy.dtype)
        self._launch.column_sums(dy.reshape(-1, width), normal.reshape(-1, width), dscale, dshift, axis=0)
        return dscale, dshift

    def rms_norm(self, x, scale, epsilon):
        rows = x.reshape(-1, x.shape[-1])
        inverse = self._xp.empty(rows.shape[0], rows.dtype)
        self._launch.root_mean_square(rows, epsilon, inverse, axis=1)
        y, normal = self._launch.scale_rows(rows, inverse[:, None], scale)
        return y.reshape(x.shape), normal.reshape(x.shape), inverse.reshape(x.shape[:-1])

    def rms_norm_backward(self, dy, normal, inverse, scale):
        by_rows, _, projection, share = self._sums_of_rows(dy, normal, inverse, scale)
        return self._launch.scale_rows_backward(*by_rows, scale, projection, share).reshape(dy.shape)

    def rms_norm_backward_scale(self, dy, normal):
        return self.layer_norm_backward_parameters(dy, normal)[0]

    def _sums_of_rows(self, dy, normal, inverse, scale):
        """dy, normal and inverse as rows; of each row the sums of g = dy · scale and of g · normal; and 1/d."""
        width = dy.shape[-1]
        rows, normal_rows, inverse_rows = dy.reshape(-1, width), normal.reshape(-1, width), inverse.reshape(-1, 1)
        total, projection = self._two(rows.shape[0], rows.dtype)
        self._launch.row_sums(rows, scale, normal_rows, total, projection, axis=1)
        share = 1.0 / width if width else 0.0
        return (rows, normal_rows, inverse_rows), total[:, None], projection[:, None], share

    def _two(self, length, dtype):
        return self._xp.empty(length, dtype), self._xp.empty(length, dtype)

    # Optimizers

    def adamw(self, p, g, mean, square, *, step, rate, betas, epsilon, decay, scale=1.0):
        factors = adamw_factors(step=step, rate=rate, betas=betas, epsilon=epsilon, decay=decay, scale=scale)
        self._launch.adamw(g, *factors, p, mean, square)

    def momentum_sgd(self, p, g, velocity, *, rate, momentum, decay, scale=1.0):
        kept = 1.0 - rate * decay
        if velocity is None:
            self._launch.sgd(g, scale * rate, kept, p)
        else:
            self._launch.momentum_sgd(g, scale, momentum, rate, kept, p, velocity)

    # Softmax

    def exponentiate(self, scores, shift, mask=None):
        if mask is None:
            self._launch.exponentiate(shift, scores)
            return
        first, hide = mask
        rows = scores.reshape(*scores.shape[:2], -1, hide.shape[1])
        shift = shift.reshape(len(rows), 1, *rows.shape[2:])
        self._launch.exponentiate(shift, rows[:, :first])
        self._launch.hide_and_exponentiate(shift, hide[:, None], rows[:, first:])

    def softmax_backward(self, ds, p, projection):
        self._launch.softmax_backward(p, projection, ds)

    def scores_of_targets(self, scores, targets, top):
        return self._launch.scores_of_targets(scores, top, targets, scores.shape[1])

    def cross_entropy_gradient(self, p, sums, weights, targets):
        rows = sums[:, None], weights[:, None], targets[:, None]
        self._launch.cross_entropy_gradient(*rows, p.shape[1], p)
