"""Which keys attention hides from which queries."""

from __future__ import annotations

from typing import Any

Mask = tuple[int, Any]  #: from which key on rows see less, and for those keys, [t s] of -inf where hidden and else 0


def unseen(key_positions: Any, positions: Any, window: int | None) -> Any:
    """Whether the key is hidden from the query: it comes after it, or so many positions before or more, if there is a
    ``window``. The two broadcast."""
    hidden = key_positions > positions
    if window is not None:
        hidden |= key_positions <= positions - window
    return hidden


def hide(scores: Any, mask: Mask | None) -> None:
    """Add -inf to scores[h t s] where the mask hides a key from a query; rs rows repeat the mask of s."""
    if mask is not None:
        first, hidden = mask
        rows = scores.reshape(*scores.shape[:2], -1, hidden.shape[1])
        # Added: many times faster than an assignment through a boolean index.
        rows[:, first:] += hidden[:, None]
