"""What ranks say to each other before anything connects them but messages: when they join a world."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_engine.comm.blocks import spans
from spmd_engine.comm.communicators.communicator import Communicator, MessagePart
from spmd_engine.comm.pending import TIMEOUT, Operation, Steps
from spmd_engine.comm.rounds import Payload, carry, gather_rounds

_TAG = 32763  # of these messages; no others of the world have it
_SHORT = 128  # bytes of a text that travels with the lengths


def gather_texts(comm: Communicator, text: str, ranks: Sequence[int] | None = None) -> list[str]:
    """The texts of these ``ranks``, one of which is this one, in their order; None: of all. Collective among them.

    Each rank sends log2(n) messages with all lengths and short texts; if a text is longer, as many again, with all
    texts at the length of the longest.
    """
    members = list(ranks) if ranks is not None else list(range(comm.size))
    part, data = MessagePart(comm, members), text.encode()

    def rows_of_all(row: bytes) -> Steps:
        rows = np.zeros((part.size, len(row)), np.uint8)
        rows[part.rank] = np.frombuffer(row, np.uint8)
        payload = Payload(rows.reshape(-1), spans([len(row)] * part.size), gather_rounds(part.rank, part.size))
        yield from carry(part, payload, _TAG)
        return [each.tobytes() for each in rows]

    def steps() -> Steps:
        short = data[:_SHORT].ljust(_SHORT, b"\0")
        rows = yield from rows_of_all(short + len(data).to_bytes(8, "little"))
        lengths = [int.from_bytes(row[_SHORT:], "little") for row in rows]
        if (longest := max(lengths)) > _SHORT:
            rows = yield from rows_of_all(data.ljust(longest, b"\0"))
        return [row[:length].decode() for row, length in zip(rows, lengths, strict=True)]

    if part.size == 1:
        return [text]
    return comm.progress.begin(Operation(comm, steps(), TIMEOUT, "for all ranks to join")).wait()
