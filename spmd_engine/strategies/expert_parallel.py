"""Expert parallel: each rank has some of the experts, and samples travel to the one that each of them chooses."""

from typing import Any

import numpy as np

from spmd_engine.arrays import einsum
from spmd_engine.comm.mesh import Mesh
from spmd_engine.strategies.page import Page, Weight
from spmd_engine.strategies.two_layers import relu


class ExpertParallel(Page):
    """y[b d] = p[b e] · relu(x[b d] · w0[e d f]) · w1[e f d], with e the likeliest by p = softmax(x · router[d e])

    b and e are both cut over ``expert``, never in one array. Between the two lies an AllToAll of rows: a sample on
    its way to the expert that it chose, t samples here in the order of their experts. Each rank sends as many rows to
    each other as it must; any number may be 0.

    Forward
        1. p[b/expert e] = softmax(x[b/expert d] · router[d e]),      gate[b] = p at best[b], its largest
        2. rows[t d] = AllToAll_expert(x[b d], sorted by best),       after as many numbers as there are experts
        3. z[t f] = rows[t d] · w0[e/expert d f],                     each expert its own rows
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
       13. dx[b d] = what came in step 8 + dlogits[b e] · router[d e]

    To an expert come the samples of all ranks, so its gradient is whole: nothing more is summed. That of the router,
    which every rank has, is summed. The number of experts need not be a multiple of n: some ranks may have none.

    Cost for each of n ranks, in numbers, with E experts, P = 2 E d f parameters of theirs and R rows that leave it
        sent    4 d R + E (n-1)/n + 2 d E (n-1)/n a micro-batch
        held    P/n + d E parameters, as many gradients, and as much of each kind of optimizer state
        saved   (3 b d + b f + b E + 2 b) / n + 2 E: x, rows and out, z, p, best and its order; counts

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
        self.first = [part.start for part in spans]  # expert of each rank
        self.there = [part.stop - part.start for part in spans]  # experts on each rank

    def forward(self, x):
        p = softmax(einsum("bd,de->be", x, self.router))
        best = p.argmax(axis=1)  # of equals the first
        order = np.argsort(best, kind="stable")
        counts = np.bincount(best, minlength=p.shape[1])
        came, _ = self.group("expert").all_to_all(counts, splits=self.there, label="counts")
        came = came.reshape(len(self.there), -1)
        rows = self._to_experts(x[order], counts, came)
        z = np.empty((len(rows), self.w0.shape[2]), x.dtype)
        result = np.empty_like(rows)
        for expert, own in self._own_rows(came):
            z[own] = einsum("td,df->tf", rows[own], self.w0[expert])
            result[own] = einsum("tf,fd->td", relu(z[own]), self.w1[expert])
        out = np.empty_like(x)
        out[order], _ = self._start_back(result, came).wait()
        self.tape.push(x, p, best, order, counts, came, rows, z, out)
        return np.take_along_axis(p, best[:, None], axis=1) * out

    def backward(self, grads):
        x, p, best, order, counts, came, rows, z, out = self.tape.pop()
        gate = np.take_along_axis(p, best[:, None], axis=1)
        drows = self._to_experts((gate * grads)[order], counts, came)
        dz, drows_in = np.empty_like(z), np.empty_like(rows)
        for expert, own in self._own_rows(came):
            dz[own] = einsum("td,fd->tf", drows[own], self.w1[expert]) * (z[own] > 0)
            drows_in[own] = einsum("tf,df->td", dz[own], self.w0[expert])
        coming_back = self._start_back(drows_in, came)  # while the experts' gradients are computed
        dw0, dw1 = np.zeros_like(self.w0), np.zeros_like(self.w1)
        for expert, own in self._own_rows(came):
            dw1[expert] = einsum("tf,td->fd", relu(z[own]), drows[own])
            dw0[expert] = einsum("td,tf->df", rows[own], dz[own])
        dlogits = -p
        dlogits[np.arange(len(p)), best] += 1
        dlogits *= gate * einsum("bd,bd->b", grads, out)[:, None]
        drouter = self.all_reduce(einsum("bd,be->de", x, dlogits), over="expert", label="drouter")
        self.input_gradient = einsum("be,de->bd", dlogits, self.router)
        self.input_gradient[order] += coming_back.wait()[0]
        return {"router": drouter, "experts/w0": dw0, "experts/w1": dw1}

    def _to_experts(self, x, counts, came):
        """Rows in the order of experts, sent to these; here they come rank by rank, and are put in that order, too."""
        splits = [int(counts[a : a + n].sum()) for a, n in zip(self.first, self.there, strict=True)]
        rows, _ = self.group("expert").all_to_all(x, splits=splits, received=came.sum(axis=1), label="rows")
        return rows[_by_expert(came)]

    def _start_back(self, rows, came):
        by_rank = np.empty_like(rows)
        by_rank[_by_expert(came)] = rows
        return self.group("expert").start_all_to_all(by_rank, splits=came.sum(axis=1).tolist(), label="rows")

    def _own_rows(self, came):
        """For each expert here: its number, counted from the first here, and its rows."""
        ends = np.cumsum(came.sum(axis=0)).tolist()
        return [(expert, slice(a, b)) for expert, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]


def softmax(x):
    """Exponentials of x[b e], as fractions of their sum over e."""
    y = np.exp(x - x.max(axis=1, keepdims=True))
    return y / y.sum(axis=1, keepdims=True)


def _by_expert(came):
    """The order in which rows that come by rank and, from each, by expert, are by expert and, in each, by rank."""
    ranks, experts = came.shape
    expert_of = np.repeat(np.tile(np.arange(experts), ranks), came.reshape(-1))
    return np.argsort(expert_of, kind="stable")
