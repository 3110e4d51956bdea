"""The routing table as text: where each expert is, and what it and its part have to do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_engine.sharding.expert_placement import Placement, imbalance, load_by_part

BAR = 24  # characters of the heaviest part's bar


def routing_table(
    placement: Placement,
    parts: int,
    loads: Sequence[float] | None = None,
    ranks: Sequence[Sequence[int]] | None = None,
) -> str:
    """A line for each expert, then one for each part, empty ones too, and the imbalance.

    ``loads`` are those of the experts, in tokens or whatever was measured; ``ranks[part]`` the ranks that hold a part,
    by default the one of its number.
    """
    on = [_listed(each) for each in ranks] if ranks is not None else [str(part) for part in range(parts)]
    measured = np.zeros(len(placement)) if loads is None else np.asarray(loads, np.float64)
    head = ["expert", "part", "ranks", *(["load", "share"] if loads is not None else [])]
    rows = [head]
    for expert, part in enumerate(placement):
        rows.append([str(expert), str(part), on[part], *_load(measured[expert], measured.sum(), loads)])
    text = _aligned(rows)

    held = load_by_part(placement, measured, parts)
    rows = [["part", "ranks", "experts", *head[3:]]]
    for part in range(parts):
        experts = [expert for expert, where in enumerate(placement) if where == part]
        rows.append([str(part), on[part], _listed(experts) or "none", *_load(held[part], held.sum(), loads)])
    if loads is not None:
        bars = ["", *("#" * round(BAR * load / (held.max() or 1.0)) for load in held)]
        rows = [[*row, bar] for row, bar in zip(rows, bars, strict=True)]
    text += ["", *_aligned(rows)]
    if loads is not None:
        text += ["", f"The heaviest part has {imbalance(placement, measured, parts):.2f} x the mean."]
    return "\n".join(text)


def _load(load: float, total: float, loads: Sequence[float] | None) -> list[str]:
    return [f"{load:,.10g}", f"{load / (total or 1.0):.1%}"] if loads is not None else []


def _listed(numbers: Sequence[int]) -> str:
    """Numbers with runs shortened: 0-3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines whose columns begin together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
