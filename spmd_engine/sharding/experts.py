"""Placements of experts on the parts of a mesh: even, or by measured load; and the experts that a change moves.

A *placement* is a tuple with the number of a part for each expert. The layout defines a part as one rank or several;
all parts are equal. The functions are pure arithmetic, with the same result on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from spmd_engine.errors import UsageError

Placement = tuple[int, ...]


def even(experts: int, parts: int) -> Placement:
    """Consecutive experts on each part, as evenly as possible: 10 experts on 4 parts are 3, 3, 2, 2."""
    _check(experts, parts, None)
    count, remainder = divmod(experts, parts)
    return tuple(part for part in range(parts) for _ in range(count + (part < remainder)))


def greedy(loads: Sequence[float], parts: int, most_per_part: int | None = None) -> Placement:
    """Place the heaviest expert first, each on the part with the least load so far (longest processing time first).

    The heaviest part has at most (4/3 - 1 / (3 · parts)) times the load of the heaviest part of the best placement
    (Graham, 1969), unless ``most_per_part``, the experts for which a part has memory, prevents it. Among parts of equal
    load, the part with the fewest experts is next, so that experts without load are spread as well.
    """
    _check(len(loads), parts, most_per_part, loads)
    placement = [0] * len(loads)
    lightest: list[tuple[float, int, int]] = [(0, 0, part) for part in range(parts)]  # load, experts, part
    heapify(lightest)
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert)):
        load, count, part = heappop(lightest)
        placement[expert] = part
        if count + 1 != most_per_part:
            heappush(lightest, (load + loads[expert], count + 1, part))
    return tuple(placement)


def load_by_part(placement: Placement, loads: Sequence[float] | np.ndarray, parts: int) -> np.ndarray:
    """float64[parts]: the sum of the loads of each part's experts."""
    return np.bincount(np.asarray(placement, int), np.asarray(loads, np.float64), minlength=parts)


def imbalance(placement: Placement, loads: Sequence[float] | np.ndarray, parts: int) -> float:
    """The load of the heaviest part over the mean of all parts, with empty ones: 1 is best, ``parts`` the worst."""
    held = load_by_part(placement, loads, parts)
    return float(held.max() / held.mean()) if held.any() else 1.0


def moved(before: Placement, after: Placement) -> list[tuple[int, int, int]]:
    """(expert, old part, new part) for each expert that changes its part."""
    if len(before) != len(after):
        raise UsageError(f"placements of {len(before)} and of {len(after)} experts; both must have the same number")
    both = zip(before, after, strict=True)
    return [(expert, old, new) for expert, (old, new) in enumerate(both) if old != new]


def renumbered(before: Placement, after: Placement, parts: int) -> Placement:
    """``after`` with its parts renumbered so that the fewest experts move from ``before``.

    Parts are equal, so this changes no load. Experts of a layer have equal sizes, so it also moves the fewest bytes.
    """
    moved(before, after)
    stay = np.zeros((parts, parts), int)  # experts that stay if the first part takes the second's number
    np.add.at(stay, (list(after), list(before)), 1)
    number = best_matching(stay)
    return tuple(number[part] for part in after)


def rebalanced(
    placement: Placement,
    loads: Sequence[float],
    parts: int,
    most_per_part: int | None = None,
    *,
    tolerated: float = 1.2,
) -> Placement:
    """The next placement: the present one, unless its imbalance exceeds ``tolerated`` and the greedy one has less."""
    if imbalance(placement, loads, parts) <= tolerated:
        return placement
    better = renumbered(placement, greedy(loads, parts, most_per_part), parts)
    return better if imbalance(better, loads, parts) < imbalance(placement, loads, parts) else placement


