"""What each layer of a model costs a rank for one micro-batch: what plans are estimated from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCosts:
    """Of one layer, on a rank that has its part of a micro-batch. Seconds are of work alone, and of waiting inside."""

    name: str
    forward: float  #: seconds of work
    backward_input: float
    backward_weights: float
    inside_forward: float = 0.0  #: seconds of communication that the layer waits for: tensor and context parallel
    inside_backward: float = 0.0
    sent_forward: int = 0  #: bytes that the rank sends meanwhile
    sent_backward: int = 0
    saved: int = 0  #: bytes kept from the forward to the backward
    output: int = 0  #: bytes of what comes out
    above_forward: int = 0  #: bytes held at most while it runs forward, beyond what it saves
    above_backward: int = 0  #: bytes held at most while it runs backward, beyond what it had saved
    parameters: int = 0  #: elements on the rank, while whole
    tied: int = 0  #: of these, those that another layer has, too

    @property
    def all_forward(self) -> float:
        return self.forward + self.inside_forward

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weights + self.inside_backward
