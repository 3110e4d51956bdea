"""Expert parallel: each rank has some of the experts, and sends each sample to the expert that it chooses."""

from typing import Any

import numpy as np

from spmd_engine.arrays import backend_of, einsum
from spmd_engine.arrays.scatter import count_each
from spmd_engine.comm import Mesh
from spmd_engine.strategies.page import Page, Weight
from spmd_engine.strategies.two_layers import relu


class ExpertParallel(Page):
    """y[b d] = p[b e] · relu(x[b d] · w0[e d f]) · w1[e f d], with e the likeliest by p = softmax(x · router[d e])

    b and e are both split over ``expert``, but not in the same array. An AllToAll sends rows, one for each sample, to
    the ranks of the chosen experts; t numbers the rows that a rank receives, in the order of experts. Numbers of rows
    may differ and be 0.

    Forward
        1. p[b/expert e] = softmax(x[b/expert d] · router[d e]),      gate[b] = p at best[b], its largest
        2. rows[t d] = AllToAll_expert(x[b d], sorted by best),       after the counts by expert
        3. z[t f] = rows[t d] · w0[e/expert d f],                     by each expert for its rows
        4. out[b d] = AllToAll_expert(relu(z[t f]) · w1[e/expert f d])
        5. y[b d] = gate[b] out[b d]
    Backward
        6. drows[t d] = AllToAll_expert(gate[b] dy[b d], sorted)
        7. dz[t f] = drows[t d] · w1[e/expert f d] where z > 0
        8. dx[b d] = AllToAll_expert(dz[t f] · w0[e/expert d f]),     begun
        9. dw1[e/expert f d] = relu(z[t f]) · drows[t d]
       10. dw0[e/expert d f] = rows[t d] · dz[t f]
       11. dlogits[b e] = gate[b] (dy[b d] · out[b d]) ([e is best] - p[b e])
       12. drouter[d e] {U_expert} = x[b d] · dlogits[b e],           drouter[d e] = AllReduce_expert(...)
       13. dx[b d] = the result of step 8 + dlogits[b e] · router[d e]

    An expert receives the samples of all ranks, so its gradient is complete. The router's gradient must be summed, as
    every rank has the router. The number of experts need not be a multiple of n: some ranks may have none.

    Cost for each of n ranks, in numbers, with E experts, their P = 2 E d f parameters, and R rows to other ranks
        sent    4 d R + E (n-1)/n + 2 d E (n-1)/n a micro-batch
        held    P/n + d E parameters, as many gradients, and as much of each kind of optimizer state
        saved   (3 b d + b f + b E + 2 b) / n + 2 E: x, rows, out, z, p, best, order; counts

    After Lepikhin et al., "GShard" (2020), and Fedus et al., "Switch Transformers" (2021), section 2.1.
    """

    sample = "b d"
    sizes = ("model_dim", "hidden_dim")
    axes = ("expert",)
    shardings = {"router": "d e", "experts/w0": "e/expert d f", "experts/w1": "e/expert f d"}
    input_sharding = output_sharding = "b/expert d"

    def __init__(
        self, model_dim: int, hidden_dim: int, mesh: Mesh | None = None, dtype: Any = np.float32, experts: int = 5
    ) -> None:
        weights = {
            "router": Weight((model_dim, experts), inputs=model_dim),
            "experts/w0": Weight((experts, model_dim, hidden_dim), inputs=model_dim),
            "experts/w1": Weight((experts, hidden_dim, model_dim), inputs=hidden_dim),
        }
        self._store(weights, mesh, dtype)
        self.router, self.w0, self.w1 = self.parameters.values()
        spans = [self.sharding("experts/w0").part(0, experts, peer) for peer in self.mesh.peers("expert")]
        self.first = [part.start for part in spans]  # number of each rank's first expert
        self.there = [part.stop - part.start for part in spans]  # number of experts on each rank

    def forward(self, x):
        p = softmax(einsum("bd,de->be", x, self.router))
        best = p.argmax(axis=1)  # the first of a tie
        order = self.xp.argsort(best, kind="stable")
        counts = self.backend.to_host(count_each(best, p.shape[1]))
        received_counts, _ = self.group("expert").all_to_all(counts, splits=self.there, label="counts")
        received_counts = received_counts.reshape(len(self.there), -1)
        rows = self._send_to_experts(x[order], counts, received_counts)
        z = self.xp.empty((len(rows), self.w0.shape[2]), x.dtype)
        result = self.xp.empty_like(rows)
        for expert, part in self._rows_by_expert(received_counts):
            z[part] = einsum("td,df->tf", rows[part], self.w0[expert])
            result[part] = einsum("tf,fd->td", relu(z[part]), self.w1[expert])
        out = self.xp.empty_like(x)
        out[order], _ = self._start_return(result, received_counts).wait()
        self.tape.push(x, p, best, order, counts, received_counts, rows, z, out)
        return self.xp.take_along_axis(p, best[:, None], axis=1) * out

    def backward(self, grads):
        x, p, best, order, counts, received_counts, rows, z, out = self.tape.pop()
        gate = self.xp.take_along_axis(p, best[:, None], axis=1)
        drows = self._send_to_experts((gate * grads)[order], counts, received_counts)
        dz, drows_in = self.xp.empty_like(z), self.xp.empty_like(rows)
        for expert, part in self._rows_by_expert(received_counts):
            dz[part] = einsum("td,fd->tf", drows[part], self.w1[expert]) * (z[part] > 0)
            drows_in[part] = einsum("tf,df->td", dz[part], self.w0[expert])
        returning_rows = self._start_return(drows_in, received_counts)  # while the experts' gradients are computed
        dw0, dw1 = self.xp.zeros_like(self.w0), self.xp.zeros_like(self.w1)
        for expert, part in self._rows_by_expert(received_counts):
            dw1[expert] = einsum("tf,td->fd", relu(z[part]), drows[part])
            dw0[expert] = einsum("td,tf->df", rows[part], dz[part])
        dlogits = -p
        dlogits[self.xp.arange(len(p)), best] += 1
        dlogits *= gate * einsum("bd,bd->b", grads, out)[:, None]
        drouter = self.all_reduce(einsum("bd,be->de", x, dlogits), over="expert", label="drouter")
        self.input_gradient = einsum("be,de->bd", dlogits, self.router)
        self.input_gradient[order] += returning_rows.wait()[0]
        return {"router": drouter, "experts/w0": dw0, "experts/w1": dw1}

    def _send_to_experts(self, x, counts, received_counts):
        """Send rows, sorted by expert, to the experts' ranks; sort the received rows, which arrive by rank, again."""
        splits = [int(counts[a : a + n].sum()) for a, n in zip(self.first, self.there, strict=True)]
        rows, _ = self.group("expert").all_to_all(x, splits=splits, received=received_counts.sum(axis=1), label="rows")
        return rows[self.backend.asarray(_order_by_expert(received_counts))]

    def _start_return(self, rows, received_counts):
        by_rank = self.xp.empty_like(rows)
        by_rank[self.backend.asarray(_order_by_expert(received_counts))] = rows
        return self.group("expert").start_all_to_all(by_rank, splits=received_counts.sum(axis=1).tolist(), label="rows")

    def _rows_by_expert(self, received_counts):
        """For each expert of this rank: its number on this rank, and its rows."""
        ends = np.cumsum(received_counts.sum(axis=0)).tolist()
        return [(expert, slice(a, b)) for expert, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]


def softmax(x):
    """The softmax of x[b e] over e."""
    y = backend_of(x).xp.exp(x - x.max(axis=1, keepdims=True))
    return y / y.sum(axis=1, keepdims=True)


def _order_by_expert(received_counts):
    """The permutation that sorts rows by (expert, rank), which arrive by (rank, expert)."""
    ranks, experts = received_counts.shape
    expert_of = np.repeat(np.tile(np.arange(experts), ranks), received_counts.reshape(-1))
    return np.argsort(expert_of, kind="stable")
