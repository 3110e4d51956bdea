"""A 2-D mesh of weights: each rank has a rectangle of every weight, and a part of every activation."""

from spmd_engine.arrays import einsum
from spmd_engine.strategies.two_layers import TwoLayers, relu


class TwoDimensional(TwoLayers):
    """d is split over ``row``, f over ``col``. Sums over d are unreduced, {U_row}, and sums over f, {U_col}.

    Forward
        1. z[b f/col] {U_row} = x[b d/row] · w0[d/row f/col],        z[b f/col] = AllReduce_row(...)
        2. y[b d/row] {U_col} = relu(z[b f/col]) · w1[f/col d/row],  y[b d/row] = AllReduce_col(...)
    Backward
        3. dh[b f/col] {U_row} = dy[b d/row] · w1[f/col d/row],      begin dh[b f/col] = AllReduce_row(...)
        4. dw1[f/col d/row] = relu(z[b f/col]) · dy[b d/row]
        5. dz[b f/col] = dh[b f/col] where z > 0
        6. dx[b d/row] {U_col} = dz[b f/col] · w0[d/row f/col],      begin dx[b d/row] = AllReduce_col(...)
        7. dw0[d/row f/col] = x[b d/row] · dz[b f/col]

    Cost for each rank, with R rows and C columns, in numbers, with P = 2 d f parameters
        sent    4 b (f/C) (R-1)/R + 4 b (d/R) (C-1)/C a micro-batch: less with more ranks, while one axis
                would stay at 4 b d
        held    P/(R C) parameters, P/(R C) gradients, P/(R C) of each kind of optimizer state
        saved   b d / R + b f / C

    After Pope et al., "Efficiently scaling transformer inference" (2022), section 3.2.2.
    """

    axes = ("row", "col")
    shardings = {"layer_0/weights": "d/row f/col", "layer_1/weights": "f/col d/row"}
    input_sharding = output_sharding = "b d/row"

    def forward(self, x):
        z = self.all_reduce(einsum("bd,df->bf", x, self.w0), over="row", label="z")  # before relu, which is not linear
        self.tape.push(x, z)
        return self.all_reduce(einsum("bf,fd->bd", relu(z), self.w1), over="col", label="y")

    def backward(self, grads):
        x, z = self.tape.pop()
        summing_dh = self.start_all_reduce(einsum("bd,fd->bf", grads, self.w1), over="row", label="dh")
        dw1 = einsum("bf,bd->fd", relu(z), grads)
        dz = summing_dh.wait() * (z > 0)
        summing_dx = self.start_all_reduce(einsum("bf,df->bd", dz, self.w0), over="col", label="dx")
        dw0 = einsum("bd,bf->df", x, dz)
        self.input_gradient = summing_dx.wait()
        return {"layer_0/weights": dw0, "layer_1/weights": dw1}
