"""Where ranks of one node meet: a table in shared memory with a row for each rank's call, small data included.

A group's calls take the table's pages in turn. Call number 9 writes its header, and its data or where they lie, into
this rank's row of page 9 % PAGES, then says SAID in the word beside it; once everyone's words of that page say so,
everyone's rows can be read. A rank that needs nobody's row any more says LEFT; a page is used again when all have
left it. Every word and row is written by one rank alone and words only grow, so there is nothing to lock.

Data of medium size have fewer places to lie in than there are pages, so that the caches hold them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.arena import ALIGNMENT, Neighbours
from spmd_engine.comm.awaited import Until
from spmd_engine.comm.header import Header, Said, room
from spmd_engine.comm.lending import Block, Lent
from spmd_engine.comm.pending import Progress

PAGES = 8  # calls of a group that can be under way at once; more wait for their turn
SMALL = 1 << 12  # bytes of data that lie in a row
DESKS = 2  # places for larger data of each rank, used in turn as pages are; PAGES is a multiple
ROOM = 1 << 18  # bytes of data that fit into one, where ranks are few
SAID, REDUCED, LEFT = 1, 2, 3  # what a rank says of a call, one after the other

_STEPS = 4  # words count in steps of a call's phases
_PLACE = struct.Struct("<qq")  # whose arena and the offset in it; or -2 - r and the address in rank r's own memory
_PLACES = struct.Struct("<qqqq")  # of the data, and of the result
_NOWHERE = (-1, 0)  # not shown
_UNSHOWN = _PLACES.pack(*_NOWHERE, *_NOWHERE)
_DATA, _RESULT = 0, _PLACE.size  # where in a row it says where data lie, and where their result is to come
_HEADER = 64  # where in a row the header begins, behind the place


Place = tuple[int, int]


class Waker(Protocol):
    """What wakes ranks of a node, and keeps their reads and writes in order; see ``bell``."""

    weak: bool  #: whether this machine must be told to keep them in order

    def order(self) -> None:
        """Nothing of what comes after is seen before what came before."""

    def anyone_sleeps(self) -> bool:
        """Whether some rank may not see what was written before this."""

    def ring(self, local_ranks: Sequence[int]) -> None:
        """Wake these."""


def room_for_board(neighbours: Neighbours, ranks: int) -> int | None:
    """The offset of room for a board in this rank's arena; None if there is none."""
    neighbours.retire()
    offset = neighbours.own.allocate(size_of_board(ranks))
    if offset is not None:
        neighbours.view(neighbours.local_rank, offset, (_words(ranks),), np.dtype(np.uint8)).fill(0)
    return offset


def size_of_board(ranks: int) -> int:
    """Bytes of a board for that many ranks."""
    return _words(ranks) + PAGES * ranks * _row(ranks) + DESKS * ranks * _room(ranks)


