"""Hybrid CNN: the early layer splits rows, the late layer splits samples, and a transfer reshards between them."""

from spmd_engine.strategies.spatial import Spatial
from spmd_engine.strategies.two_convolutions import conv, conv_input, conv_weight
from spmd_engine.strategies.two_layers import relu


class HybridCNN(Spatial):
    """``rows`` splits h in the first convolution, as in ``Spatial``, and b in the second one.

    Early feature maps are large, so halos are a small part; late maps are small: each rank has complete maps of its
    samples and needs no halo. Reshard is a transfer: elements of a rank's rows and samples stay on the rank.

    Write * for a convolution, i and j for the rows and columns of its window, B for b/rows, H for h/rows, H' for H with
    the row before and the row after.

    Forward
        1. x[b H' w c] = Halo(x[b H w c])
        2. r[b H w f] = relu(x[b H' w c] * w0[i j c f])
        3. r[B h w f] = Reshard(r[b H w f])
        4. y[B h w c] = r[B h w f] * w1[i j f c],                    y[b H w c] = Reshard(y[B h w c])
    Backward
        5. dy[B h w c] = Reshard(dy[b H w c])
        6. dr[B h w f] = the input gradient of dy[B h w c] * w1,     begin dr[b H w f] = Reshard(...)
        7. dw1[i j f c] {U_rows} = r[B h w f] · dy[B h w c],         begin dw1[i j f c] = AllReduce_rows(...)
        8. dz[b H w f] = dr[b H w f] where r > 0
        9. dx[b H' w c] = the input gradient of dz * w0,             begin dx[b H w c] = AddHalo(...)
       10. dw0[i j c f] {U_rows} = x[b H' w c] · dz[b H w f],        dw0[i j c f] = AllReduce_rows(...)

    Neither b nor h need be a multiple of n.

    Cost for each of n ranks, n <= h, in numbers, with P = 18 c f parameters
        sent    2 b w c a micro-batch to each neighbour, 2 b h w (c + f) (n-1)/n^2 to all if n divides b and h,
                and 2 P (n-1)/n
        held    P parameters, P gradients, P of each kind of optimizer state
        saved   b (h/n + 2) w c, at the image's ends a row less, and 2 b h w f / n

    After Dryden et al. (2019), where a performance model shards each layer; Jia et al., "Exploring hidden
    dimensions in parallelizing convolutional neural networks" (2018).
    """

    ROWS, SAMPLES = "b h/rows w c", "b/rows h w c"

    def forward(self, x):
        wide_x = self.transfer(self.halo(x), x)
        r = relu(conv(wide_x, self.w0, self.window))
        samples_r = self.transfer(self.recut(r), r)
        self.tape.push(wide_x, r, samples_r)
        y = conv(samples_r, self.w1)
        return self.transfer(self.recut(x, back=True), y)

    def backward(self, grads):
        wide_x, r, samples_r = self.tape.pop()
        rows, height = self.window, wide_x.shape[1]
        dy = self.transfer(self.recut(grads), grads)
        resharding_dr = self.start_transfer(self.recut(r, back=True), conv_input(dy, self.w1, dy.shape[1]))
        summing_dw1 = self.start_all_reduce(conv_weight(samples_r, dy), over="rows", label="dw1")
        dz = resharding_dr.wait()["x"][0] * (r > 0)
        adding_dx = self.start_transfer(self.halo(wide_x).adjoint(), conv_input(dz, self.w0, height, rows))
        dw0 = self.all_reduce(conv_weight(wide_x, dz, rows), over="rows", label="dw0")
        self.input_gradient = adding_dx.wait()["x"][0]
        return {"conv_0/weights": dw0, "conv_1/weights": summing_dw1.wait()}

    def recut(self, like, back=False):
        """The transfer between rows and samples of an array with the shape of ``like``, apart from h and w."""
        return self.plan(like, *((self.SAMPLES, self.ROWS) if back else (self.ROWS, self.SAMPLES)))
