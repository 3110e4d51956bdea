"""Which layers run where: a model's layers in consecutive chunks, dealt over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_engine.comm.blocks import span
from spmd_engine.errors import UsageError
from spmd_engine.models.model import Model

#: How layers become chunks: evenly by number or by cost, or the first layer of each chunk.
Division = str | Sequence[int]


def parse_division(text: str) -> Division:
    """``"even"``, ``"cost"`` or ``"0,3,7"`` (the first layer of each chunk); raises UsageError otherwise."""
    if text in ("even", "cost"):
        return text
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(
            f"cannot read stages {text!r}: write even, cost, or the first layer of each, as in 0,3,7"
        ) from None


def divide(model: Model, chunks: int, division: Division = "even", per_stage: int = 1) -> list[range]:
    """The model's layers as ``chunks`` consecutive ranges of at least one, of which each stage has ``per_stage``.

    Raises UsageError if that cannot be.
    """
    layers = len(model.layers)
    if chunks > layers:
        stages = f"{chunks // per_stage} stages" + (f" of {per_stage} chunks" if per_stage > 1 else "")
        raise UsageError(
            f"{model.name} has {layers} layers ({_listed([name for name, _ in model.layers])}), too few for {stages}; "
            f"take fewer stages{', or fewer chunks' if per_stage > 1 else ''}"
        )
    if division == "even":
        parts = [span(layers, chunks, number) for number in range(chunks)]
        return [range(part.start, part.stop) for part in parts]
    if division == "cost":
        return _balanced([layer.cost(model.context) for _, layer in model.layers], chunks)
    starts = list(division)
    if len(starts) != chunks or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= layers:
        raise UsageError(
            f"stages {','.join(map(str, starts))}: {chunks} ascending numbers are needed, the first of them 0 and the "
            f"last below {layers}, the number of layers of {model.name}"
        )
    return [range(first, end) for first, end in zip(starts, [*starts[1:], layers], strict=True)]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) < 6 else [*names[:3], "...", names[-1]])


def _balanced(costs: Sequence[float], parts: int) -> list[range]:
    """Consecutive parts such that the costliest one costs as little as can be."""
    low, high = max(costs), sum(costs)
    for _ in range(60):  # halves what is left to know: beyond a double's precision
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(costs, middle, parts)) <= parts else (middle, high)
    ranges = _filled(costs, high, parts)
    while len(ranges) < parts:  # nothing is gained by more; but every part must have a layer
        longest = max(ranges, key=len)
        at, middle = ranges.index(longest), (longest.start + longest.stop) // 2
        ranges[at : at + 1] = [range(longest.start, middle), range(middle, longest.stop)]
    return ranges


def _filled(costs: Sequence[float], most: float, parts: int) -> list[range]:
    """Parts filled one after the other up to ``most`` each, or one too many if that is too little."""
    starts, filled = [0], 0.0
    for number, cost in enumerate(costs):
        if number and filled + cost > most * (1 + 1e-12):
            starts.append(number)
            filled = 0.0
            if len(starts) > parts:
                break
        filled += cost
    return [range(first, end) for first, end in zip(starts, [*starts[1:], len(costs)], strict=True)]
