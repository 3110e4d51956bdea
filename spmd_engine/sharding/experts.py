"""Which part of a mesh has which expert: evenly, by measured load, and what it costs to change it.

A *placement* is a tuple with the number of a part for each expert. Parts are alike; what a part is, one rank or
several, the layout says. All of it is plain arithmetic that every rank does alike, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from spmd_engine.errors import UsageError

Placement = tuple[int, ...]


def even(experts: int, parts: int) -> Placement:
    """As many experts on each part as can be, neighbours together: 10 on 4 are 3, 3, 2, 2."""
    _check(experts, parts, None)
    each, more = divmod(experts, parts)
    return tuple(part for part in range(parts) for _ in range(each + (part < more)))


def greedy(loads: Sequence[float], parts: int, most_per_part: int | None = None) -> Placement:
    """The heaviest expert first, each on the part that has the least load so far (longest processing time first).

    No part gets more than (4/3 - 1 / (3 · parts)) times what the heaviest of the best placement has (Graham, 1969),
    unless ``most_per_part``, experts for which a part has memory, stands in the way. Parts of equal load are taken by
    their number of experts, so that experts without load are spread as well.
    """
    _check(len(loads), parts, most_per_part, loads)
    placement = [0] * len(loads)
    lightest: list[tuple[float, int, int]] = [(0, 0, part) for part in range(parts)]  # load, experts, part
    heapify(lightest)
    for expert in _heaviest_first(loads):
        load, count, part = heappop(lightest)
        placement[expert] = part
        if count + 1 != most_per_part:
            heappush(lightest, (load + loads[expert], count + 1, part))
    return tuple(placement)


def optimal(loads: Sequence[float], parts: int, most_per_part: int | None = None, *, steps: int = 200_000) -> Placement:
    """A placement whose heaviest part is as light as can be, by branch and bound, beginning with the greedy one.

    Meant for up to some sixteen experts: raises UsageError if it has not ended after ``steps`` tries (about a second).
    """
    best = greedy(loads, parts, most_per_part)
    limit, least = max(_held(best, loads, parts)), _lower_bound(loads, parts)
    order, placement = _heaviest_first(loads), [0] * len(loads)
    held: list[float] = [0] * parts
    counts = [0] * parts
    tries = 0

    def place(at: int) -> None:
        """Try all parts for the experts from ``order[at]``, as long as that is lighter than the best so far."""
        nonlocal best, limit, tries
        if at == len(order):
            best, limit = tuple(placement), max(held)
            return
        expert, alike = order[at], set()
        for part in sorted(range(parts), key=lambda part: (held[part], counts[part])):
            load = held[part] + loads[expert]
            if limit <= least or load >= limit:
                return  # the other parts have more load still
            if counts[part] == most_per_part or (held[part], counts[part]) in alike:
                continue
            alike.add((held[part], counts[part]))
            tries += 1
            if tries > steps:
                raise UsageError(
                    f"the best placement of {len(loads)} experts on {parts} parts was not found in {steps:,} steps: "
                    "use the greedy one, whose heaviest part has at most 4/3 as much"
                )
            before, held[part] = held[part], load
            counts[part] += 1
            placement[expert] = part
            place(at + 1)
            held[part] = before
            counts[part] -= 1

    place(0)
    return best


def load_by_part(placement: Placement, loads: Sequence[float] | np.ndarray, parts: int) -> np.ndarray:
    """float64[parts]: the sum of the loads of each part's experts."""
    return np.bincount(np.asarray(placement, int), np.asarray(loads, np.float64), minlength=parts)


def imbalance(placement: Placement, loads: Sequence[float] | np.ndarray, parts: int) -> float:
    """The load of the heaviest part over the mean of all, empty ones too: 1 is perfect, ``parts`` the worst."""
    held = load_by_part(placement, loads, parts)
    return float(held.max() / held.mean()) if held.any() else 1.0


def moved(before: Placement, after: Placement) -> list[tuple[int, int, int]]:
    """(expert, from part, to part) of those that change their part."""
    if len(before) != len(after):
        raise UsageError(f"placements of {len(before)} and of {len(after)} experts")
    both = zip(before, after, strict=True)
    return [(expert, old, new) for expert, (old, new) in enumerate(both) if old != new]


def renumbered(before: Placement, after: Placement, parts: int) -> Placement:
    """``after`` with its parts numbered such that as few experts as possible move from ``before``.

    Parts are alike, so this changes no load; and experts of a layer are alike, so the fewest experts are the fewest
    bytes.
    """
    moved(before, after)
    stay = np.zeros((parts, parts), int)  # how many experts stay if the first part's number is made the second
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
    """The placement to go on with: this one, unless its imbalance is more than ``tolerated`` and greedy has less."""
    if imbalance(placement, loads, parts) <= tolerated:
        return placement
    better = renumbered(placement, greedy(loads, parts, most_per_part), parts)
    return better if imbalance(better, loads, parts) < imbalance(placement, loads, parts) else placement


def _held(placement: Placement, loads: Sequence[float], parts: int) -> list[float]:
    """What each part holds, added up in the order of ``greedy`` and ``optimal``."""
    held: list[float] = [0] * parts
    for expert in _heaviest_first(loads):
        held[placement[expert]] += loads[expert]
    return held


def _heaviest_first(loads: Sequence[float]) -> list[int]:
    return sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert))


def _lower_bound(loads: Sequence[float], parts: int) -> float:
    """No placement has a lighter heaviest part than this."""
    ordered = sorted(loads, reverse=True)
    # Of the n · parts + 1 heaviest, some part has n + 1.
    full = [sum(ordered[n * parts - n : n * parts + 1]) for n in range(len(ordered)) if n * parts < len(ordered)]
    whole = all(isinstance(load, int | np.integer) for load in ordered)
    mean = -(-sum(ordered) // parts) if whole else sum(ordered) / parts
    return max([mean, *full])


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


# --- Pairing rows with columns for the greatest gain: which new part becomes which old one, so that little moves


def best_matching(gain: np.ndarray) -> list[int]:
    """For each row of gain[n n] a column of its own such that the sum is the greatest (the Hungarian method, n^3).

    Rows are added one at a time. ``row_price + column_price <= cost`` always, with equality for what is matched; the
    cheapest way from the new row to a column that is free says which rows change their columns.
    """
    n = len(gain)
    cost = np.zeros((n + 1, n + 1))
    cost[1:, 1:] = -gain
    row_price, column_price = np.zeros(n + 1), np.zeros(n + 1)
    row_of = np.zeros(n + 1, int)  # of each column; 0: none. Column 0 is where the new row stands
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        cheapest, came_from, seen = np.full(n + 1, np.inf), np.zeros(n + 1, int), np.zeros(n + 1, bool)
        while row_of[column]:
            seen[column] = True
            here = row_of[column]
            way = cost[here] - row_price[here] - column_price
            nearer = ~seen & (way < cheapest)
            cheapest[nearer], came_from[nearer] = way[nearer], column
            following = int(np.where(seen, np.inf, cheapest).argmin())
            step = cheapest[following]
            row_price[row_of[seen]] += step
            column_price[seen] -= step
            cheapest[~seen] -= step
            column = following
        while column:
            row_of[column] = row_of[came_from[column]]
            column = came_from[column]
    column_of = np.empty(n, int)
    column_of[row_of[1:] - 1] = np.arange(n)
    return column_of.tolist()


# --- The routing table as text: where each expert is, and what it and its part have to do


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
