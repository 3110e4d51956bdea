"""Strategies by name, and their default meshes for a number of ranks."""

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
    """The pages by name; each is imported when it is first used."""

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
    """The strategy of this name; raises UsageError, with all names, if there is none."""
    if name not in STRATEGIES:
        raise UsageError(f"unknown strategy {name!r}; {one_of(name, STRATEGIES)}")
    return STRATEGIES[name]


def default_axes(strategy: type[Page], ranks: int) -> dict[str, int]:
    """Sizes of the strategy's mesh axes, as equal as possible; later axes are not smaller.

    The axes that communicate most are last, and so stay inside a node. A strategy without axes gets none: all ranks
    then compute the same. Raises UsageError for fewer than one rank.

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
