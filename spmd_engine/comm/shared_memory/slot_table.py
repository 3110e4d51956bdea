"""The slot table of a group on one node: shared memory in which each rank has an entry for its call and small data.

A group's calls take the table's slots in turn. In call number 9 each rank writes its signature, and its data or their
address, to its entry of slot 9 % SLOTS, then CALLED to its phase word; when all words of the slot are CALLED, all its
entries can be read. A rank that needs no other entry writes RELEASED; a later call uses the slot when all ranks have
released it. Only one rank writes each word and entry, and words only grow, so no locks are needed.

Data of medium size are in staging buffers, which are fewer than slots, so that they stay in the caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spmd_engine.arrays.memory import address_of
from spmd_engine.comm.agreement.signature import Signature, Signatures, room
from spmd_engine.comm.pending import Condition
from spmd_engine.comm.shared_memory.arena import ALIGNMENT, HEAD, Neighbours, Node, aligned
from spmd_engine.comm.shared_memory.cross_memory import Block, RemoteArray
from spmd_engine.comm.shared_memory.futex import Waker

SLOTS = 8  # calls of a group that can be in progress at once; further calls wait
SMALL = 1 << 12  # bytes of data in an entry
STAGING = 2  # staging buffers of each rank for larger data, used in turn; divides SLOTS
ROOM = 1 << 18  # most bytes of a staging buffer; fewer for many ranks
CALLED, REDUCED, RELEASED = -2, -1, 0  # phases of a call, as each rank writes them; call 0 is released from the start

_STEPS = 4  # words count in steps of a call's phases
_WORDS = 6 * SLOTS + 1  # of each rank: phases, digests, addresses, and a flag: it has closed the table
UNREADABLE = -1  # in place of an arena: the other ranks cannot read the array

Address = tuple[int, int]  #: local rank of an arena and the offset in it; or -2 - r and the address in r's own memory


@dataclass(slots=True)
class Entries:
    """The contents of the entries of a node's ranks for one call; the same object for inline data in the same slot."""

    signatures: Signatures
    blocks: list[Any]  #: arrays of all ranks in place (Block); None: unreadable
    exposed: bool = False  #: whether other ranks may read or write memory of this rank outside the table
    agreed: Any = None  #: what follows from them, once the ranks have agreed: see ``call_agreement``

    @property
    def readable(self) -> bool:
        """Whether every rank can read all data."""
        for block, signature in zip(self.blocks, self.signatures.by_rank, strict=True):
            if block is None and signature.shape is not None:
                return False
        return True


def room_for_table(neighbours: Neighbours, ranks: int) -> int | None:
    """Allocate a table in this rank's arena. Returns its offset; None if there is no room."""
    neighbours.retire()
    offset = neighbours.own.allocate(size_of_table(ranks))
    if offset is not None:
        neighbours.view(neighbours.local_rank, offset, (_words_size(ranks),), np.dtype(np.uint8)).fill(0)
    return offset


def size_of_table(ranks: int) -> int:
    """Bytes of a table for ``ranks`` ranks."""
    return _words_size(ranks) + SLOTS * ranks * _entry_size(ranks) + STAGING * ranks * room_of(ranks)


def table_on(node: Node, members: Sequence[int], rank: int, offset: int = HEAD) -> SlotTable:
    """The table of ``members``, in which this is rank ``rank``, at ``offset`` in the first member's arena."""
    local, neighbours = [node.ranks.index(member) for member in members], node.neighbours
    memory = memoryview(neighbours.memories[local[0]])[offset : offset + size_of_table(len(local))]
    table = SlotTable(memory, rank, local, neighbours, node.futexes)
    table.home = offset if rank == 0 else None
    return table


