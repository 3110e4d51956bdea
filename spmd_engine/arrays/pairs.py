"""The pairs of numbers that rotary positions turn."""

from __future__ import annotations

from typing import Any


def halves(x: Any, neighbours: bool) -> tuple[Any, Any]:
    """Views of x[... k]: the first and the second of each pair, (x[2i], x[2i + 1]) or (x[i], x[i + k/2])."""
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])


def over_heads(table: Any, ndim: int) -> Any:
    """[s n] or [b s n] as a factor of [b s ... n], an array of ``ndim`` dims."""
    heads = (1,) * (ndim - 3)
    return table.reshape(*table.shape[:-1], *heads, table.shape[-1])
