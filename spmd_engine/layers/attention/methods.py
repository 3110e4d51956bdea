"""Context methods by name, as the command line knows them."""

from spmd_engine.errors import UsageError, one_of
from spmd_engine.layers.attention.context import ContextMethod, GatherKeys
from spmd_engine.layers.attention.ring_attention import RingAttention
from spmd_engine.layers.attention.ulysses import Ulysses

CONTEXT_METHODS = {"gather": GatherKeys, "ring": RingAttention, "ulysses": Ulysses}


def context_method(name: str) -> ContextMethod:
    """The method called ``name``; raises UsageError naming those there are."""
    if name not in CONTEXT_METHODS:
        raise UsageError(f"unknown context method {name!r}; {one_of(name, CONTEXT_METHODS)}")
    return CONTEXT_METHODS[name]()
