"""What attention remembers of sequences while these grow: keys and values of the positions so far."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_engine.arrays.attention import attend_to_all, attend_to_keys, causal_attention, merge_parts
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.rotary import Turn
from spmd_engine.errors import UsageError
from spmd_engine.layers.cached_columns import Columns
from spmd_engine.layers.rotary import Rotary
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
