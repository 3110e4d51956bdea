"""Spatial parallel: each rank has some rows of every image, and receives neighbouring rows: a halo."""

from spmd_engine.arrays.windows import Window
from spmd_engine.sharding import ArrayPlacement, Placement, Spec, plan_transfer
from spmd_engine.strategies.two_convolutions import IMAGE, TwoConvolutions, conv, conv_input, conv_weight
from spmd_engine.strategies.two_layers import relu


class Spatial(TwoConvolutions):
    """h is split over ``rows``. A window of 3 rows reads one row on each side, which may be a neighbour's: the halo.

    Write * for a convolution, i and j for the rows and columns of its window, H for h/rows, and H' for H with the row
    before and the row after, if the image has them. Halo is the transfer from H to H'. AddHalo is its adjoint: it sends
    the gradients of these rows to their owners, which add them.

    Forward
        1. x[b H' w c] = Halo(x[b H w c])
        2. r[b H w f] = relu(x[b H' w c] * w0[i j c f])
        3. r[b H' w f] = Halo(r[b H w f])
        4. y[b H w c] = r[b H' w f] * w1[i j f c]
    Backward
        5. dr[b H' w f] = the input gradient of dy[b H w c] * w1,    begin dr[b H w f] = AddHalo(...)
        6. dw1[i j f c] {U_rows} = r[b H' w f] · dy[b H w c],        begin dw1[i j f c] = AllReduce_rows(...)
        7. dz[b H w f] = dr[b H w f] where r > 0
        8. dx[b H' w c] = the input gradient of dz * w0,             begin dx[b H w c] = AddHalo(...)
        9. dw0[i j c f] {U_rows} = x[b H' w c] · dz[b H w f],        dw0[i j c f] = AllReduce_rows(...)

    Zeros pad the image, not a rank's rows. h need not be a multiple of n; a rank may have one row or none: the nearest
    row is then on another rank.

    Cost for each of n ranks, n <= h, in numbers, with P = 18 c f parameters
        sent    2 b w (c + f) a micro-batch to each neighbour, and 2 P (n-1)/n
        held    P parameters, P gradients, P of each kind of optimizer state
        saved   b (h/n + 2) w (c + f), at the image's ends a row less

    After Dryden et al., "Improving strong-scaling of CNN training by exploiting finer-grained parallelism" (2019),
    section 3.
    """

    axes = ("rows",)
    shardings = {"conv_0/weights": "i j c f", "conv_1/weights": "i j f c"}
    input_sharding = output_sharding = "b h/rows w c"

    def forward(self, x):
        wide_x = self.transfer(self.halo(x), x)
        r = relu(conv(wide_x, self.w0, self.window))
        wide_r = self.transfer(self.halo(r), r)
        self.tape.push(wide_x, wide_r)
        return conv(wide_r, self.w1, self.window)

    def backward(self, grads):
        wide_x, wide_r = self.tape.pop()
        rows, height = self.window, wide_x.shape[1]
        adding_dr = self.start_transfer(self.halo(wide_r).adjoint(), conv_input(grads, self.w1, height, rows))
        summing_dw1 = self.start_all_reduce(conv_weight(wide_r, grads, rows), over="rows", label="dw1")
        r = wide_r[:, 1 - rows.before : height - 1 + rows.after]
        dz = adding_dr.wait()["x"][0] * (r > 0)
        adding_dx = self.start_transfer(self.halo(wide_x).adjoint(), conv_input(dz, self.w0, height, rows))
        dw0 = self.all_reduce(conv_weight(wide_x, dz, rows), over="rows", label="dw0")
        self.input_gradient = adding_dx.wait()["x"][0]
        return {"conv_0/weights": dw0, "conv_1/weights": summing_dw1.wait()}

    @property
    def window(self):
        """The window of this rank's rows over H', padded with zeros only at the image's ends."""
        mine = Spec.parse("h/rows").part(0, IMAGE[0], self.mesh)
        return Window(3, before=int(mine.start == 0), after=int(mine.stop == IMAGE[0]))

    def halo(self, x):
        """The transfer from H to H' of an array with the samples and channels of ``x``."""
        return self.plan(x, "b h/rows w c", "b h/rows w c", halos={"h": (1, 1)})

    def plan(self, x, before, after, **how):
        """The transfer from one sharding to another, planned once for each number of samples and channels."""
        shape, key = (len(x), *IMAGE, x.shape[3]), (len(x), x.shape[3], x.dtype, before, after, *how)
        plans = vars(self).setdefault("_plans", {})
        if key not in plans:
            source, target = (
                Placement({"x": ArrayPlacement.of_spec(spec, shape, x.dtype, self.mesh.peers("rows"), **options)})
                for spec, options in ((before, {}), (after, how))
            )
            plans[key] = plan_transfer(source, target, from_owners=True)
        return plans[key]

    def transfer(self, plan, x):
        return plan.execute(self.group("rows"), {"x": [x]}, label="transfer")["x"][0]

    def start_transfer(self, plan, x):
        return plan.start(self.group("rows"), {"x": [x]}, label="transfer")
