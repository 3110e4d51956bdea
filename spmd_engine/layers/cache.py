"""What attention remembers of sequences while these grow: keys and values of the positions so far."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_engine.arrays.attention import causal_attention
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.errors import UsageError
from spmd_engine.sharding.shards import Shards

GROWTH = 1.5  #: times the room that was there, where more is needed


class Cache:
    """Keys and values of this rank's sequences, by layer: heads are cut as in the layers, sequences as b is.

    Sequences may be of different ``lengths``, and grow together: each call of a model with this cache appends as many
    positions to each of them. They can be reordered, repeated and dropped (``select``), cut short (``truncate``) and
    put together (``joined``). Every rank has a cache of its own, of its heads and of its stage of a pipeline; what is
    done to one is to be done to all.
    """

    def __init__(self) -> None:
        self._room: dict[str, list[Array]] = {}  # by layer: arrays[b t ...], of which the first positions are filled
        self._lengths: list[int] | None = None
        self._growth = 0  # positions that are being appended by the call that is under way

    @property
    def lengths(self) -> list[int]:
        """How many positions of each sequence are here."""
        return list(self._lengths or [])

    def begin(self, sequences: int, positions: int) -> list[int]:
        """A call of the model appends so many positions to each of so many sequences; returns where they begin.

        Raises UsageError for another number of sequences than are here.
        """
        if self._lengths is None:
            self._lengths = [0] * sequences
        if len(self._lengths) != sequences:
            raise UsageError(f"the cache has {len(self._lengths)} sequences on this rank, the inputs {sequences}")
        self._growth = positions
        return self.lengths

    def end(self) -> None:
        """That call is over: what it appended is part of the sequences."""
        self._lengths = [length + self._growth for length in self._lengths or []]
        self._growth = 0

    def append(self, layer: str, *arrays: Array) -> list[Array]:
        """A layer's arrays[b t ...] with its new positions, arrays[b s ...]; beyond a sequence's end is anything."""
        filled = max(self._lengths or [0]) + self._growth
        room = self._room.setdefault(layer, [_empty(x, 0) for x in arrays])
        for number, x in enumerate(arrays):
            if room[number].shape[1] < filled:
                room[number] = _grown(room[number], max(filled, int(room[number].shape[1] * GROWTH)))
            for row, begin in enumerate(self._lengths or []):
                room[number][row, begin : begin + self._growth] = x[row]
        return [each[:, :filled] for each in room]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these of the sequences, by their numbers, in this order; one may be named several times."""
        self._lengths = [self.lengths[row] for row in rows]
        for layer, arrays in self._room.items():
            self._room[layer] = [each[list(rows)] for each in arrays]

    def truncate(self, length: int) -> None:
        """Forget the positions of all sequences from number ``length`` on."""
        self._lengths = [min(each, length) for each in self.lengths]

    @classmethod
    def joined(cls, caches: Sequence[Cache]) -> Cache:
        """The sequences of several caches, one behind the other, in a new one."""
        made = cls()
        made._lengths = [length for cache in caches for length in cache.lengths]
        for layer in caches[0]._room:
            several = [cache._room[layer] for cache in caches]
            most = max(arrays[0].shape[1] for arrays in several)
            xp = backend_of(several[0][0]).xp
            parts = ([_grown(each, most) for each in arrays] for arrays in several)
            made._room[layer] = [xp.concatenate(of_one) for of_one in zip(*parts, strict=True)]
        return made


def cached_attention(sh: Shards, cache: Cache, q: Array, k: Array, v: Array) -> Array:
    """Causal attention of q[b s h k], at the ends of the cached sequences, to all their keys, these k and v included.

    The sequence must be whole on this rank.
    """
    lengths, s, xp = cache.lengths, q.shape[1], backend_of(q).xp
    keys, values = cache.append(sh.label, k, v)
    mixed = xp.empty(q.shape, q.dtype)
    for begin in dict.fromkeys(lengths):  # sequences of one length together
        rows = [row for row, length in enumerate(lengths) if length == begin]
        some = slice(None) if len(rows) == len(lengths) else rows
        positions = xp.arange(begin + s)
        mixed[some], _ = causal_attention(
            q[some], keys[some][:, : begin + s], values[some][:, : begin + s], positions[begin:], positions
        )
    return mixed


def _empty(like: Array, length: int) -> Array:
    return backend_of(like).xp.empty((like.shape[0], length, *like.shape[2:]), like.dtype)


def _grown(array: Array, length: int) -> Array:
    if array.shape[1] == length:
        return array
    grown = _empty(array, length)
    grown[:, : array.shape[1]] = array
    return grown
