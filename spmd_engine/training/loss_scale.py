"""Dynamic loss scaling: gradients of float16 activations, multiplied so that small ones are not rounded to 0.

After Micikevicius et al., "Mixed precision training" (2018). The whole gradient's norm, which all ranks share, decides:
they all skip a step, or none does, and have the same scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FACTOR = 2.0  #: factor of growth; its inverse is that of the back-off
GROW_AFTER = 1000  #: steps without overflow after which the scale grows
LEAST, MOST = 1.0, 2.0**24


@dataclass
class LossScale:
    """The factor of the loss, and so of all gradients, in a step. It changes after steps."""

    value: float = 2.0**16
    good_steps: int = 0  #: since the last change

    def can_fall(self) -> bool:
        """Whether an overflow can be cured by a lower scale."""
        return self.value > LEAST

    def update(self, overflow: bool) -> None:
        """After a step: lower the scale if gradients overflowed; raise it after ``GROW_AFTER`` steps without."""
        self.good_steps += 1
        if overflow:
            self.value, self.good_steps = max(self.value / FACTOR, LEAST), 0
        elif self.good_steps >= GROW_AFTER:
            self.value, self.good_steps = min(self.value * FACTOR, MOST), 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from ``as_json`` of another run."""
        self.value, self.good_steps = float(saved["value"]), int(saved["good_steps"])
