"""Which activations are recomputed in the backward instead of kept: memory for time."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from itertools import groupby

from spmd_engine.engine.chunk import LayerSegment
from spmd_engine.errors import UsageError
from spmd_engine.models.model import Model


class Recompute(Enum):
    """What a forward does not keep."""

    NONE = "none"  #: everything is kept
    #: of each block (layers whose names share what stands before "/") only its input is kept: Chen et al., "Training
    #: Deep Nets with Sublinear Memory Cost" (2016)
    BLOCK = "block"
    #: of attention only its input: Korthikanti et al., "Reducing Activation Recomputation" (2022)
    ATTENTION = "attention"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise UsageError(f"no recompute {value!r}; there are: {', '.join(each.value for each in cls)}")


def check(model: Model, recompute: Recompute) -> None:
    """Raise UsageError if a model has nothing of what is to be recomputed."""
    everything = segments(model, range(len(model.layers)), recompute)
    if recompute is not Recompute.NONE and not any(segment.recomputed for segment in everything):
        has_blocks = any("/" in name for name, _ in model.layers)
        nearest = "block or none" if has_blocks else "none"
        raise UsageError(f"recompute {recompute.value}: {model.name} has no {recompute.value}; choose {nearest}")


def segments(model: Model, layers: Iterable[int], recompute: Recompute) -> list[LayerSegment]:
    """Consecutive layers, cut into parts that are recomputed together or kept."""

    def part(number: int) -> tuple[str, bool]:
        name, layer = model.layers[number]
        block, slash, _ = name.partition("/")
        if recompute is Recompute.BLOCK and slash:
            return block, True
        if recompute is Recompute.ATTENTION and layer.attends:
            return name, True
        return "", False

    return [LayerSegment(range((n := list(numbers))[0], n[-1] + 1), key[1]) for key, numbers in groupby(layers, part)]
