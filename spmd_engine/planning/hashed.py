"""A tuple that is hashed once: for long ones that are asked for often, such as the ranks of a group."""

from __future__ import annotations

from functools import cached_property


class HashedOnce(tuple):
    """Equal to the tuple of the same elements."""

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash
