"""What went where when weights were loaded, as a table: a line for what all blocks have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from spmd_engine.checkpoints.weights import Filled, Pretrained

_NUMBER = re.compile(r"(?<=block)\d+|(?<=expert)\d+|(?<=\.)\d+(?=\.)")


def table(pretrained: Pretrained, shardings: Mapping[str, str]) -> Iterator[str]:
    """Lines: each parameter with its sharding, and the tensor, its dtype and dims, that it is read from.

    Parameters of several blocks or experts share a line, with ``*`` for the numbers and how many they are.
    """
    alike: dict[tuple[str, ...], int] = {}
    for each in pretrained.filled.values():
        row = _row(each, shardings[each.name])
        alike[row] = alike.get(row, 0) + 1
    rows = [("parameter", "sharding", "", "tensor", "stored as")]
    rows += [(row[0], row[1], f"x {count}" if count > 1 else "", *row[2:]) for row, count in alike.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    yield f"{pretrained.path}: {len(pretrained)} parameters from {pretrained.nbytes / 1e6:,.1f} MB"
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(filled: Filled, sharding: str) -> tuple[str, ...]:
    at = "".join(f"[{letter}={number}]" for letter, (number, _) in filled.view.stored.at.items() if letter != "e")
    tensor, name = (_NUMBER.sub("*", each) for each in (filled.tensor.name, filled.name))
    return name, sharding, tensor + at, f"{filled.tensor.dtype} {filled.view.stored.dims} {list(filled.tensor.shape)}"
