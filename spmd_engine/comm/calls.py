"""A prepared call, and the steps that all collectives share.

The same code serves blocking and started calls, with and without ``out``, by any transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, CudaBackend, backend_of
from spmd_engine.comm.agreement.call_agreement import Agreed
from spmd_engine.comm.agreement.signature import NumberedCall, Signature, Signatures
from spmd_engine.comm.agreement.tree import Inline
from spmd_engine.comm.blocks import spans
from spmd_engine.comm.dispatch import Routing
from spmd_engine.comm.ledger import Ledger
from spmd_engine.comm.nccl_ranks import QueuedCall
from spmd_engine.comm.pending import Queued, Steps
from spmd_engine.comm.shared_memory.slot_table import Entries
from spmd_engine.comm.transports.hierarchical import Hierarchical
from spmd_engine.comm.transports.nccl import NcclTransport
from spmd_engine.comm.transports.shared_memory import readable
from spmd_engine.comm.transports.transport import Transport
from spmd_engine.errors import UsageError

Shape = tuple[int, ...]


class Offer(NamedTuple):
    """The arrays that a rank contributes to a call."""

    data: Array  #: contiguous, in the form in which other ranks receive it
    readable: Array | None = None  #: the same data in memory that the node's other ranks can read; None: not offered
    result: Array | None = None  #: the result buffer, if the node's other ranks can read it


@dataclass
class PreparedCall:
    """Everything about a call except the values of its array. A group keeps it for the next such call.

    The base class describes a barrier, a message, and a text for the other ranks.
    """

    signature: Signature
    where: tuple[str, str, str]  # operation, axes and label: the key in the ledger
    payload: int = 0  # bytes
    sent: int | Callable[[Array], int] = 0  # bytes; or a function of the result
    shape: tuple[int, ...] = ()  # of the result, if all ranks make the same call
    dtype: Any = None  # to which the array is cast
    parts: Sequence[tuple[slice, ...]] = ()  # index of each rank's part of the array, if the call splits it
    places: Sequence[slice] = ()  # of these parts when packed in flat memory
    even: Sequence[int] = ()  # lengths of the blocks that the call joins, by rank, if all ranks make the same call
    sizes: Sequence[int] | None = None  # these lengths, if the caller passed them
    returns_lengths: bool = False  # whether an all_to_all also returns the lengths that it received
    rounds: bool = False  # whether it sums 16-bit floats, and rounds the sums
    expected: Signatures = Signatures(())  # of the node's ranks in the last such call
    inline: bool = False  # whether the data of the last such call travelled inline
    #: lengths of the blocks of all ranks, shape of the result, and the size by which a transport is chosen, as they
    #: follow from the ``expected`` signatures; None: not known yet
    settled: tuple[Sequence[int] | None, Shape, int] | None = None
    rank: int = 0  # in the group
    ranks: int = 1
    text: int = 0  # number of its description, see ``Activity.called``; 0: none yet
    one_phase: ClassVar[bool] = True  # whether ``finish`` makes the result of readable arrays of any size

    def steps(self, routing: Routing, number: int, x: Array | None, out: Any) -> Steps:
        """Make call ``number``: a generator (see ``pending``)."""
        agreed = yield from routing.agreement.reach(self.signature, self.expected, number, x)
        self.expect(agreed.entries)
        self.transport(routing, number, agreed, 0)  # moves no data; chooses the transport of the next call

    def finish(self, signatures: Signatures | None, blocks: Sequence[Any], out: Any) -> Any:
        """The result of all ranks' ``blocks``, in ``out`` if given. ``signatures``: None if they are all the same."""

    def check_out(self, x: Array, out: Any) -> None:
        """Raise UsageError unless ``out`` can receive the result of a call of ``x``."""

    def expect(self, entries: Entries | None) -> None:
        """Expect these signatures in the next such call. If they have changed, choose its transport again."""
        if entries is not None and entries.signatures is not self.expected:
            self.expected = entries.signatures
            self.inline, self.settled = False, None

    def transport(self, routing: Routing, number: int, agreed: Agreed, size: int) -> Transport | None:
        """The transport of an agreed call with ``size`` bytes of all ranks or of each; None if its data were inline.

        The next call with the same signatures uses this choice again.
        """
        if self.inline and routing.one_node:  # as in the last call, which had the same signatures
            return None
        transport = routing.transport(self.signature, number, agreed, size)
        self.inline = transport is None
        return transport

    def queued(self, routing: Routing, number: int) -> QueuedCall:
        """The call as one whose transfers NCCL queues."""
        return routing.queued(number, str(NumberedCall(number, self.signature)), self.where)

    @property
    def sliced(self) -> bool:
        """Whether the call splits arrays along another axis than the first."""
        return bool(self.parts) and len(self.parts[0]) > 1

    def readable(self, routing: Routing, x: Array) -> np.ndarray | None:
        """Contiguous ``x`` or a copy in memory that the node's other ranks can read; None: not offered, or no room."""
        table = routing.table_to_offer(self.signature, x, x.nbytes)
        if table is None:
            return None
        return readable(table, x, routing.connections.tuning, self.sliced and routing.one_node)

    def record(self, ledger: Ledger, result: Any, seconds: float | None = None) -> None:
        """Record one such call in the ledger; see there for ``seconds``."""
        sent = self.sent
        ledger.record(self.where, self.payload, sent(result) if callable(sent) else sent, seconds)
        if self.rounds:
            ledger.rounded.add(self.where)


