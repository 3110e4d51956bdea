"""Where ranks of one node meet: a table in shared memory, in which each rank has an entry for its call and small data.

A group's calls take the table's slots in turn. In call number 9 each rank writes its signature, and its data or where
these lie, to its entry of slot 9 % SLOTS, then CALLED to the word beside it; once all words of the slot say so, all its
entries can be read. A rank that needs nobody's entry any more writes LEFT; a slot is used again when all have left it.
Every word and entry is written by one rank alone and words only grow, so there is nothing to lock.

Data of medium size lie in staging buffers, of which there are fewer than slots, so that the caches hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.agreement.signature import Signature, Signatures, room
from spmd_engine.comm.condition import Condition
from spmd_engine.comm.shared_memory.arena import ALIGNMENT, HEAD, Neighbours
from spmd_engine.comm.shared_memory.cross_memory import Block, RemoteArray
from spmd_engine.comm.shared_memory.futex import Futexes
from spmd_engine.comm.shared_memory.node import Node

if TYPE_CHECKING:
    from spmd_engine.comm.pending import Progress

SLOTS = 8  # calls of a group that can be under way at once; more wait for their turn
SMALL = 1 << 12  # bytes of data that lie in an entry
STAGING = 2  # buffers for larger data of each rank, used in turn as slots are; SLOTS is a multiple
ROOM = 1 << 18  # bytes of data that fit into one, where ranks are few
CALLED, REDUCED, LEFT = 1, 2, 3  # phases of a call, as each rank says them

_STEPS = 4  # words count in steps of a call's phases
_WORDS = 6 * SLOTS + 1  # of each rank: phases, digests, addresses, and whether it comes here no more
NOWHERE = -1  # in place of an arena: not shown

Address = tuple[int, int]  #: whose arena and the offset in it; or -2 - r and the address in rank r's own memory


def room_for_table(neighbours: Neighbours, ranks: int) -> int | None:
    """The offset of room for a table in this rank's arena; None if there is none."""
    neighbours.retire()
    offset = neighbours.own.allocate(size_of_table(ranks))
    if offset is not None:
        neighbours.view(neighbours.local_rank, offset, (_words(ranks),), np.dtype(np.uint8)).fill(0)
    return offset


def size_of_table(ranks: int) -> int:
    """Bytes of a table for that many ranks."""
    return _words(ranks) + SLOTS * ranks * _entry(ranks) + STAGING * ranks * room_of(ranks)


def table_on(node: Node, members: Sequence[int], rank: int, offset: int = HEAD) -> SlotTable:
    """The table of ``members``, of which this is number ``rank``: at ``offset`` in the arena of the first of them."""
    local, neighbours = [node.ranks.index(member) for member in members], node.neighbours
    memory = memoryview(neighbours.memories[local[0]])[offset : offset + size_of_table(len(local))]
    home = offset if rank == 0 else None
    return SlotTable(memory, rank, local, neighbours, node.futexes, home)


