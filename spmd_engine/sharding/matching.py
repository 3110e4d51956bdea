"""Pairing rows with columns for the greatest gain: which new part becomes which old one, so that little moves."""

from __future__ import annotations

import numpy as np


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
