"""Columns of a cache: keys and values of the same positions, of all layers that need these positions alike."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_engine.arrays.attention import HIDDEN
from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.errors import UsageError

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
        self._places: Array | None = None  # [b t]: which position of its sequence each column has; HIDDEN: none
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
            self._places = _grown(self._places, max(self.used, int(self._places.shape[1] * GROWTH)))
        self._places[:, before : self.used] = places
        expected = xp.arange(self._first + before, self._first + self.used)
        self.consecutive = self.consecutive and bool((places == expected).all())

    def append(self, layer: str, *arrays: Array) -> list[Array]:
        """A layer's arrays[b t ...] with its new columns, arrays[b s ...]."""
        used, new = self.used, arrays[0].shape[1]
        room = self._room.get(layer)
        if room is None:
            room = self._room[layer] = [_empty(x, used) for x in arrays]
        for number, x in enumerate(arrays):
            if room[number].shape[1] < used:
                room[number] = _grown(room[number], max(used, int(room[number].shape[1] * GROWTH)))
            room[number][:, used - new : used] = x
        return [each[:, :used] for each in room]

    def add_empty(self, sequences: int) -> None:
        """So many sequences more, behind the others, of which nothing is here."""
        if self._places is None:
            return
        rows, self.consecutive = len(self._places) + sequences, False
        self._places = _taller(self._places, rows, HIDDEN)
        self._dropped += [0] * sequences
        for layer, arrays in self._room.items():
            self._room[layer] = [_taller(each, rows, 0) for each in arrays]

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these of the sequences, by their numbers, in this order."""
        if self._places is None:
            return
        self._places = self._places[rows]
        self._dropped = [self._dropped[row] for row in rows]
        for layer, arrays in self._room.items():
            self._room[layer] = [each[rows] for each in arrays]

    def check_cut(self, limits: Sequence[int]) -> None:
        """Raise UsageError if a sequence that is cut to its limit would need positions that are here no more."""
        for limit, dropped in zip(limits, self._dropped, strict=True):
            if dropped and 0 < limit < dropped + self.window - 1:
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
            self._room[layer] = [each[rows, order] for each in arrays]
        self._first = int(self._places[0, 0]) if self.used else 0
        self.consecutive = bool((self._places == xp.arange(self._first, self._first + self.used)).all())

    @classmethod
    def joined(cls, several: Sequence[Columns]) -> Columns:
        """The sequences of all of these, one behind the other."""
        made, most = cls(several[0].window), max(each.used for each in several)
        xp = backend_of(several[0]._places).xp
        made._places = xp.concatenate([_grown(each.places, most, HIDDEN) for each in several])
        made._dropped = [dropped for each in several for dropped in each._dropped]
        made.used, made._first = most, several[0]._first
        alike = {(each.used, each._first, each.consecutive) for each in several}
        made.consecutive = alike == {(most, made._first, True)}
        for layer in several[0]._room:
            arrays = [[each[:, : columns.used] for each in columns._room[layer]] for columns in several]
            parts = ([_grown(each, most, 0) for each in of_one] for of_one in arrays)  # hidden, but finite
            made._room[layer] = [xp.concatenate(of_one) for of_one in zip(*parts, strict=True)]
        return made


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
