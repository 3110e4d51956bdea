"""Strategies by name, and the mesh that each wants of so many ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from spmd_engine.errors import UsageError, one_of

if TYPE_CHECKING:
    from spmd_engine.strategies.page import Page

_CLASSES = {
    "single-device": "SingleDevice",
    "data-parallel": "DataParallel",
    "sharded-optimizer": "ShardedOptimizer",
    "sharded-gradients": "ShardedGradients",
    "fully-sharded": "FullySharded",
    "replicate-shard": "ReplicateShard",
    "column-parallel": "ColumnParallel",
    "tensor-parallel": "TensorParallel",
    "attention-heads": "AttentionHeads",
    "two-dimensional": "TwoDimensional",
    "sequence-parallel": "SequenceParallel",
    "ring-attention": "RingAttention",
    "expert-parallel": "ExpertParallel",
    "pipeline": "Pipeline",
    "hybrid": "Hybrid",
    "channel-split": "ChannelSplit",
    "spatial": "Spatial",
    "vertical-cnn": "VerticalCNN",
    "hybrid-cnn": "HybridCNN",
}


class _Pages(Mapping[str, "type[Page]"]):
    """Each page in the module of its name, imported when it is asked for."""

    def __getitem__(self, name: str) -> type[Page]:
        return getattr(import_module(f"spmd_engine.strategies.{name.replace('-', '_')}"), _CLASSES[name])

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)

    def __contains__(self, name: object) -> bool:
        return name in _CLASSES


STRATEGIES: Mapping[str, type[Page]] = _Pages()


def strategy_named(name: str) -> type[Page]:
    """The strategy of that name; raises UsageError, with the names there are, for another."""
    if name not in STRATEGIES:
        raise UsageError(f"unknown strategy {name!r}; {one_of(name, STRATEGIES)}")
    return STRATEGIES[name]


def default_axes(strategy: type[Page], ranks: int) -> dict[str, int]:
    """Sizes of the strategy's mesh axes, as near to each other as they can be; later axes are not smaller.

    Those that talk most are last, and so stay inside a node. A strategy without axes gets none: each of the ranks
    then computes the same. Raises UsageError for fewer ranks than one.

    >>> default_axes(STRATEGIES["hybrid"], 12)
    {'pipe': 2, 'data': 2, 'model': 3}
    >>> default_axes(STRATEGIES["two-dimensional"], 6)
    {'row': 2, 'col': 3}
    """
    if ranks < 1:
        raise UsageError(f"a mesh of {ranks} ranks; at least one is needed")
    sizes, left = [], ranks
    for remaining in range(len(strategy.axes), 0, -1):
        sizes.append(max(size for size in range(1, left + 1) if left % size == 0 and size**remaining <= left))
        left //= sizes[-1]
    return dict(zip(strategy.axes, sorted(sizes), strict=True))