def _check(experts: int, parts: int, most_per_part: int | None, loads: Sequence[float] = ()) -> None:
    if parts < 1 or experts < 0:
        raise UsageError(f"{experts} experts cannot be placed on {parts} parts")
    if most_per_part is not None and experts > parts * most_per_part:
        raise UsageError(
            f"{experts} experts do not fit on {parts} parts of at most {most_per_part}: "
            f"allow {-(-experts // parts)} or more"
        )
    for expert, load in enumerate(loads):
        if not 0 <= load < float("inf"):
            raise UsageError(f"the load of expert {expert} is {load}: it must be a number, not negative")


# --- Matching rows to columns for the greatest gain: the old number of each new part, so that the fewest experts move


def best_matching(gain: np.ndarray) -> list[int]:
    """A different column for each row of gain[n n] such that the sum is the greatest (the Hungarian method, n^3).

    Rows are added one at a time. ``row_price + column_price <= cost`` always, with equality for matched pairs; the
    cheapest path from the new row to a free column determines which rows change their columns.
    """
    n = len(gain)
    cost = np.zeros((n + 1, n + 1))
    cost[1:, 1:] = -gain
    row_price, column_price = np.zeros(n + 1), np.zeros(n + 1)
    row_of = np.zeros(n + 1, int)  # column -> row; 0: none. Column 0 has the new row
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        cheapest, previous, visited = np.full(n + 1, np.inf), np.zeros(n + 1, int), np.zeros(n + 1, bool)
        while row_of[column]:
            visited[column] = True
            current_row = row_of[column]
            reduced_cost = cost[current_row] - row_price[current_row] - column_price
            cheaper = ~visited & (reduced_cost < cheapest)
            cheapest[cheaper], previous[cheaper] = reduced_cost[cheaper], column
            next_column = int(np.where(visited, np.inf, cheapest).argmin())
            step = cheapest[next_column]
            row_price[row_of[visited]] += step
            column_price[visited] -= step
            cheapest[~visited] -= step
            column = next_column
        while column:
            row_of[column] = row_of[previous[column]]
            column = previous[column]
    column_of = np.empty(n, int)
    column_of[row_of[1:] - 1] = np.arange(n)
    return column_of.tolist()


# --- The routing table as text: the part and load of each expert, and the load of each part


BAR = 24  # characters of the heaviest part's bar


def routing_table(
    placement: Placement,
    parts: int,
    loads: Sequence[float] | None = None,
    ranks: Sequence[Sequence[int]] | None = None,
) -> str:
    """A line for each expert, then one for each part, including empty parts, then the imbalance.

    ``loads`` are the experts' loads, in tokens or another measured unit; ``ranks[part]`` are the ranks that hold a
    part, by default the rank of the same number.
    """
    on = [_join_runs(numbers) for numbers in ranks] if ranks is not None else [str(part) for part in range(parts)]
    measured = np.zeros(len(placement)) if loads is None else np.asarray(loads, np.float64)
    head = ["expert", "part", "ranks", *(["load", "share"] if loads is not None else [])]
    rows = [head]
    for expert, part in enumerate(placement):
        rows.append([str(expert), str(part), on[part], *_format_load(measured[expert], measured.sum(), loads)])
    text = _align_columns(rows)

    held = load_by_part(placement, measured, parts)
    rows = [["part", "ranks", "experts", *head[3:]]]
    for part in range(parts):
        experts = [expert for expert, home in enumerate(placement) if home == part]
        rows.append([str(part), on[part], _join_runs(experts) or "none", *_format_load(held[part], held.sum(), loads)])
    if loads is not None:
        bars = ["", *("#" * round(BAR * load / (held.max() or 1.0)) for load in held)]
        rows = [[*row, bar] for row, bar in zip(rows, bars, strict=True)]
    text += ["", *_align_columns(rows)]
    if loads is not None:
        text += ["", f"The heaviest part has {imbalance(placement, measured, parts):.2f} x the mean."]
    return "\n".join(text)


def _format_load(load: float, total: float, loads: Sequence[float] | None) -> list[str]:
    return [f"{load:,.10g}", f"{load / (total or 1.0):.1%}"] if loads is not None else []


def _join_runs(numbers: Sequence[int]) -> str:
    """The numbers as text, with runs shortened: 0-3, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
