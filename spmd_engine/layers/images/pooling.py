"""Pooling of images whose rows, columns and channels may be cut: maxima, averages, and the average of all."""

from __future__ import annotations

from spmd_engine.arrays.backend import backend_of
from spmd_engine.arrays.images.pooling import average_pool, average_pool_gradient, max_pool, max_pool_gradient
from spmd_engine.layers.declarations import Activation
from spmd_engine.layers.images.windows import ImageWindows, Padding, Pair
from spmd_engine.layers.layer import Layer


class _Pool(Layer):
    """A layer without parameters that makes of each channel, and each window of it, a number.

    Inputs and outputs are [b h w c], with the ``letters`` of batch, rows, columns and channels that its caller has.
    ``image`` is the whole height and width; ``stride`` is the ``kernel`` if not given; ``padding``: see ``Padding``.
    """

    def __init__(
        self,
        image: tuple[int, int],
        kernel: Pair,
        *,
        stride: Pair | None = None,
        dilation: Pair = 1,
        padding: Padding = 0,
        letters: str = "bhwc",
    ) -> None:
        self.windows = ImageWindows.of(
            image,
            kernel,
            stride=kernel if stride is None else stride,
            dilation=dilation,
            padding=padding,
            letters=letters[1:3],
        )
        self.inputs = self.outputs = Activation(" ".join(letters), where="inside")
        self.may_cut = letters


class MaxPool(_Pool):
    """y[b h w c] = the greatest x of the window; of equals the first, row by row, also where ranks have parts of it

    Each window is seen whole by the rank whose output it makes, so that no tie is decided by who has what. Beyond the
    image there is nothing.
    """

    def forward(self, sh, p, x, ctx):
        wide = sh.with_halo(x, self.inputs.dims, self.windows.reads)
        return max_pool(wide, *self.windows.here(sh).local)

    def backward_input(self, sh, p, chosen, dy):
        here = self.windows.here(sh)
        dx = max_pool_gradient(dy, chosen, *here.local, here.lengths)
        return sh.start_add_halo(dx, self.inputs.dims, self.windows.reads), None


class AveragePool(_Pool):
    """y[b h w c] = the mean of x over the window

    Beyond the image there are zeros with ``count_include_pad``, as PyTorch has it by default; else nothing, and the
    mean is of fewer, as TensorFlow has it.
    """

    def __init__(self, image: tuple[int, int], kernel: Pair, *, count_include_pad: bool, **how) -> None:
        super().__init__(image, kernel, **how)
        self.count_include_pad = count_include_pad

    def forward(self, sh, p, x, ctx):
        wide = sh.with_halo(x, self.inputs.dims, self.windows.reads)
        return average_pool(wide, *self.windows.here(sh).local, self.count_include_pad), None

    def backward_input(self, sh, p, saved, dy):
        here = self.windows.here(sh)
        dx = average_pool_gradient(dy, *here.local, self.count_include_pad, here.lengths)
        return sh.start_add_halo(dx, self.inputs.dims, self.windows.reads), None


class GlobalPool(Layer):
    """y[b c] = the mean of x[b h w c] over h and w; with these cut, each rank adds its sums to the others'

    y and its gradient are whole on every rank along the axes of h and w.
    """

    def __init__(self, image: tuple[int, int], letters: str = "bhwc") -> None:
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
