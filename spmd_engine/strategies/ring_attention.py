"""Context parallel by a ring: each rank has a part of the sequence, and keys and values circulate."""

import numpy as np

from spmd_engine.arrays import einsum
from spmd_engine.strategies.one_attention import OneAttention


class RingAttention(OneAttention):
    """s is split over ``context``. Queries of each rank need the keys of all ranks; sums over s are {U_context}.

    Write s for s/context of the queries, and t for s/context of the present block of keys. At step j, from 0 to n-1,
    rank r of n has the block of rank r-j (mod n), and sends it to rank r+1. The softmax over all keys is computed
    online: top is the largest score so far, total the sum of exp(scores - top), mixed the sum of exp(...) · v.

    Forward
        1. q[b s h k] = x[b s d] · query[d h k],                     likewise k[b s h k], v[b s h k]
        2. for each block, while the next one is sent and received:
               scores[b s h t] = q[b s h k] · k[b t h k] / sqrt(k), where the key is not later than the query
               top'[b s h] = max(top, max over t of scores);  total and mixed *= exp(top - top')
               total[b s h] += sum over t of exp(scores - top');  mixed[b s h k] += exp(scores - top') · v[b t h k]
        3. mixed /= total;  y[b s d] = mixed[b s h k] · output[h k d]
    Backward
        4. dmixed[b s h k] = dy[b s d] · output[h k d];  along[b s h] = sum over k of dmixed mixed
        5. for each block, again:
               p[b s h t] = exp(scores - top - log(total))
               dv[b t h k] += p · dmixed;  dscores = p (dmixed · v[b t h k] - along) / sqrt(k)
               dq[b s h k] += dscores · k[b t h k];  dk[b t h k] += dscores · q[b s h k]
               send dk, dv after their block to rank r+1; the block's owner adds its own part at the end
        6. dx[b s d] = dq · query + dk · key + dv · value
        7. dquery[d h k] {U_context} = x[b s d] · dq[b s h k],       dquery[d h k] = AllReduce_context(...)
               likewise dkey, dvalue and doutput

    A block of later keys needs no work: in n steps rank r works r+1 times. The load is even if each rank has an early
    and a late part of the sequence.

    Cost for each of n ranks, in numbers, with P = 4 d^2 parameters and s the full sequence length
        sent    6 b s d (n-1)/n a micro-batch for keys, values and their gradients; 2 P (n-1)/n for the weights'
        held    P parameters, P gradients, P of each kind of optimizer state; two blocks, 2 b s d / n each
        saved   (5 b s d + b s h) / n: no square of s

    After Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers" (2023), and Milakov and Gimelshein,
    "Online normalizer calculation for softmax" (2018).
    """

    axes = ("context",)
    shardings = {
        "attention/query": "d h k",
        "attention/key": "d h k",
        "attention/value": "d h k",
        "attention/output": "h k d",
    }
    input_sharding = output_sharding = "b s/context d"

    def forward(self, x):
        q, k, v = (einsum("bsd,dhk->bshk", x, weights) for weights in (self.query, self.key, self.value))
        total, mixed = self.xp.zeros_like(q[..., :1]), self.xp.zeros_like(q)
        top = self.xp.full_like(total, -np.inf)
        for owner, (k_block, v_block) in self._circulate(self.xp.stack((k, v))):
            if owner > self.place or not k_block.shape[1]:
                continue
            scores = self._scores(q, k_block, owner)
            new_top = self.xp.maximum(top, scores.max(axis=-1, keepdims=True))
            weights, shrunk = self.xp.exp(scores - new_top), self.xp.exp(top - new_top)
            total = total * shrunk + weights.sum(axis=-1, keepdims=True)
            mixed = mixed * shrunk + einsum("bsht,bthk->bshk", weights, v_block)
            top = new_top
        mixed /= total
        self.tape.push(x, q, k, v, mixed, top + self.xp.log(total))
        return einsum("bshk,hkd->bsd", mixed, self.output)

    def backward(self, grads):
        x, q, k, v, mixed, log_total = self.tape.pop()
        dmixed = einsum("bsd,hkd->bshk", grads, self.output)
        along = (dmixed * mixed).sum(axis=-1, keepdims=True)
        dq, exchange = self.xp.zeros_like(q), None
        for owner, block in self._circulate(self.xp.stack((k, v))):
            dblock = self.xp.zeros_like(block)
            if owner <= self.place:
                k_block, v_block = block
                p = self.xp.exp(self._scores(q, k_block, owner) - log_total)
                dscores = p * (einsum("bshk,bthk->bsht", dmixed, v_block) - along) * self.scale
                dq += einsum("bsht,bthk->bshk", dscores, k_block)
                dblock[0] = einsum("bsht,bshk->bthk", dscores, q)
                dblock[1] = einsum("bsht,bshk->bthk", p, dmixed)
            if owner == self.place:
                dk, dv = dblock
                continue
            if exchange:  # the sum of the ranks between the owner and this one
                dblock += _await_block(exchange)
            exchange = self._pass_on(dblock, "dk, dv")
        if exchange:
            from_others = _await_block(exchange)
            dk, dv = dk + from_others[0], dv + from_others[1]
        pairs = ((dq, self.query), (dk, self.key), (dv, self.value))
        self.input_gradient = sum(einsum("bshk,dhk->bsd", gradient, weights) for gradient, weights in pairs)
        gradients = {
            "attention/query": einsum("bsd,bshk->dhk", x, dq),
            "attention/key": einsum("bsd,bshk->dhk", x, dk),
            "attention/value": einsum("bsd,bshk->dhk", x, dv),
            "attention/output": einsum("bshk,bsd->hkd", mixed, grads),
        }
        return {name: self.all_reduce(dw, over="context", label=name) for name, dw in gradients.items()}

    @property
    def place(self):
        """This rank's position on the ring."""
        return self.mesh.index("context")

    def _scores(self, q, k, owner):
        """scores[b s h t] of a block that is not later than the queries; in their own block, -inf for later keys."""
        scores = einsum("bshk,bthk->bsht", q, k) * self.scale
        if owner < self.place:
            return scores
        return self.xp.where(self.xp.tri(q.shape[1], dtype=bool)[:, None], scores, -np.inf)

    def _circulate(self, block):
        """Yield each rank's number and block, beginning with this rank's; the next block arrives meanwhile."""
        ranks = self.mesh.axis_size("context")
        for step in range(ranks):
            exchange = self._pass_on(block, "k, v") if step < ranks - 1 else None
            yield (self.place - step) % ranks, block
            block = _await_block(exchange) if exchange else block

    def _pass_on(self, x, label):
        """Start to send to the next rank, and to receive from the previous one."""
        ranks = self.mesh.axis_size("context")
        sending = self.start_send((self.place + 1) % ranks, x, over="context", label=label)
        return sending, self.start_receive((self.place - 1) % ranks, over="context", label=label)


def _await_block(exchange):
    sending, receiving = exchange
    sending.wait()
    return receiving.wait()