class SlotTable:
    """The slot table on one ``rank`` of its group.

    ``memory`` must be zero initially. ``local_ranks``: the group's ranks by their numbers on the node.
    """

    home: int | None = None  #: its offset if it lies in this rank's arena

    def __init__(
        self, memory: memoryview, rank: int, local_ranks: Sequence[int], neighbours: Neighbours, waker: Waker
    ) -> None:
        n = len(local_ranks)
        self.room = room_of(n)  #: bytes of data that a call can carry inline
        self.rank, self.size, self.neighbours = rank, n, neighbours
        self.ranks: Sequence[int] = range(n)  #: the group's ranks by their numbers in the communicator
        self._others = [local for r, local in enumerate(local_ranks) if r != rank]
        self._waker, self._weak = waker, waker.weak
        words = _pieces(memory[: 8 * n * _WORDS].cast("q"), n, _WORDS)
        self._phases, self._digests, self._closed = words[:SLOTS], words[SLOTS : 2 * SLOTS], words[-1]
        addresses = [words[start : start + 2] for start in range(2 * SLOTS, 6 * SLOTS, 2)]
        self._data_at, self._results_at = addresses[:SLOTS], addresses[SLOTS:]
        entries = _pieces(memory[_words_size(n) :], _entry_size(n), SLOTS * n)
        staging = _pieces(memory[_words_size(n) + SLOTS * n * _entry_size(n) :], self.room, STAGING * n)
        self._entries = [entries[slot * n : (slot + 1) * n] for slot in range(SLOTS)]
        self._staging = [staging[i * n : (i + 1) * n] for i in range(STAGING)]
        self._signatures = [[entry[: _signature_size(n)] for entry in slot] for slot in self._entries]

    # --- phases

    def all_reached(self, number: int, phase: int) -> bool:
        """Whether all ranks have reached ``phase`` of call ``number``."""
        return self._all_reached(self._phases[number % SLOTS], number * _STEPS + phase)

    def _all_reached(self, words: memoryview, least: int) -> bool:
        for word in words.tolist():  # for few ranks, in half the time of ``min``
            if word < least:
                return False
        if self._weak:
            self._waker.fence()
        return True

    def _has_begun(self, number: int, rank: int) -> bool:
        """Whether ``rank`` of the communicator has begun call ``number``, or takes no part in it."""
        if rank not in self.ranks:
            return True
        return self._phases[number % SLOTS][self.ranks.index(rank)] >= number * _STEPS + CALLED

    def is_free(self, number: int, inline: int) -> bool:
        """Whether call ``number`` can use its slot, and the staging buffer if ``inline`` bytes need it."""
        for earlier in range(number - SLOTS, number, STAGING if inline > SMALL else SLOTS):
            if not self.all_reached(earlier, RELEASED):
                return False
        return True

    def set_phase(self, number: int, phase: int) -> None:
        """Record that this rank has reached ``phase``. The last rank wakes those that sleep."""
        words, word = self._phases[number % SLOTS], number * _STEPS + phase
        if words[self.rank] < word:  # else already set: a later call may use this slot
            self._set(words, word)

    def _set(self, words: memoryview, word: int) -> None:
        if self._weak:
            self._waker.fence()
        words[self.rank] = word
        if self._waker.anyone_sleeps() and self._all_reached(words, word):
            self._waker.wake(self._others)

    def reach(self, number: int, phase: int) -> Iterator[Condition]:
        """Set this rank's ``phase``, and continue when all ranks have reached it."""
        self.set_phase(number, phase)
        if not self.all_reached(number, phase):
            yield self.until_reached(number, phase)

    # --- signatures and data

    def until_exchanged(self, number: int, inline: int) -> Condition:
        """The condition that ``exchange`` waits for: its slot is free, or all ranks have reached CALLED."""
        if self._phases[number % SLOTS][self.rank] >= number * _STEPS + CALLED:
            return self.until_reached(number, CALLED)
        return Condition(partial(self.is_free, number, inline), partial(self._has_begun, number - SLOTS))

    def until_reached(self, number: int, phase: int) -> Condition:
        """The condition ``all_reached``."""
        return Condition(partial(self.all_reached, number, phase), partial(self._has_begun, number))

    def exchange(
        self,
        number: int,
        signature: Signature,
        data: np.ndarray | None,
        result: np.ndarray | None,
        expected: Signatures,
    ) -> Entries | None:
        """Write this rank's entry of call ``number`` and reach CALLED, then read the entries of all ranks. None: wait
        ``until_exchanged``, then call this again.

        The others can read contiguous ``data``, which are in the entry if they are inline, and read or write parts of
        the ``result`` buffer (None: nothing). If any rank's data are not readable, no rank reads any. ``expected``: the
        signatures of the last such call; the entries have this object if they are equal.
        """
        slot, rank, inline, signatures = number % SLOTS, self.rank, signature.inline, expected
        words, called, digests = self._phases[slot], number * _STEPS + CALLED, self._digests[slot]
        entries = expected.inline.get(slot) or self._inline(slot, expected)
        if words[rank] < called:
            free = inline <= SMALL and self._all_reached(words, (number - SLOTS) * _STEPS + RELEASED)
            if not (free or self.is_free(number, inline)):
                return None
            if inline and data is not None:
                own_view = entries.blocks[rank]
                own_view[...] = data if data.ndim == own_view.ndim else data.reshape(own_view.shape)  # it is flat
            else:
                self._write_address(self._data_at[slot], data if data is not None and data.size else None)
            if result is not None or self._results_at[slot][0][rank] != UNREADABLE:
                self._write_address(self._results_at[slot], result)
            if digests[rank] != signature.digest:  # else an earlier call has written it to this slot
                self._signatures[slot][rank][: len(signature.packed)] = signature.packed
                digests[rank] = signature.digest
            self._set(words, called)
        if not self._all_reached(words, called):
            return None
        if digests.tolist() != expected.digests:
            packed = dict(zip(digests, self._signatures[slot], strict=True))  # those that differ
            by_digest = {digest: Signature.unpack(each.tobytes()) for digest, each in packed.items()}
            signatures = Signatures([by_digest[digest] for digest in digests])
            entries = self._inline(slot, signatures)
        exposed = result is not None or (not inline and self._data_at[slot][0][rank] != UNREADABLE)
        if signatures.inline_all and not exposed:  # the same record serves all such calls
            return entries
        blocks = list(entries.blocks)
        for each, their_signature in enumerate(signatures.by_rank):
            if not their_signature.inline and their_signature.shape is not None:
                mine = each == rank and exposed and data is not None  # it needs no address
                blocks[each] = data if mine else self._data_block(slot, each, their_signature)
        return Entries(signatures, blocks, exposed)

    def _write_address(self, words: Sequence[memoryview], x: np.ndarray | None) -> None:
        if x is not None and (address := self.address(x)) is not None:
            words[0][self.rank], words[1][self.rank] = address
        elif words[0][self.rank] != UNREADABLE:  # a write takes the cache line from the other ranks
            words[0][self.rank] = UNREADABLE

    def _inline(self, slot: int, signatures: Signatures) -> Entries:
        """The inline data of all ranks in a slot (None: not inline): views, which these signatures keep."""
        views = [self._inline_view(slot, rank, s) if s.inline else None for rank, s in enumerate(signatures.by_rank)]
        entries = signatures.inline[slot] = Entries(signatures, views)
        return entries

    def offer_result(self, number: int, result: np.ndarray) -> None:
        """Let the others read ``result``, from this rank's next phase on."""
        self._write_address(self._results_at[number % SLOTS], result)

    def results(self, number: int, shape: Sequence[int], dtype: np.dtype) -> list[Any]:
        """The result buffers of all ranks, of this shape (Block; None: unreadable)."""
        words = self._results_at[number % SLOTS]
        return [self._block_at(words, rank, shape, dtype) for rank in range(self.size)]

    def result_arenas(self, number: int) -> list[int]:
        """The arenas of the result buffers, as in an Address; UNREADABLE: the other ranks cannot read the buffer."""
        return self._results_at[number % SLOTS][0].tolist()

    def _data_block(self, slot: int, rank: int, signature: Signature) -> Block | None:
        shape, dtype = signature.array_type
        if 0 in shape and signature.host:
            return np.empty(shape, dtype)
        return self._block_at(self._data_at[slot], rank, shape, dtype)

    def _block_at(self, words: Sequence[memoryview], rank: int, shape: Sequence[int], dtype: np.dtype) -> Block | None:
        local, offset = words[0][rank], words[1][rank]
        if local >= 0:
            return self.neighbours.view(local, offset, shape, dtype)
        reader = self.neighbours.cross_memory
        return RemoteArray(reader, -2 - local, offset, shape, dtype) if local != UNREADABLE and reader else None

    def _inline_view(self, slot: int, rank: int, signature: Signature) -> np.ndarray:
        shape, dtype = signature.array_type
        if signature.inline > SMALL:
            return np.ndarray(shape, dtype, self._staging[slot % STAGING][rank])
        return np.ndarray(shape, dtype, self._entries[slot][rank], _signature_size(self.size))

    def address(self, x: np.ndarray, sliced: bool = False) -> Address | None:
        """The address at which other ranks can read contiguous ``x``: in this rank's arena, or in its ordinary memory.

        None if they cannot, as for ordinary memory that is ``sliced`` along another axis than the first.
        """
        offset = self.neighbours.offset(x)
        if offset is not None:
            return self.neighbours.local_rank, offset
        reads = self.neighbours.cross_memory is not None and not sliced
        return (-2 - self.neighbours.local_rank, address_of(x)) if reads else None

    def close(self) -> bool:
        """Stop using the table. Returns False while others may still use this rank's memory: call it again later."""
        self._closed[self.rank] = 1
        if self.home is None:
            return True
        if not all(self._closed):
            return False
        self.neighbours.own.release(self.home, size_of_table(self.size))
        return True


def _words_size(ranks: int) -> int:
    return aligned(8 * ranks * _WORDS)


def _signature_size(ranks: int) -> int:
    return aligned(room(ranks))


def _entry_size(ranks: int) -> int:
    return _signature_size(ranks) + SMALL


def room_of(ranks: int) -> int:
    """Bytes of inline data of a rank, in a group of this size."""
    return max(min(ROOM, (1 << 22) // ranks // ALIGNMENT * ALIGNMENT), SMALL)


def _pieces(memory: memoryview, size: int, count: int) -> list[memoryview]:
    return [memory[i * size : (i + 1) * size] for i in range(count)]
