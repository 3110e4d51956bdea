"""What attention remembers of sequences while these grow: keys and values of the positions so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd_engine.arrays.attention import HIDDEN, attend_to_all, attend_to_keys, causal_attention, merge_parts
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.rotary import Turn
from spmd_engine.errors import UsageError
from spmd_engine.layers.attention.qk_norm_rope import Rotary
from spmd_engine.sharding.shards import Shards


class Cache:
    """Keys and values of this rank's sequences, by layer: heads are cut as in the layers, sequences as b is, and
    positions as s is.

    Sequences may be of different ``lengths``. Each call of a model with this cache appends a column for each new
    position to all of them; in a sequence that grows by fewer, the columns that are left over are hidden. Sequences
    can be reordered, repeated and dropped (``select``), cut short (``truncate``) and put together (``joined``). Layers
    whose queries see a window alone keep no more than that: see ``Columns``. Every rank has a cache of its own, of its
    heads, its positions and its stage of a pipeline; what is done to one is to be done to all.
    """

    def __init__(self) -> None:
        self._columns: dict[int | None, Columns] = {}  # by the window of the layers that they are of
        self._places: Array | None = None  # of the call that is under way
        self.turns: dict[Rotary, Turn] = {}  #: by which rotary positions turn those of that call
        self._lengths: list[int] | None = None
        self._growth: list[int] = []  # by sequence: positions, on all ranks, of that call

    @property
    def lengths(self) -> list[int]:
        """How many positions each sequence has, on all ranks that cut them together."""
        return list(self._lengths or [])

    def check(self, sequences: int) -> list[int]:
        """The lengths of so many sequences; raises UsageError for another number of them than are here."""
        if self._lengths is None:
            self._lengths = [0] * sequences
        if len(self._lengths) != sequences:
            raise UsageError(f"the cache has {len(self._lengths)} sequences on this rank, the inputs {sequences}")
        return self.lengths

    def add_empty(self, sequences: int) -> None:
        """So many sequences more, behind the others, of which nothing is remembered yet."""
        self._lengths = self.lengths + [0] * sequences
        for columns in self._columns.values():
            columns.add_empty(sequences)

    def begin(self, places: Array, growth: Sequence[int]) -> None:
        """A call of the model appends columns with these positions, places[b s] of this rank (HIDDEN: to be ignored);
        over all ranks, so many to each sequence."""
        self.check(len(places))
        for columns in self._columns.values():
            columns.begin(places, self.lengths)
        self._places, self._growth, self.turns = places, list(growth), {}

    def end(self) -> None:
        """That call is over: what it appended is part of the sequences."""
        self._lengths = [length + more for length, more in zip(self.lengths, self._growth, strict=True)]
        self._growth = []

    def columns(self, window: int | None) -> Columns:
        """Those of layers with this window, in the call that is under way."""
        if window not in self._columns:  # in the first call of all
            self._columns[window] = Columns(window)
            self._columns[window].begin(self._places, self.lengths)
        return self._columns[window]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these of the sequences, by their numbers, in this order; one may be named several times."""
        rows = list(rows)
        if rows == list(range(len(self.lengths))):
            return
        self._lengths = [self.lengths[row] for row in rows]
        if not rows:  # what comes next begins with nothing hidden
            self._columns = {}
        for columns in self._columns.values():
            columns.select(rows)

    def truncate(self, length: int | Sequence[int]) -> None:
        """Forget the positions of all sequences, or of each, from number ``length`` on.

        Raises UsageError if a window would then reach positions that are dropped already.
        """
        limits = [length] * len(self.lengths) if isinstance(length, int) else list(length)
        if not self._lengths or all(limit >= have for limit, have in zip(limits, self.lengths, strict=True)):
            return
        limits = [min(pair) for pair in zip(limits, self.lengths, strict=True)]
        for columns in self._columns.values():
            columns.check_cut(limits)
        for columns in self._columns.values():
            columns.cut(backend_of(columns.places).xp.asarray(limits))
        self._lengths = limits

    @classmethod
    def joined(cls, caches: Sequence[Cache]) -> Cache:
        """The sequences of several caches, one behind the other, in a new one."""
        made = cls()
        made._lengths = [length for cache in caches for length in cache.lengths]
        for window in caches[0]._columns:
            made._columns[window] = Columns.joined([cache._columns[window] for cache in caches])
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
    columns = cache.columns(window)
    begins_here = k.shape[1] == columns.used and group is None
    keys, values = columns.append(sh.label, k, v)
    if begins_here and q.shape[1] > 1:  # nothing was here before: what is hidden comes after what is not
        numbers = backend_of(q).xp.arange(q.shape[1])
        return causal_attention(q, keys, values, numbers, numbers, window=window, cap=cap)[0]
    if group is None:
        if columns.consecutive and q.shape[1] == 1:  # the last columns are the window
            recent = slice(0 if window is None else max(0, keys.shape[1] - window), None)
            return attend_to_all(q, keys[:, recent], values[:, recent], cap)
        return attend_to_keys(q, keys, values, positions, columns.places, window, cap)[0]
    sizes = group.all_gather(backend_of(q).xp.asarray([q.shape[1]]), label=sh.label).tolist()
    q = group.all_gather(q, 1, sizes=sizes, label=sh.label)
    positions = group.all_gather(positions, 1, sizes=sizes, label=sh.label)
    mixed, log_sums = attend_to_keys(q, keys, values, positions, columns.places, window, cap)
    top = group.all_reduce(log_sums, "max", label=sh.label)
    mixed = group.all_reduce(merge_parts(mixed, log_sums, top), label=sh.label)
    mixed[..., :-1] /= mixed[..., -1:]
    first = sum(sizes[: group.rank])
    return backend_of(q).xp.ascontiguousarray(mixed[:, first : first + sizes[group.rank], ..., :-1])


