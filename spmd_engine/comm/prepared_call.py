"""A call as a group keeps it for the next one like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_engine.arrays.backend import Array
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.pending import Steps
from spmd_engine.comm.reducing import Reducer
from spmd_engine.comm.signature import Signature, Signatures

if TYPE_CHECKING:
    from spmd_engine.comm.routing import Routing


@dataclass(slots=True)
class PreparedCall:
    """All of a call that does not depend on the values in its array: of a collective with one, see ``collectives``.

    As it is, that of a barrier, and of what has no result: a text brought to the others, a message.
    """

    signature: Signature
    where: tuple[str, str, str]  # operation, axes and label, as the ledger has them
    payload: int = 0  # bytes
    sent: int | Callable[[Array], int] = 0  # bytes; a function of the result, where that must be known
    shape: tuple[int, ...] = ()  # of the result, if all ranks call the same
    dtype: Any = None  # what the array is cast to first
    parts: list[tuple[slice, ...]] | None = None  # of the array, by rank
    places: list[slice] | None = None  # of these parts, one after the other in flat memory
    even: list[int] | None = None  # lengths of what is joined, by rank, if all ranks call the same
    sizes: Sequence[int] | None = None  # these lengths, as the caller says
    tells: bool = False  # whether an all_to_all returns, besides, how much came from each rank
    reduce: Reducer | None = None
    expected: Signatures | None = None  # everyone's on the node, last time
    blocking: bool = False  # whether this is for a rank that waits, with an array in its own memory
    at_once: bool = False  # whether all others do so, with all data inline, or all for the library to move
    waiting: PreparedCall | None = None  # the same for who waits: it may offer its data to the library
    rank: int = 0  # of the group, that calls
    ranks: int = 1
    text: int = 0  # the number of what it is, see ``Activity.called``; 0: not asked for yet

    def steps(self, routing: Routing, number: int, x: Array | None, out: Any) -> Steps:
        """All of call ``number``, a generator (see ``pending``)."""
        yield from routing.agreement.reach(self, number, x)

    def finish(self, found: Signatures, blocks: Sequence[Array], out: Any) -> Any:
        """The result, where everyone's arrays came with the signatures; it comes to ``out``, if there is one."""

    def check_out(self, x: Array, out: Any, ranks: int) -> None:
        """Raise UsageError unless ``out`` can receive the result of a call of ``x``."""

    def expect(self, found: Signatures) -> None:
        """The next such call will probably find these on the table."""
        self.expected = found
        self.at_once = self.blocking and (found.at_once or (found.wait and found.same))

    def record(self, ledger: Ledger, result: Any, seconds: float | None = None) -> None:
        """Enter one such call, with this ``result``, in the ledger; ``seconds``: of the one wait for it."""
        sent = self.sent if type(self.sent) is int else self.sent(result)
        ledger.record(self.where, self.payload, sent, seconds)

    def suits(self, out: Array | None) -> bool:
        """Whether ``out`` can receive the result at once."""
        return out is None or (
            self.expected.same
            and type(out) is np.ndarray
            and out.shape == self.shape
            and self.signature.concat_axis == 0
            and out.dtype is self.dtype
            and out.flags.carray  # contiguous, and can be written to
        )