class SlotTable:
    """The table of a group of ranks on one node, as one of them (``rank``) sees it.

    ``memory`` is zero at first, and no call has been made. ``local_ranks`` are the group's ranks by their numbers on
    the node; ``home`` is its offset if it lies in this rank's own arena.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        local_ranks: Sequence[int],
        neighbours: Neighbours,
        waker: Futexes,
        home: int | None = None,
    ) -> None:
        n, self._home = len(local_ranks), home
        self.room = room_of(n)  #: bytes of data that a call can bring along
        self.rank, self.size, self.neighbours, self.local_ranks = rank, n, neighbours, list(local_ranks)
        self.ranks: Sequence[int] = range(n)  #: the numbers of its ranks in the communicator whose table this is
        self._others = [local for r, local in enumerate(local_ranks) if r != rank]
        self._waker, self._weak = waker, waker.weak
        words = _pieces(memory[: 8 * n * _WORDS].cast("q"), n, _WORDS)
        self._phases, self._digests, self._closed = words[:SLOTS], words[SLOTS : 2 * SLOTS], words[-1]
        addresses = [words[start : start + 2] for start in range(2 * SLOTS, 6 * SLOTS, 2)]
        self._data_at, self._results_at = addresses[:SLOTS], addresses[SLOTS:]
        entries = _pieces(memory[_words(n) :], _entry(n), SLOTS * n)
        staging = _pieces(memory[_words(n) + SLOTS * n * _entry(n) :], self.room, STAGING * n)
        self._entries = [entries[slot * n : (slot + 1) * n] for slot in range(SLOTS)]
        self._staging = [staging[each * n : (each + 1) * n] for each in range(STAGING)]
        self._signatures = [[entry[: _data(n)] for entry in slot] for slot in self._entries]

    # --- phases

    def reached(self, number: int, phase: int) -> bool:
        """Whether all ranks have come as far as ``phase`` of call ``number``."""
        if min(self._phases[number % SLOTS].tolist()) < number * _STEPS + phase:
            return False
        if self._weak:
            self._waker.fence()
        return True

    def _has_begun(self, number: int, rank: int) -> bool:
        """Whether ``rank``, of the communicator, takes part in call ``number``, or has, or need not."""
        if number <= 0 or rank not in self.ranks:
            return True
        return self._phases[number % SLOTS][self.ranks.index(rank)] >= number * _STEPS + CALLED

    def is_free(self, number: int, inline: int) -> bool:
        """Whether the slot of call ``number`` can be written to, and the staging buffer if it brings so many bytes."""
        for earlier in range(number - SLOTS, number, STAGING if inline > SMALL else SLOTS):
            if earlier > 0 and not self.reached(earlier, LEFT):
                return False
        return True

    def wait_until_free(self, number: int, inline: int) -> Iterator[Condition]:
        """Go on when it is."""
        if not self.is_free(number, inline):
            yield Condition(partial(self.is_free, number, inline), partial(self._has_begun, number - SLOTS))

    def say(self, number: int, phase: int) -> None:
        """This rank has come as far as ``phase``. Who comes last wakes those who sleep."""
        words, word, waker = self._phases[number % SLOTS], number * _STEPS + phase, self._waker
        if words[self.rank] >= word:  # said before: a later call may have this slot by now
            return
        if self._weak:
            waker.fence()
        words[self.rank] = word
        if waker.anyone_sleeps() and self.reached(number, phase):
            waker.wake(self._others)

    def come_to(self, number: int, phase: int) -> Iterator[Condition]:
        """Say that this rank has come as far as ``phase``, and go on when all have."""
        self.say(number, phase)
        if not self.reached(number, phase):
            yield Condition(partial(self.reached, number, phase), partial(self._has_begun, number))

    # --- what a rank calls and shows

    def write(
        self,
        number: int,
        signature: Signature,
        data: np.ndarray | None,
        at: Address | None = None,
        result: Address | None = None,
    ) -> None:
        """Fill this rank's entry: with ``data`` if they are to be inline, else with where they lie, ``at``.

        ``result``: where the others may put, or find, the part of a result that is theirs or this rank's.
        """
        slot = number % SLOTS
        self._sign(slot, signature)
        if signature.inline:
            self._view(slot, self.rank, signature)[...] = data
        for words, address in (self._data_at[slot], at), (self._results_at[slot], result):
            words[0][self.rank], words[1][self.rank] = address or (NOWHERE, 0)

    def read(self, number: int, expected: Signatures, own: np.ndarray | None) -> tuple[Signatures, list[Block | None]]:
        """All ranks' signatures, ``expected`` itself if these are, and their data where they lie (None: not shown).

        ``own``: this rank's, if it has shown them.
        """
        slot, found = number % SLOTS, expected
        if self._digests[slot].tolist() != expected.digests:
            found = Signatures([Signature.unpack(each.tobytes()) for each in self._signatures[slot]])
        blocks: list[Block | None] = list(found.inline.get(slot) or self._lay_out(slot, found))
        for rank, signature in enumerate(found.by_rank):
            if not signature.inline and signature.shape is not None:
                mine = rank == self.rank and own is not None
                blocks[rank] = own if mine else self._block(slot, rank, signature)
        return found, blocks

    def meet_at_once(
        self, number: int, expected: Signatures, data: np.ndarray | None, progress: Progress, spin_tests: int
    ) -> list[Block | None] | None:
        """Write and read, if the others are not far and call what is ``expected``: everyone's data where they lie.

        None: not so, or not within so many tests. Then the call is to be begun again, and to show the same.
        """
        slot, signature, small = number % SLOTS, expected.by_rank[self.rank], expected.inline_all
        words, inline, left = self._phases[slot], signature.inline, (number - SLOTS) * _STEPS + LEFT
        called = number * _STEPS + CALLED
        few = inline <= SMALL and not self._weak  # then this one look is enough
        free = min(words.tolist()) >= left if few else self.is_free(number, inline)
        if not free and not progress.spin(partial(self.is_free, number, inline), spin_tests):
            return None
        if small:
            blocks = expected.inline.get(slot) or self._lay_out(slot, expected)
            self._sign(slot, signature)
            if inline:
                blocks[self.rank][...] = data
        else:
            self.write(number, signature, data, self.address(data) if data is not None and not inline else None)
        self.say(number, CALLED)
        if min(words.tolist()) < called and not progress.spin(lambda: min(words.tolist()) >= called, spin_tests):
            return None
        if self._weak:
            self._waker.fence()
        if small:
            return blocks if self._digests[slot].tolist() == expected.digests else None
        found, blocks = self.read(number, expected, data)
        return blocks if found is expected and self.shown(found, blocks) else None

    def leave_at_once(self, number: int) -> None:
        """As ``say`` of LEFT, where nobody sleeps until then but for a slot: of a later call, which will wake it."""
        if self._weak:
            self._waker.fence()
        self._phases[number % SLOTS][self.rank] = number * _STEPS + LEFT

    @staticmethod
    def shown(found: Signatures, blocks: Sequence[Block | None]) -> bool:
        """Whether all data can be read, by all ranks."""
        for block, each in zip(blocks, found.by_rank, strict=True):
            if block is None and each.shape is not None:
                return False
        return True

    def _sign(self, slot: int, signature: Signature) -> None:
        """Write this rank's signature, unless it is there from an earlier call."""
        digests = self._digests[slot]
        if digests[self.rank] != signature.digest:
            self._signatures[slot][self.rank][: len(signature.packed)] = signature.packed
            digests[self.rank] = signature.digest

    def _lay_out(self, slot: int, found: Signatures) -> list[np.ndarray | None]:
        views = [self._view(slot, rank, each) if each.inline else None for rank, each in enumerate(found.by_rank)]
        found.inline[slot] = views
        return views

    def results(self, number: int, shape: Sequence[int], dtype: np.dtype) -> list[Block | None]:
        """Where everyone's result is to come, of this shape."""
        words = self._results_at[number % SLOTS]
        return [self._at(words, rank, shape, dtype) for rank in range(self.size)]

    def result_arenas(self, number: int) -> list[int]:
        """Whose arenas these are in, as of an Address; NOWHERE: not shown."""
        return self._results_at[number % SLOTS][0].tolist()

    def _block(self, slot: int, rank: int, signature: Signature) -> Block | None:
        if 0 in signature.shape and signature.host:
            return np.empty(*signature.array_type)
        return self._at(self._data_at[slot], rank, *signature.array_type)

    def _at(self, words: Sequence[memoryview], rank: int, shape: Sequence[int], dtype: np.dtype) -> Block | None:
        local, offset = words[0][rank], words[1][rank]
        if local >= 0:
            return self.neighbours.view(local, offset, shape, dtype)
        return None if local == NOWHERE else RemoteArray(self.neighbours.cross_memory, -2 - local, offset, shape, dtype)

    def _view(self, slot: int, rank: int, signature: Signature) -> np.ndarray:
        shape, dtype = signature.array_type
        if signature.inline > SMALL:
            return np.ndarray(shape, dtype, self._staging[slot % STAGING][rank])
        return np.ndarray(shape, dtype, self._entries[slot][rank], _data(self.size))

    def address(self, x: np.ndarray, sliced: bool = False) -> Address | None:
        """Where the others find contiguous ``x``: in this rank's arena, or in its own memory if they can read that:
        not to have ``sliced`` along another axis than the first."""
        offset = self.neighbours.offset(x)
        if offset is not None:
            return self.neighbours.local_rank, offset
        reads = self.neighbours.cross_memory is not None and not sliced
        return (-2 - self.neighbours.local_rank, address_of(x)) if reads else None

    def close(self) -> bool:
        """This rank comes here no more. False, and to be asked again, while others may still read what is its own."""
        self._closed[self.rank] = 1
        if self._home is None:
            return True
        if not all(self._closed):
            return False
        self.neighbours.own.release(self._home, size_of_table(self.size))
        return True


def _words(ranks: int) -> int:
    return _aligned(8 * ranks * _WORDS)


def _data(ranks: int) -> int:
    return _aligned(room(ranks))


def _entry(ranks: int) -> int:
    return _data(ranks) + SMALL


def room_of(ranks: int) -> int:
    """Bytes of data that a call can bring along, of so many ranks."""
    return max(min(ROOM, (1 << 22) // ranks // ALIGNMENT * ALIGNMENT), SMALL)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pieces(memory: memoryview, size: int, count: int) -> list[memoryview]:
    return [memory[i * size : (i + 1) * size] for i in range(count)]
