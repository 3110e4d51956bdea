"""Context parallelism by gathered keys: the shortest way, at the price of all keys on every rank."""

from spmd_engine.arrays.attention import causal_attention, causal_attention_backward
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.layers.context import ContextMethod


class GatherKeys(ContextMethod):
    """Every rank's queries meet all keys at once.

    Forward:
        1. k, v[b t h k] = all_gather of k, v[b s/context h k]
        2. mixed[b s/context h k] = causal attention to them
    Backward:
        1. dq[b s/context h k], and dk, dv[b t h k] unreduced over context: what its queries ask of all keys
        2. dk, dv[b s/context h k] = reduce_scatter of them

    With S bytes of keys and values in all, n ranks: S(n-1)/n sent by a rank forward, as much backward; S kept.
    """

    def attend(self, cut, q, k, v):
        packed = cut.group.all_gather(_pack(k, v), sizes=cut.lengths, label=cut.label)
        k, v = _unpack(cut.ascending(packed, axis=0))
        seen = cut.positions(q), cut.all_positions(q), cut.apart(), cut.window, cut.cap
        mixed, log_sums = causal_attention(q, k, v, *seen)
        return mixed, (q, k, v, mixed, log_sums)

    def attend_backward(self, cut, saved, dmixed):
        q, k, v, mixed, log_sums = saved
        seen = cut.positions(q), cut.all_positions(q), cut.apart(), cut.window, cut.cap
        dq, dk, dv = causal_attention_backward(dmixed, q, k, v, mixed, log_sums, *seen)
        packed = cut.by_rank(_pack(dk, dv), axis=0)
        return dq, *_unpack(cut.group.reduce_scatter(packed, sizes=cut.lengths, label=cut.label))


def _pack(k: Array, v: Array) -> Array:
    """[t 2 b h k]: keys and values travel together, positions first, so that parts are joined where they arrive."""
    return backend_of(k).xp.stack((k.swapaxes(0, 1), v.swapaxes(0, 1)), axis=1)


def _unpack(packed: Array) -> tuple[Array, Array]:
    """Views k[b t h k] and v[b t h k]."""
    return packed[:, 0].swapaxes(0, 1), packed[:, 1].swapaxes(0, 1)
