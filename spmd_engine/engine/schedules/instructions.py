"""What a stage of a pipeline can be told to do: compute, start a transfer, or wait for one.

The model's layers are cut into chunks, numbered from the input on; chunk c lives on stage c % stages. With one
chunk a stage, which all schedules but the interleaved one have, a chunk's number is its stage's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """One thing to do with micro-batch ``m`` and the layers of ``chunk``."""

    m: int
    chunk: int = 0

    def __hash__(self) -> int:
        """Of another kind, another hash: sets of instructions hold all kinds of one micro-batch and chunk."""
        return hash((type(self), self.m, self.chunk))


class Compute(Instruction):
    """Work of this stage alone."""


class Forward(Compute):
    """Run the chunk's layers forward, and the loss after the last chunk."""


class Backward(Compute):
    """Run them backward, layer by layer: the input's gradient first, since somebody may be waiting for it."""


class BackwardInput(Compute):
    """Only the gradient of the chunk's input: what the stage before needs to go on."""


class BackwardWeight(Compute):
    """Only the gradients of the chunk's weights: nobody waits for them, so they fill what would be idle time."""


class Transfer(Instruction):
    """Begins to move an array between neighbouring chunks, and does not wait for it.

    The neighbour begins the other end of it. There are none where both chunks are on the same stage.
    """


class StartReceiveInput(Transfer):
    """Begin to receive the chunk's input, from the stage of the chunk before."""


class StartSendOutput(Transfer):
    """Begin to send the chunk's output, to the stage of the chunk after."""


class StartReceiveGradient(Transfer):
    """Begin to receive the gradient of the chunk's output, from the stage of the chunk after."""


class StartSendGradient(Transfer):
    """Begin to send the gradient of the chunk's input, to the stage of the chunk before."""


@dataclass(frozen=True)
class Wait:
    """Wait until a transfer that this stage has started is over: received, or its array free to be used again."""

    started: Transfer


Program = list[Instruction | Wait]
