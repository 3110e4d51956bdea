"""Mixtures of experts in the blocks of a model: the number of experts, their sizes, and their blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import UsageError
from spmd_engine.layers import RouterOptions

if TYPE_CHECKING:
    from spmd_engine.layers.moe.moe import MoE


def block_numbers(text: str, what: str, blocks: int | None = None) -> tuple[int, ...]:
    """Return the numbers in "0,5". Raises UsageError for other text, and for numbers from ``blocks`` on; ``what`` is
    the name of the option in the error."""
    numbers = [number.strip() for number in text.split(",")] if text.strip() else []
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"{what} is {text!r}: it must be block numbers, as in 0,5")
    values = tuple(map(int, numbers))
    if blocks is not None and max(values, default=0) >= blocks:
        raise UsageError(f"{what} {text}: blocks are from 0 to {blocks - 1}")
    return values


def as_text(numbers: Iterable[int]) -> str:
    """Return the text of block numbers, in ascending order: the inverse of ``block_numbers``."""
    return ",".join(map(str, sorted(numbers)))


@dataclass(frozen=True)
class Mixture(Configuration):
    """Experts that replace the MLP of a block; ``router`` has all options of the choice of experts."""

    experts: int = setting(8, least=1, most=1 << 16, fixed=True, help="Experts of each layer that has any.")
    shared: int = setting(
        0,
        least=0,
        most=1 << 16,
        option="shared_experts",
        fixed=True,
        help="Further experts of the same size, which every token passes through.",
    )
    hidden: int | None = setting(
        None,
        least=1,
        option=None,
        unset="a token's experts together are as wide as the dense MLP",
        help="Hidden width of an expert.",
    )
    dense: str = setting(
        "",
        option="dense_layers",
        metavar="N,...",
        fixed=True,
        unset="none",
        help="Numbers of the blocks that keep a dense MLP.",
    )
    router: RouterOptions = RouterOptions(balance_loss=0.01, z_loss=0.001)
    shared_gate: bool = setting(
        False, option=None, help="Weigh the output of the shared experts by a sigmoid of its own, as in Qwen2-MoE."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.router.check(self.experts)
        block_numbers(self.dense, "dense")
        if self.shared_gate and not self.shared:
            raise UsageError("shared_gate weighs the output of shared experts, but shared is 0")

    def is_routed(self, block: int, blocks: int) -> bool:
        """Return whether block number ``block`` has experts; raises UsageError if ``dense`` has another block."""
        return block not in block_numbers(self.dense, "dense", blocks)

    def layer(self, width: int, hidden: int, out_std: float, gated: bool = False) -> MoE:
        """Return the layer that replaces a dense MLP of this hidden width, with equal work per token if the field
        ``hidden`` is None. ``gated``: whether experts have a gate."""
        from spmd_engine.layers.moe.moe import MoE

        active = self.router.top_k + self.shared
        expert_hidden = self.hidden or max(1, hidden // active)
        options = {"shared": self.shared, "shared_gate": self.shared_gate, "gated": gated}
        return MoE(width, expert_hidden, self.experts, self.router, out_std=out_std, **options)