class Board:
    """The meeting place of a group of ranks on one node, as one of them (``rank``) sees it.

    ``memory`` is zero at first. ``local_ranks`` are the group's ranks by their numbers on the node; ``calls`` how
    many calls they have made before there was a board, ``home`` its offset if it lies in this rank's own arena.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        local_ranks: Sequence[int],
        neighbours: Neighbours,
        waker: Waker,
        *,
        calls: int = 0,
        home: int | None = None,
    ) -> None:
        n, self._calls, self._home = len(local_ranks), calls, home
        self.room = _room(n)  #: bytes of data that a call can bring along
        self.rank, self.size, self.neighbours, self.local_ranks = rank, n, neighbours, list(local_ranks)
        self.ranks: Sequence[int] = range(n)  #: the numbers of its ranks in the communicator whose board this is
        self._others = [local for r, local in enumerate(local_ranks) if r != rank]
        self._waker, self._weak = waker, waker.weak
        words = _pieces(memory[: 8 * n * (2 * PAGES + 1)].cast("q"), n, 2 * PAGES + 1)
        self._pages, self._digests, self._closed = words[:PAGES], words[PAGES:-1], words[-1]
        rows = _pieces(memory[_words(n) :], _row(n), PAGES * n)
        desks = _pieces(memory[_words(n) + PAGES * n * _row(n) :], self.room, DESKS * n)
        self._rows = [[rows[page * n + r] for r in range(n)] for page in range(PAGES)]
        self._desks = [[desks[desk * n + r] for r in range(n)] for desk in range(DESKS)]
        self._headers = [[row[_HEADER : _data(n)] for row in page] for page in self._rows]
        self._staged: list[tuple[int, int, int]] = []  # (call, offset, bytes) of copies that others may still read

    # --- saying and hearing ------------------------------------------------------------------------------

    def reached(self, number: int, phase: int) -> bool:
        """Whether all ranks have come as far as ``phase`` of call ``number``."""
        if min(self._pages[number % PAGES].tolist()) < number * _STEPS + phase:
            return False
        if self._weak:
            self._waker.order()
        return True

    def until(self, number: int, phase: int) -> Until:
        """To be waited for: that all ranks have come as far as ``phase`` of call ``number``."""
        return Until(partial(self.reached, number, phase), partial(self._has_begun, number))

    def until_page(self, number: int, inline: int) -> Until:
        """To be waited for: ``has_page``."""
        return Until(partial(self.has_page, number, inline), partial(self._has_begun, number - PAGES))

    def _has_begun(self, number: int, rank: int) -> bool:
        """Whether ``rank``, of the communicator, takes part in call ``number``, or has, or need not."""
        if number <= self._calls or rank not in self.ranks:
            return True
        return self._pages[number % PAGES][self.ranks.index(rank)] >= number * _STEPS + SAID

    def has_page(self, number: int, inline: int) -> bool:
        """Whether the page of call ``number`` is free to write on, and the desk if it brings that many bytes along."""
        step = DESKS if inline > SMALL else PAGES
        for earlier in range(number - PAGES, number, step):
            if earlier > self._calls and not self.reached(earlier, LEFT):
                return False
        return True

    def say(self, number: int, phase: int) -> None:
        """This rank has come as far as ``phase``. Who comes last wakes those who sleep."""
        words, word, waker = self._pages[number % PAGES], number * _STEPS + phase, self._waker
        if words[self.rank] >= word:  # said before: a later call may have this page by now
            return
        if self._weak:
            waker.order()
        words[self.rank] = word
        if waker.anyone_sleeps() and self.reached(number, phase):
            waker.ring(self._others)

    def write(
        self, number: int, header: Header, data: np.ndarray | None, place: Place | None, result: Place | None = None
    ) -> None:
        """Fill this rank's row: with ``data`` if they are to be inline, else with the ``place`` where they lie.

        ``result``: where the others may put, or find, the part of a result that is theirs or this rank's.
        """
        page = number % PAGES
        self._head(page, header)
        if header.inline:
            self._view(page, self.rank, header)[...] = data
        self._rows[page][self.rank][: _PLACES.size] = _PLACES.pack(*(place or _NOWHERE), *(result or _NOWHERE))

    def hear(self, number: int, expected: Said) -> tuple[Said, list[Block | None]]:
        """What all ranks said, ``expected`` itself if that is it, and their data where they lie (None: not shown)."""
        page, said = number % PAGES, expected
        if self._digests[page].tolist() != expected.digests:
            said = Said([Header.unpack(header.tobytes()) for header in self._headers[page]])
        blocks: list[Block | None] = list(said.inline.get(page) or self._lay_out(page, said))
        for rank, header in enumerate(said.headers):
            if not header.inline and header.shape is not None:
                blocks[rank] = self._block(page, rank, header)
        return said, blocks

    def meet_at_once(
        self, number: int, expected: Said, data: np.ndarray | None, progress: Progress, looks: int
    ) -> list[np.ndarray | None] | None:
        """Write, say and hear, if the others are not far and say what is ``expected``: everyone's inline data.

        None: not so, or not within so many looks. Then the call is to be begun again, as if this had not been.
        """
        header, page = expected.headers[self.rank], number % PAGES
        inline = header.inline
        if not self.has_page(number, inline) and not progress.look(lambda: self.has_page(number, inline), looks):
            return None
        blocks = expected.inline.get(page) or self._lay_out(page, expected)
        self._head(page, header)
        if header.inline:
            blocks[self.rank][...] = data
        elif header.shape is not None:
            self._rows[page][self.rank][: _PLACES.size] = _UNSHOWN
        self.say(number, SAID)
        words, word = self._pages[page], number * _STEPS + SAID
        if min(words.tolist()) < word and not progress.look(lambda: min(words.tolist()) >= word, looks):
            return None
        if self._weak:
            self._waker.order()
        return blocks if self._digests[page].tolist() == expected.digests else None

    def _head(self, page: int, header: Header) -> None:
        """Write this rank's header, unless it is there from an earlier call."""
        digests = self._digests[page]
        if digests[self.rank] != header.digest:
            self._headers[page][self.rank][: len(header.packed)] = header.packed
            digests[self.rank] = header.digest

    def _lay_out(self, page: int, said: Said) -> list[np.ndarray | None]:
        views = [self._view(page, rank, header) if header.inline else None for rank, header in enumerate(said.headers)]
        said.inline[page] = views
        return views

    def results(self, number: int, header: Header) -> list[Block | None]:
        """Where everyone's result is to come."""
        return [self._place(number % PAGES, rank, header, _RESULT) for rank in range(self.size)]

    def _block(self, page: int, rank: int, header: Header) -> Block | None:
        if 0 in header.shape:
            return np.empty(*header.array_type)
        return self._place(page, rank, header, _DATA)

    def _place(self, page: int, rank: int, header: Header, where: int) -> Block | None:
        local, offset = _PLACE.unpack_from(self._rows[page][rank], where)
        if local >= 0:
            return self.neighbours.view(local, offset, *header.array_type)
        return None if local == -1 else Lent(self.neighbours.lender, -2 - local, offset, *header.array_type)

    def _view(self, page: int, rank: int, header: Header) -> np.ndarray:
        shape, dtype = header.array_type
        if header.inline > SMALL:
            return np.ndarray(shape, dtype, self._desks[page % DESKS][rank])
        return np.ndarray(shape, dtype, self._rows[page][rank], _data(self.size))

    # --- data that do not fit into a row -----------------------------------------------------------------

    def place_of(self, x: np.ndarray, lend: bool = False) -> Place | None:
        """Where the others find contiguous ``x``: in this rank's arena, or if it may ``lend`` it, in its own memory."""
        offset = self.neighbours.offset(x)
        if offset is not None:
            return self.neighbours.local_rank, offset
        return (-2 - self.neighbours.local_rank, address_of(x)) if lend and self.neighbours.lender else None

    def stage(self, number: int, x: np.ndarray) -> Place | None:
        """Copy ``x`` to where the others can read it until all have left this call; None if there is no room."""
        self.tidy()
        if (offset := self.neighbours.own.allocate(x.nbytes)) is None:
            return None
        self._staged.append((number, offset, x.nbytes))
        self.neighbours.view(self.neighbours.local_rank, offset, x.shape, x.dtype)[...] = x
        return self.neighbours.local_rank, offset

    def tidy(self) -> None:
        """Give back copies that nobody reads any more."""
        while self._staged and self.reached(self._staged[0][0], LEFT):
            _, offset, size = self._staged.pop(0)
            self.neighbours.own.release(offset, size)

    # --- the end -----------------------------------------------------------------------------------------

    def close(self) -> bool:
        """This rank comes here no more. False, and to be asked again, while others may still read what is its own."""
        self.tidy()
        if self._staged:
            return False
        self._closed[self.rank] = 1
        if self._home is None:
            return True
        if not all(self._closed):
            return False
        self.neighbours.own.release(self._home, size_of_board(self.size))
        return True


def _words(ranks: int) -> int:
    return _aligned(8 * ranks * (2 * PAGES + 1))


def _data(ranks: int) -> int:
    return _aligned(_HEADER + room(ranks))


def _row(ranks: int) -> int:
    return _data(ranks) + SMALL


def _room(ranks: int) -> int:
    return max(min(ROOM, (1 << 22) // ranks // ALIGNMENT * ALIGNMENT), SMALL)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pieces(memory: memoryview, size: int, count: int) -> list[memoryview]:
    return [memory[i * size : (i + 1) * size] for i in range(count)]