class Collective(PreparedCall, ABC):
    """A collective in which each rank has an array and a result, which goes to ``out`` if given."""

    @classmethod
    def prepare(
        cls, group: Routing, operation: str, x: Array, label: str, signed: dict[str, Any], **fields: Any
    ) -> Self:
        """The call of ``x``; ``signed``: fields of its signature."""
        where = operation, group.axes, label
        fields |= {"payload": x.nbytes, "dtype": x.dtype, "rank": group.rank, "ranks": group.size}
        call = cls(group.signature(operation, x, **signed), where, **fields)
        if call.parts:
            row = x.size // max(1, x.shape[call.signature.axis])
            call.places = [slice(part[-1].start * row, part[-1].stop * row) for part in call.parts]
        return call

    @abstractmethod
    def offer(self, routing: Routing, local: Array, target: Array | None) -> Offer:
        """The arrays that this rank contributes. ``local``: its contiguous array; ``target``: ``out``, if usable."""

    @abstractmethod
    def move(self, transport: Transport, x: Array, result: Array, lengths: Sequence[int] | None) -> Steps:
        """Move data until ``result`` is the result for contiguous ``x``; ``lengths``: of the blocks of all ranks."""

    @abstractmethod
    def between_nodes(self, routing: Routing) -> Inline:
        """How small arrays travel with the agreement between nodes."""

    def places_between_nodes(self, routing: Routing, itemsize: int) -> Sequence[slice]:
        """The places of parts for the ranks that exchange messages, joined, with so many bytes an element."""
        parts = [self.places[rank] for rank in routing.senders]
        return spans([(part.stop - part.start) * itemsize for part in parts])

    def gathers(self, routing: Routing) -> bool:
        """Whether this rank gets only its lane's part with the agreement; the node's ranks then gather their parts."""
        return False

    def answered(self, routing: Routing, answer: np.ndarray, out: Array | None) -> Array:
        """The result, in ``out`` if given, of what this rank has got by then."""
        result = np.empty(self.shape, self.dtype) if out is None else out
        result.reshape(-1)[...] = answer
        return result

    def lengths(self, routing: Routing, number: int, agreed: Agreed) -> Steps:
        """Lengths of the blocks that the call joins; None if all ranks make the same call.

        Raises UsageError if they differ from those that the caller passed.
        """
        yield from ()

    def shape_of(self, lengths: Sequence[int] | None) -> Shape:
        """Shape of the result."""
        return self.shape

    def steps(self, routing: Routing, number: int, x: Array, out: Array | None) -> Steps:
        """Offer arrays, agree, exchange unknown lengths, choose a transport, and move the data."""
        home, local, target = CPU, x, out
        event = ready = None  # the event: when the result is complete, on a device
        on_host = type(x) is np.ndarray and (out is None or type(out) is np.ndarray)
        if not on_host or not x.flags.c_contiguous:
            home, local = backend_of(x), (yield from routing.ready(x))
            target = self._target(routing, home, local, out)
        # Inline data are copied to the node's slot table before this rank writes to ``target``.
        is_copied = routing.one_node and self.signature.inline
        offer = Offer(local) if is_copied else self.offer(routing, local, target)
        if not on_host and (nccl := routing.nccl_of(local)) is not None:
            nccl.check()
            target = target if target is not None else home.empty(self.shape, x.dtype)
            ready = nccl.backend.record()  # from now on these arrays may be read and written
        inline = self.between_nodes(routing) if self.signature.inline and not routing.one_node else None
        agreed = yield from routing.agreement.reach(self.signature, self.expected, number, *offer, inline)
        if agreed.signatures is not self.expected:
            self.expect(agreed.entries)
        if agreed.signatures is None or self.settled is None:
            lengths = yield from self.lengths(routing, number, agreed)
            shape = self.shape_of(lengths)
            largest = max(self.payload, prod(shape) * local.itemsize)
            self.settled = lengths, shape, agreed.most if self.signature.operation == "all_to_all" else largest
        lengths, shape, size = self.settled
        if target is not None and target.shape != shape:  # this rank must still send the others their parts
            target = None
        gathers = agreed.answer is not None and self.gathers(routing)
        transport = self.transport(routing, number, agreed._replace(answer=None) if gathers else agreed, size)
        if not (on_host or isinstance(transport, NcclTransport) or routing.is_for_messages(local)):
            # other ranks have theirs on the host
            offer, target = Offer((yield from routing.staged(local))), None
        if agreed.answer is not None:
            answer = agreed.answer.copy().view(self.dtype)
            if isinstance(transport, Hierarchical):
                result = offer.result if offer.result is not None else target
                result = result if result is not None else np.empty(shape, local.dtype)
                yield from transport.gather_lanes(answer, result.reshape(-1), self.places)
            else:
                result = self.answered(routing, answer, target)
        elif transport is None or (self.one_phase and transport.blocks):
            blocks = agreed.blocks if transport is None else transport.blocks
            result = self.finish(agreed.signatures, blocks, target)
            result = result[0] if self.returns_lengths else result
        else:
            result = offer.result
            if routing.one_node and target is not None and result is offer.readable:
                result = target  # the other is a copy, which the transport fills, too
            if result is None or result.shape != shape:
                result = target if target is not None else backend_of(offer.data).empty(shape, local.dtype)
                ready = ready if target is not None else None
            if isinstance(transport, NcclTransport):
                move = partial(self.move, transport, offer.data, result, lengths)
                event = yield from transport.nccl.queue(self.queued(routing, number), move, ready)
            else:
                yield from self.move(transport, offer.data, result, lengths)
        if transport is not None:
            yield from transport.end()
        if out is not None and out.shape != shape:
            raise UsageError(f"{self.signature.operation}: out has shape {out.shape}, the result {shape}")
        if isinstance(home, CudaBackend) and isinstance(result, np.ndarray):  # it was staged
            result, event = home.start_from_host(result, out)
        elif out is not None and result is not out:
            result = copied(result, out)
        result = (result, lengths or list(self.even)) if self.returns_lengths else result
        return Queued(result, home, event, (x, offer)) if event is not None else result

    def _target(self, routing: Routing, home: Backend, local: Array, out: Array | None) -> Array | None:
        """``out``, if the transport can write to it; or pinned memory for the result of a staged array."""
        if not home.on_device or home.owns(local):
            return out if out is not None and routing.is_reachable(out) else None
        pinned = home.pinned_empty(self.shape, local.dtype)
        return pinned if routing.others_can_read(pinned) else None

    def packed(self, x: Array) -> Array:
        """The parts of ``x`` in flat memory at ``places``, each contiguous, as transports need them."""
        if x.ndim == 1 or not self.sliced:  # or already packed
            return x.reshape(-1)
        packed = backend_of(x).empty((x.size,), x.dtype)
        for part, place in zip(self.parts, self.places, strict=True):
            packed[place] = x[part].reshape(-1)
        return packed

    def check_out(self, x: Array, out: Any) -> None:
        shape, joins = x.shape if self.ranks == 1 else self.shape, bool(self.even)
        if (flags := getattr(out, "flags", None)) is None:
            raise UsageError(f"{self.signature.operation}: out is a {type(out).__name__}; give an array")
        # The joined length may differ from the expected one; ``steps`` checks it when it is known.
        fits = out.shape == shape or (joins and self.ranks > 1)
        fits = fits and out.dtype == self.dtype and not self.signature.concat_axis
        # CuPy's arrays are always writable.
        if not fits or not flags.c_contiguous or (isinstance(out, np.ndarray) and not flags.writeable):
            wanted, got = f"{self.dtype}{list(shape)}", f"{out.dtype}{list(out.shape)}"
            axis = ", joined along axis 0" if joins else ""
            raise UsageError(f"{self.signature.operation}: out must be contiguous, writable {wanted}{axis}, is {got}")
        if joins and self.parts and isinstance(x, np.ndarray) and np.may_share_memory(x, out):
            raise UsageError("all_to_all: out must not share memory with the array that is sent")


def copied(x: Array, out: Array) -> Array:
    """``out``, filled with the values of ``x``, which may be ``out`` itself."""
    if x is not out:
        out[...] = x
    return out
