"""Attention heads: each rank computes some of the heads."""

from spmd_engine.arrays import backend_of, einsum
from spmd_engine.strategies.one_attention import OneAttention


class AttentionHeads(OneAttention):
    """h is split over ``model``. Heads are independent until the output sums over them: y and dx are {U_model}.

    Write H for h/model, and t for s of the keys.

    Forward
        1. q[b s H k] = x[b s d] · query[d H k],                     likewise k[b t H k], v[b t H k]
        2. p[b H s t] = softmax over t <= s of q[b s H k] · k[b t H k] / sqrt(k)
        3. mixed[b s H k] = p[b H s t] · v[b t H k]
        4. y[b s d] {U_model} = mixed[b s H k] · output[H k d],      y[b s d] = AllReduce_model(...)
    Backward
        5. dmixed[b s H k] = dy[b s d] · output[H k d]
        6. dv[b t H k] = p[b H s t] · dmixed[b s H k],               dp[b H s t] = dmixed[b s H k] · v[b t H k]
        7. dscores[b H s t] = p (dp - sum over t of p dp) / sqrt(k)
        8. dq[b s H k] = dscores[b H s t] · k[b t H k],              dk[b t H k] = dscores[b H s t] · q[b s H k]
        9. dx[b s d] {U_model} = dq · query + dk · key + dv · value, begin dx[b s d] = AllReduce_model(...)
       10. dquery[d H k] = x[b s d] · dq[b s H k],                   likewise dkey, dvalue
       11. doutput[H k d] = mixed[b s H k] · dy[b s d]

    h need not be a multiple of n.

    Cost for each of n ranks, in numbers, with P = 4 d^2 parameters
        sent    4 b s d (n-1)/n a micro-batch
        held    P/n parameters, P/n gradients, P/n of each kind of optimizer state
        saved   b s d + (4 b s d + b h s^2) / n

    After Shoeybi et al., "Megatron-LM" (2019), section 3.
    """

    axes = ("model",)
    shardings = {
        "attention/query": "d h/model k",
        "attention/key": "d h/model k",
        "attention/value": "d h/model k",
        "attention/output": "h/model k d",
    }
    input_sharding = output_sharding = "b s d"

    def forward(self, x):
        q, k, v = (einsum("bsd,dhk->bshk", x, weights) for weights in (self.query, self.key, self.value))
        p = _causal_softmax(einsum("bshk,bthk->bhst", q, k) * self.scale)
        mixed = einsum("bhst,bthk->bshk", p, v)
        self.tape.push(x, q, k, v, p, mixed)
        return self.all_reduce(einsum("bshk,hkd->bsd", mixed, self.output), over="model", label="y")

    def backward(self, grads):
        x, q, k, v, p, mixed = self.tape.pop()
        dmixed = einsum("bsd,hkd->bshk", grads, self.output)
        dv = einsum("bhst,bshk->bthk", p, dmixed)
        dp = einsum("bshk,bthk->bhst", dmixed, v)
        dscores = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * self.scale
        dq = einsum("bhst,bthk->bshk", dscores, k)
        dk = einsum("bhst,bshk->bthk", dscores, q)
        pairs = ((dq, self.query), (dk, self.key), (dv, self.value))
        dx = sum(einsum("bshk,dhk->bsd", gradient, weights) for gradient, weights in pairs)
        summing_dx = self.start_all_reduce(dx, over="model", label="dx")  # while the weights' gradients are computed
        gradients = {
            "attention/query": einsum("bsd,bshk->dhk", x, dq),
            "attention/key": einsum("bsd,bshk->dhk", x, dk),
            "attention/value": einsum("bsd,bshk->dhk", x, dv),
            "attention/output": einsum("bshk,bsd->hkd", mixed, grads),
        }
        self.input_gradient = summing_dx.wait()
        return gradients


def _causal_softmax(scores):
    """p[b h s t] = softmax of the scores over t <= s."""
    xp = backend_of(scores).xp
    causal_scores = xp.where(xp.tri(*scores.shape[-2:], dtype=bool), scores, -xp.inf)
    weights = xp.exp(causal_scores - causal_scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
