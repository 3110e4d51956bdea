"""The KV cache: keys and values of the earlier positions of growing sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_engine.arguments import checked
from spmd_engine.arrays.attention import HIDDEN, attend_to_all, attend_to_keys, causal_attention, merge_parts
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.precision import accumulated_in, rounded
from spmd_engine.arrays.rotary import Rope, Rotation, rotate
from spmd_engine.errors import UsageError
from spmd_engine.layers.attention.qk_norm_rope import Rotary
from spmd_engine.sharding.shards import Shards


class Cache:
    """Keys and values of this rank's sequences, by layer: heads are sharded as in the layers, sequences as b, positions
    as s.

    Sequences may have different ``lengths``. Each call of a model with this cache appends a column for each new
    position to all of them; in a sequence that grows by fewer, the remaining columns are hidden. Sequences can be
    reordered, repeated and dropped (``select``), shortened (``truncate``) and concatenated (``joined``). Layers with a
    window keep no more positions than it needs: see ``Columns``. Every rank has a cache for its heads, its positions
    and its pipeline stage; all ranks must make the same calls.
    """

    @checked({"lengths": 0})
    def __init__(self, lengths: Sequence[int] | None = None) -> None:
        """``lengths`` of sequences whose columns are added next: see ``unpack_cache``."""
        self.by_window: dict[int | None, Columns] = {}  #: the columns of all layers with the same window
        self._places: Array | None = None  # positions of the current call's columns
        self.rotations: dict[Rotary, Rotation] = {}  #: rotations of that call's positions
        self._lengths = list(lengths) if lengths is not None else None
        self._growth: list[int] = []  # by sequence: new positions of that call, on all ranks

    @property
    def lengths(self) -> list[int]:
        """How many positions each sequence has, on all ranks that shard s."""
        return list(self._lengths or [])

    def check(self, sequences: int) -> list[int]:
        """The lengths of the sequences; raises UsageError if their number is not ``sequences``."""
        if self._lengths is None:
            self._lengths = [0] * sequences
        if len(self._lengths) != sequences:
            raise UsageError(f"the cache has {len(self._lengths)} sequences on this rank, the inputs {sequences}")
        return self.lengths

    def add_empty(self, sequences: int) -> None:
        """Append empty sequences."""
        self._lengths = self.lengths + [0] * sequences
        for columns in self.by_window.values():
            columns.add_empty(sequences)

    def begin(self, places: Array, growth: Sequence[int]) -> None:
        """Begin a call of the model. It appends columns with the positions places[b s] on this rank (HIDDEN: none), and
        ``growth`` positions to each sequence, on all ranks."""
        self.check(len(places))
        for columns in self.by_window.values():
            columns.begin(places, self.lengths)
        self._places, self._growth, self.rotations = places, list(growth), {}

    def end(self) -> None:
        """End the call: the sequences now include the appended positions."""
        self._lengths = [length + more for length, more in zip(self.lengths, self._growth, strict=True)]
        self._growth = []

    def columns(self, window: int | None) -> Columns:
        """The columns of layers with this window, in the current call."""
        if window not in self.by_window:  # in the first call
            self.by_window[window] = Columns(window)
            self.by_window[window].begin(self._places, self.lengths)
        return self.by_window[window]

    def select(self, rows: Sequence[int]) -> None:
        """Keep the sequences with these numbers, in this order; a number may be repeated."""
        rows = list(rows)
        if rows == list(range(len(self.lengths))):
            return
        self._lengths = [self.lengths[row] for row in rows]
        if not rows:  # new sequences begin without hidden columns
            self.by_window = {}
        for columns in self.by_window.values():
            columns.select(rows)

    def truncate(self, length: int | Sequence[int]) -> None:
        """Drop the positions of all sequences, or of each, from number ``length`` on.

        Raises UsageError if a window would then need positions that are dropped already.
        """
        limits = [length] * len(self.lengths) if isinstance(length, int) else list(length)
        if not self._lengths or all(limit >= current for limit, current in zip(limits, self.lengths, strict=True)):
            return
        limits = [min(pair) for pair in zip(limits, self.lengths, strict=True)]
        for columns in self.by_window.values():
            columns.check_cut(limits)
        for columns in self.by_window.values():
            columns.cut(backend_of(columns.places).xp.asarray(limits))
        self._lengths = limits

    @classmethod
    def joined(cls, caches: Sequence[Cache]) -> Cache:
        """A new cache with the sequences of several caches, in this order."""
        result = cls([length for cache in caches for length in cache.lengths])
        for window in caches[0].by_window:
            result.by_window[window] = Columns.joined([cache.by_window[window] for cache in caches])
        return result


def cached_attention(
    sh: Shards,
    cache: Cache,
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    window: int | None = None,
    cap: float | None = None,
    rope: Rope | None = None,
) -> Array:
    """Causal attention of q[b s h k], at positions[b s], to all keys of the cached sequences, including these k and v;
    with a ``window``, only to that many positions, up to the query's own; with a ``cap`` of scores. With a ``rope``, q
    and k are rotated by it.

    If s is sharded, each rank has its columns of the cache. Queries are gathered, every rank attends with all of them
    to its own keys, and the results are summed, weighted by their sums of exponentials: for one new token, a rank sends
    the mixed values of its query once, never keys.
    """
    group = sh.group_of("s")
    columns = cache.columns(window)
    was_empty = k.shape[1] == columns.used and group is None
    end = columns.used
    if group is None and columns.consecutive and q.shape[1] == 1:  # the last columns are the window
        keys, values = columns.room(sh.label, k, v)
        return attend_to_all(q, k, v, keys, values, slice(max(0, end - (window or end)), end), cap, rope)
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    keys, values = (array[:, :end] for array in columns.append(sh.label, k, v))
    if was_empty and q.shape[1] > 1:  # the cache was empty: hidden columns come after visible ones
        numbers = backend_of(q).xp.arange(q.shape[1])
        return causal_attention(q, keys, values, numbers, numbers, window=window, cap=cap)[0]
    if group is None:
        return attend_to_keys(q, keys, values, positions, columns.places, window, cap)[0]
    sizes = group.all_gather(backend_of(q).xp.asarray([q.shape[1]]), label=sh.label).tolist()
    dtype, q = q.dtype, group.all_gather(q, 1, sizes=sizes, label=sh.label)
    positions = group.all_gather(positions, 1, sizes=sizes, label=sh.label)
    wide = accumulated_in(dtype)  # merged before it is rounded
    mixed, log_sums = attend_to_keys(q, keys, values, positions, columns.places, window, cap, wide)
    top = group.all_reduce(log_sums, "max", label=sh.label)
    mixed = group.all_reduce(merge_parts(mixed, log_sums, top), label=sh.label)
    mixed[..., :-1] /= mixed[..., -1:]
    first = sum(sizes[: group.rank])
    return backend_of(q).xp.ascontiguousarray(rounded(mixed[:, first : first + sizes[group.rank], ..., :-1], dtype))


# --- Columns of a cache: keys and values of the same positions, for all layers with the same window


GROWTH = 1.5  #: factor of the allocated columns when more are needed
LEAST = 16  #: columns that are allocated then
WASTE = 2  #: columns per needed column above which unused ones are removed


class Columns:
    """Keys and values [b t ...] by layer, for layers with the same ``window`` of positions; None: all.

    A column has one position of each sequence, or none, and is then hidden from it. When many columns are unused, they
    are removed, together with positions beyond the window of every later query: with a window of w positions there
    are never more than 2 w columns besides those of the last call.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self._room: dict[str, list[Array]] = {}  # by layer: arrays[b t ...], of which the first columns are used
        self._places: Any = None  # [b t]: the position of each column in its sequence; HIDDEN: none
        self.dropped: list[int] = []  #: by sequence: the number of its first positions that were dropped
        self.used = 0  #: columns, with those of the current call
        self._first = 0  # position of the first column, if columns are consecutive
        self.consecutive = True  #: whether columns are consecutive positions of all sequences, none hidden

    @property
    def places(self) -> Array:
        """[b t]: the position of each column in its sequence; HIDDEN if it has none."""
        return self._places[:, : self.used]

    def begin(self, places: Array, lengths: Sequence[int]) -> None:
        """Append columns with the positions places[b s] to sequences of these ``lengths``."""
        xp, new = backend_of(places).xp, places.shape[1]
        needed = max([1, *lengths]) if self.window is None else max(1, min(self.window, max(lengths, default=0)))
        if self.used > WASTE * needed:
            self._drop(lengths)
        if self._places is None:
            self._places, self.dropped = xp.full(places.shape, HIDDEN, xp.int64), [0] * len(places)
        if self.used == 0:
            self._first, self.consecutive = int(places[0, 0]) if places.size else 0, True
        before, self.used = self.used, self.used + new
        if self._places.shape[1] < self.used:
            self._places = _enlarged(self._places, len(places), max(self.used, int(self._places.shape[1] * GROWTH)))
        self._places[:, before : self.used] = places
        expected = xp.arange(self._first + before, self._first + self.used)
        self.consecutive = self.consecutive and bool((places == expected).all())

    def append(self, layer: str, *arrays: Array) -> Sequence[Array]:
        """Append the new columns arrays[b s ...] of a layer; returns its ``room``."""
        room, new = self.room(layer, *arrays), slice(self.used - arrays[0].shape[1], self.used)
        for array, x in zip(room, arrays, strict=True):
            array[:, new] = x
        return room

    def room(self, layer: str, *arrays: Array) -> Sequence[Array]:
        """The arrays[b t ...] of a layer, like those given, with room for the first ``used`` columns; the caller writes
        the new ones."""
        used, room = self.used, self._room.get(layer)
        if room is None:
            room = self._room[layer] = [backend_of(x).xp.empty((len(x), used, *x.shape[2:]), x.dtype) for x in arrays]
        elif room[0].shape[1] < used:
            columns = max(used, int(room[0].shape[1] * GROWTH), LEAST)
            room = self._room[layer] = [_enlarged(array, len(array), columns) for array in room]
        return room

    def add_empty(self, sequences: int) -> None:
        """Append empty sequences."""
        if self._places is None:
            return
        rows, self.consecutive = len(self._places) + sequences, False
        self._places = _enlarged(self._places, rows, self._places.shape[1], HIDDEN)
        self.dropped += [0] * sequences
        for layer, arrays in self._room.items():
            self._room[layer] = [_enlarged(x, rows, x.shape[1], 0) for x in arrays]  # hidden values must be finite

    def select(self, rows: Sequence[int]) -> None:
        """Keep the sequences with these numbers, in this order."""
        if self._places is None:
            return
        self._places = self._places[rows]
        self.dropped = [self.dropped[row] for row in rows]
        for layer, arrays in self._room.items():
            self._room[layer] = [array[rows] for array in arrays]

    def check_cut(self, limits: Sequence[int]) -> None:
        """Raise UsageError if a sequence truncated to its limit would need dropped positions."""
        for limit, dropped in zip(limits, self.dropped, strict=True):
            if self.window and dropped and 0 < limit < dropped + self.window - 1:
                raise UsageError(
                    f"a cached sequence cannot be truncated to {limit} positions: its first {dropped}, beyond a "
                    f"window of {self.window}, are dropped; truncate it to 0, and compute it again"
                )

    def cut(self, limits: Array) -> None:
        """Drop the positions of each sequence from its limit on."""
        if self._places is None:
            return
        self._places[self._places >= limits[:, None]] = HIDDEN
        self.dropped = [min(pair) for pair in zip(self.dropped, limits.tolist(), strict=True)]
        self._compact()

    def _drop(self, lengths: Sequence[int]) -> None:
        """Remove positions that no later query of sequences with these lengths sees."""
        if self.window is not None:
            xp = backend_of(self._places).xp
            dropped = [max(0, length - self.window + 1) for length in lengths]
            self._places[self._places < xp.asarray(dropped, xp.int64)[:, None]] = HIDDEN
            self.dropped = [max(pair) for pair in zip(self.dropped, dropped, strict=True)]
        self._compact()

    def _compact(self) -> None:
        """Remove unused columns: the positions of each sequence move to the front, in order."""
        places, xp = self.places, backend_of(self._places).xp
        order = places.argsort(axis=1, kind="stable")
        self.used = int((places < HIDDEN).sum(axis=1).max()) if places.size else 0
        order = order[:, : self.used]
        rows = xp.arange(len(places))[:, None]
        self._places = xp.ascontiguousarray(places[rows, order])
        for layer, arrays in self._room.items():
            self._room[layer] = [array[rows, order] for array in arrays]
        self._learn_order()

    def _learn_order(self) -> None:
        """Whether all columns are used, and consecutive."""
        xp = backend_of(self._places).xp
        self._first = int(self._places[0, 0]) if self._places.size else 0
        self.consecutive = bool((self._places == xp.arange(self._first, self._first + self.used)).all())

    def packed(self) -> tuple[list[list[int]], dict[str, list[Array]]]:
        """The positions of each sequence, ascending, and arrays[b t ...] by layer; hidden columns come last."""
        self._compact()
        positions = [[place for place in row if place < HIDDEN] for row in self.places.tolist()]
        return positions, {layer: [x[:, : self.used] for x in arrays] for layer, arrays in self._room.items()}

    @classmethod
    def of(
        cls, window: int | None, places: Array, dropped: Sequence[int], room: Mapping[str, Sequence[Array]]
    ) -> Columns:
        """Columns with these places[b t], and with arrays[b t ...] by layer."""
        result = cls(window)
        result._places, result.dropped, result.used = places, list(dropped), places.shape[1]
        result._room = {layer: list(arrays) for layer, arrays in room.items()}
        result._learn_order()
        return result

    @classmethod
    def joined(cls, several: Sequence[Columns]) -> Columns:
        """The sequences of several Columns, in this order."""
        result, most = cls(several[0].window), max(columns.used for columns in several)
        xp = backend_of(several[0]._places).xp
        places = [columns.places for columns in several]
        result._places = xp.concatenate([_enlarged(x, len(x), most, HIDDEN) for x in places])
        result.dropped = [dropped for columns in several for dropped in columns.dropped]
        result.used, result._first = most, several[0]._first
        states = {(columns.used, columns._first, columns.consecutive) for columns in several}
        result.consecutive = states == {(most, result._first, True)}
        for layer in several[0]._room:
            arrays = [[array[:, : columns.used] for array in columns._room[layer]] for columns in several]
            parts = ([_enlarged(x, len(x), most, 0) for x in pieces] for pieces in arrays)  # hidden, but finite
            result._room[layer] = [xp.concatenate(pieces) for pieces in zip(*parts, strict=True)]
        return result


def _enlarged(x: Array, rows: int, columns: int, fill: int | None = None) -> Array:
    """x[b t ...] with more rows or columns, which hold ``fill``; None: undefined values."""
    if x.shape[:2] == (rows, columns):
        return x
    y = backend_of(x).xp.empty((rows, columns, *x.shape[2:]), x.dtype)
    if fill is not None:
        y[...] = fill
    y[: x.shape[0], : x.shape[1]] = x
    return y
