"""What attention remembers of sequences while these grow: keys and values of the positions so far."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_engine.arrays.attention import causal_attention
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.cached_attention import HIDDEN, attend_to_keys, merge_parts
from spmd_engine.errors import UsageError
from spmd_engine.sharding.shards import Shards

GROWTH = 1.5  #: times the room that was there, where more is needed
WASTE = 2  #: columns for each position of the longest sequence, beyond which unused ones are removed


class Cache:
    """Keys and values of this rank's sequences, by layer: heads are cut as in the layers, sequences as b is, and
    positions as s is.

    Sequences may be of different ``lengths``. Each call of a model with this cache appends a column for each new
    position to all of them; in a sequence that grows by fewer, the columns that are left over are hidden. Sequences
    can be reordered, repeated and dropped (``select``), cut short (``truncate``) and put together (``joined``). Every
    rank has a cache of its own, of its heads, its positions and its stage of a pipeline; what is done to one is to be
    done to all.
    """

    def __init__(self) -> None:
        self._room: dict[str, list[Array]] = {}  # by layer: arrays[b t ...], of which the first columns are used
        self._places: Array | None = None  # [b t]: which position of its sequence each column has; HIDDEN: none
        self._used = 0  # columns, with those of the call that is under way
        self._lengths: list[int] | None = None
        self._growth: list[int] = []  # by sequence: positions, on all ranks, of the call that is under way
        self.whole = True  #: whether every column here has the position of its own number: nothing is hidden

    @property
    def lengths(self) -> list[int]:
        """How many positions each sequence has, on all ranks that cut them together."""
        return list(self._lengths or [])

    @property
    def places(self) -> Array:
        """[b t]: which position of its sequence each column has; HIDDEN where it has none."""
        return self._places[:, : self._used]

    def check(self, sequences: int) -> list[int]:
        """The lengths of so many sequences; raises UsageError for another number of them than are here."""
        if self._lengths is None:
            self._lengths = [0] * sequences
        if len(self._lengths) != sequences:
            raise UsageError(f"the cache has {len(self._lengths)} sequences on this rank, the inputs {sequences}")
        return self.lengths

    def add_empty(self, sequences: int) -> None:
        """So many sequences more, behind the others, of which nothing is remembered yet."""
        before = len(self.lengths)
        self._lengths = self.lengths + [0] * sequences
        if self._places is None:
            return
        self.whole = False
        self._places = _taller(self._places, before + sequences, HIDDEN)
        for layer, arrays in self._room.items():
            self._room[layer] = [_taller(each, before + sequences, 0) for each in arrays]

    def begin(self, places: Array, growth: Sequence[int]) -> None:
        """A call of the model appends columns with these positions, places[b s] of this rank (HIDDEN: to be ignored);
        over all ranks, so many to each sequence."""
        self.check(len(places))
        xp, new = backend_of(places).xp, places.shape[1]
        if self._used > WASTE * max([1, *self.lengths]):
            self._compact()
        if self._places is None:
            self._places = xp.full(places.shape, HIDDEN, xp.int64)
        before, self._used = self._used, self._used + new
        if self._places.shape[1] < self._used:
            self._places = _grown(self._places, max(self._used, int(self._places.shape[1] * GROWTH)))
        self._places[:, before : self._used] = places
        self.whole = self.whole and bool((places == xp.arange(before, self._used)).all())
        self._growth = list(growth)

    def end(self) -> None:
        """That call is over: what it appended is part of the sequences."""
        self._lengths = [length + more for length, more in zip(self.lengths, self._growth, strict=True)]
        self._growth = []

    def append(self, layer: str, *arrays: Array) -> list[Array]:
        """A layer's arrays[b t ...] with its new columns, arrays[b s ...]."""
        used, new = self._used, arrays[0].shape[1]
        room = self._room.get(layer)
        if room is None:
            room = self._room[layer] = [_empty(x, used) for x in arrays]
        for number, x in enumerate(arrays):
            if room[number].shape[1] < used:
                room[number] = _grown(room[number], max(used, int(room[number].shape[1] * GROWTH)))
            room[number][:, used - new : used] = x
        return [each[:, :used] for each in room]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these of the sequences, by their numbers, in this order; one may be named several times."""
        rows = list(rows)
        if rows == list(range(len(self.lengths))):
            return
        self._lengths = [self.lengths[row] for row in rows]
        if not rows:  # what comes next begins with nothing hidden
            self._room, self._places, self._used, self.whole = {}, None, 0, True
            return
        if self._places is not None:
            self._places = self._places[rows]
        for layer, arrays in self._room.items():
            self._room[layer] = [each[rows] for each in arrays]

    def truncate(self, length: int | Sequence[int]) -> None:
        """Forget the positions of all sequences, or of each, from number ``length`` on."""
        limits = [length] * len(self.lengths) if isinstance(length, int) else list(length)
        if self._places is None or all(limit >= have for limit, have in zip(limits, self.lengths, strict=True)):
            return
        xp = backend_of(self._places).xp
        self._places[self._places >= xp.asarray(limits, xp.int64)[:, None]] = HIDDEN
        self._lengths = [min(pair) for pair in zip(self.lengths, limits, strict=True)]
        self.whole = False
        self._compact()

    def _compact(self) -> None:
        """Remove columns that no sequence needs: the positions of each move to the front, in order."""
        places, xp = self.places, backend_of(self._places).xp
        order = places.argsort(axis=1, kind="stable")
        self._used = int((places < HIDDEN).sum(axis=1).max()) if places.size else 0
        order = order[:, : self._used]
        rows = xp.arange(len(places))[:, None]
        self._places = xp.ascontiguousarray(places[rows, order])
        for layer, arrays in self._room.items():
            self._room[layer] = [each[rows, order] for each in arrays]
        self.whole = bool((self._places == xp.arange(self._used)).all())

    @classmethod
    def joined(cls, caches: Sequence[Cache]) -> Cache:
        """The sequences of several caches, one behind the other, in a new one."""
        made, most = cls(), max(cache._used for cache in caches)
        xp = backend_of(caches[0]._places).xp
        made._lengths = [length for cache in caches for length in cache.lengths]
        made._places = xp.concatenate([_grown(cache.places, most, HIDDEN) for cache in caches])
        made._used = most
        made.whole = all(cache.whole and cache._used == most for cache in caches)
        for layer in caches[0]._room:
            several = [[each[:, : cache._used] for each in cache._room[layer]] for cache in caches]
            parts = ([_grown(each, most, 0) for each in arrays] for arrays in several)  # hidden, but finite
            made._room[layer] = [xp.concatenate(of_one) for of_one in zip(*parts, strict=True)]
        return made


def cached_attention(
    sh: Shards,
    cache: Cache,
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    window: int | None = None,
    cap: float | None = None,
) -> Array:
    """Causal attention of q[b s h k], at positions[b s], to all keys of the cached sequences, these k and v included;
    with a ``window``, to those of so many positions, up to the query's own; with a ``cap`` of scores.

    Where s is cut, each rank has its columns of the cache. Queries are gathered, every rank attends with all of them
    to the keys that it has, and the parts, weighted by their sums of exponentials, are added up: with one new token,
    a rank sends its query's mixed values once, never keys.
    """
    group = sh.group_of("s")
    begins_here = k.shape[1] == cache.places.shape[1] and group is None
    keys, values = cache.append(sh.label, k, v)
    if begins_here and q.shape[1] > 1:  # nothing was here before: what is hidden comes after what is not
        columns = backend_of(q).xp.arange(q.shape[1])
        return causal_attention(q, keys, values, columns, columns, window=window, cap=cap)[0]
    if group is None:
        if cache.whole and q.shape[1] == 1:  # columns are in the order of positions: the last ones are the window
            recent = slice(0 if window is None else max(0, keys.shape[1] - window), None)
            return attend_to_keys(q, keys[:, recent], values[:, recent], None, cache.places[:, recent], cap=cap)[0]
        return attend_to_keys(q, keys, values, positions, cache.places, window, cap)[0]
    sizes = group.all_gather(backend_of(q).xp.asarray([q.shape[1]]), label=sh.label).tolist()
    q = group.all_gather(q, 1, sizes=sizes, label=sh.label)
    positions = group.all_gather(positions, 1, sizes=sizes, label=sh.label)
    mixed, log_sums = attend_to_keys(q, keys, values, positions, cache.places, window, cap)
    top = group.all_reduce(log_sums, "max", label=sh.label)
    mixed = group.all_reduce(merge_parts(mixed, log_sums, top), label=sh.label)
    mixed[..., :-1] /= mixed[..., -1:]
    first = sum(sizes[: group.rank])
    return backend_of(q).xp.ascontiguousarray(mixed[:, first : first + sizes[group.rank], ..., :-1])


def _empty(like: Array, length: int) -> Array:
    return backend_of(like).xp.empty((like.shape[0], length, *like.shape[2:]), like.dtype)


def _taller(array: Array, rows: int, fill: int) -> Array:
    """With more rows, that hold ``fill``: what is hidden must be finite."""
    taller = backend_of(array).xp.full((rows, *array.shape[1:]), fill, array.dtype)
    taller[: len(array)] = array
    return taller


def _grown(array: Array, length: int, fill: int | None = None) -> Array:
    if array.shape[1] == length:
        return array
    grown = _empty(array, length)
    grown[:, : array.shape[1]] = array
    if fill is not None:
        grown[:, array.shape[1] :] = fill
    return grown