# --- Columns of a cache: keys and values of the same positions, of all layers that need these positions alike


GROWTH = 1.5  #: times the room that was there, where more is needed
WASTE = 2  #: columns for each that some sequence needs, beyond which unused ones are removed


class Columns:
    """Keys and values [b t ...] by layer, of layers whose queries see the same ``window`` of positions; None: all.

    A column has one position of each sequence, or none, and is hidden from it. When there are many that nobody needs,
    they are removed, and with them what is beyond the window of every query to come: with a window of w positions there
    are never more than 2 w columns beside those of the last call.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self._room: dict[str, list[Array]] = {}  # by layer: arrays[b t ...], of which the first columns are used
        self._places: Any = None  # [b t]: which position of its sequence each column has; HIDDEN: none
        self._dropped: list[int] = []  # by sequence: so many of its first positions are here no more
        self.used = 0  #: columns, with those of the call that is under way
        self._first = 0  # position of the first column, if these are
        self.consecutive = True  #: whether the columns are consecutive positions of all sequences: nothing is hidden

    @property
    def places(self) -> Array:
        """[b t]: which position of its sequence each column has; HIDDEN where it has none."""
        return self._places[:, : self.used]

    def begin(self, places: Array, lengths: Sequence[int]) -> None:
        """More columns, with these positions, places[b s], behind sequences that were so long."""
        xp, new = backend_of(places).xp, places.shape[1]
        needed = max([1, *lengths]) if self.window is None else max(1, min(self.window, max(lengths, default=0)))
        if self.used > WASTE * needed:
            self._drop(lengths)
        if self._places is None:
            self._places, self._dropped = xp.full(places.shape, HIDDEN, xp.int64), [0] * len(places)
        if self.used == 0:
            self._first, self.consecutive = int(places[0, 0]) if places.size else 0, True
        before, self.used = self.used, self.used + new
        if self._places.shape[1] < self.used:
            self._places = _enlarged(self._places, len(places), max(self.used, int(self._places.shape[1] * GROWTH)))
        self._places[:, before : self.used] = places
        expected = xp.arange(self._first + before, self._first + self.used)
        self.consecutive = self.consecutive and bool((places == expected).all())

    def append(self, layer: str, *arrays: Array) -> list[Array]:
        """A layer's arrays[b t ...] with its new columns, arrays[b s ...]."""
        used, new = self.used, arrays[0].shape[1]
        room = self._room.get(layer)
        if room is None:
            room = self._room[layer] = [backend_of(x).xp.empty((len(x), used, *x.shape[2:]), x.dtype) for x in arrays]
        for number, x in enumerate(arrays):
            if room[number].shape[1] < used:
                room[number] = _enlarged(room[number], len(x), max(used, int(room[number].shape[1] * GROWTH)))
            room[number][:, used - new : used] = x
        return [array[:, :used] for array in room]

    def add_empty(self, sequences: int) -> None:
        """So many sequences more, behind the others, of which nothing is here."""
        if self._places is None:
            return
        rows, self.consecutive = len(self._places) + sequences, False
        self._places = _enlarged(self._places, rows, self._places.shape[1], HIDDEN)
        self._dropped += [0] * sequences
        for layer, arrays in self._room.items():
            self._room[layer] = [_enlarged(x, rows, x.shape[1], 0) for x in arrays]  # hidden values must be finite

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these of the sequences, by their numbers, in this order."""
        if self._places is None:
            return
        self._places = self._places[rows]
        self._dropped = [self._dropped[row] for row in rows]
        for layer, arrays in self._room.items():
            self._room[layer] = [array[rows] for array in arrays]

    def check_cut(self, limits: Sequence[int]) -> None:
        """Raise UsageError if a sequence that is cut to its limit would need positions that are here no more."""
        for limit, dropped in zip(limits, self._dropped, strict=True):
            if self.window and dropped and 0 < limit < dropped + self.window - 1:
                raise UsageError(
                    f"a cached sequence cannot be cut to {limit} positions: of its first {dropped}, beyond a window of "
                    f"{self.window}, nothing is left; cut it to none, and read it again"
                )

    def cut(self, limits: Array) -> None:
        """Forget the positions of each sequence from its limit on."""
        if self._places is None:
            return
        self._places[self._places >= limits[:, None]] = HIDDEN
        self._dropped = [min(pair) for pair in zip(self._dropped, limits.tolist(), strict=True)]
        self._compact()

    def _drop(self, lengths: Sequence[int]) -> None:
        """Remove what no query sees that comes behind sequences of these lengths."""
        if self.window is not None:
            xp = backend_of(self._places).xp
            gone = [max(0, length - self.window + 1) for length in lengths]
            self._places[self._places < xp.asarray(gone, xp.int64)[:, None]] = HIDDEN
            self._dropped = [max(pair) for pair in zip(self._dropped, gone, strict=True)]
        self._compact()

    def _compact(self) -> None:
        """Remove columns that no sequence needs: the positions of each move to the front, in order."""
        places, xp = self.places, backend_of(self._places).xp
        order = places.argsort(axis=1, kind="stable")
        self.used = int((places < HIDDEN).sum(axis=1).max()) if places.size else 0
        order = order[:, : self.used]
        rows = xp.arange(len(places))[:, None]
        self._places = xp.ascontiguousarray(places[rows, order])
        for layer, arrays in self._room.items():
            self._room[layer] = [array[rows, order] for array in arrays]
        self._first = int(self._places[0, 0]) if self.used else 0
        self.consecutive = bool((self._places == xp.arange(self._first, self._first + self.used)).all())

    @classmethod
    def joined(cls, several: Sequence[Columns]) -> Columns:
        """The sequences of all of these, one behind the other."""
        made, most = cls(several[0].window), max(columns.used for columns in several)
        xp = backend_of(several[0]._places).xp
        places = [columns.places for columns in several]
        made._places = xp.concatenate([_enlarged(x, len(x), most, HIDDEN) for x in places])
        made._dropped = [dropped for columns in several for dropped in columns._dropped]
        made.used, made._first = most, several[0]._first
        alike = {(columns.used, columns._first, columns.consecutive) for columns in several}
        made.consecutive = alike == {(most, made._first, True)}
        for layer in several[0]._room:
            arrays = [[array[:, : columns.used] for array in columns._room[layer]] for columns in several]
            parts = ([_enlarged(x, len(x), most, 0) for x in of_one] for of_one in arrays)  # hidden, but finite
            made._room[layer] = [xp.concatenate(of_one) for of_one in zip(*parts, strict=True)]
        return made


def _enlarged(x: Array, rows: int, columns: int, fill: int | None = None) -> Array:
    """x[b t ...] with more rows or columns, which hold ``fill``; None: anything."""
    if x.shape[:2] == (rows, columns):
        return x
    y = backend_of(x).xp.empty((rows, columns, *x.shape[2:]), x.dtype)
    if fill is not None:
        y[...] = fill
    y[: x.shape[0], : x.shape[1]] = x
    return y
