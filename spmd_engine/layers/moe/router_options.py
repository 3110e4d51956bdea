"""What a router of experts does, as one frozen, checked, JSON-able record."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import UsageError


@dataclass(frozen=True)
class RouterOptions(Configuration):
    """How tokens choose among E experts. Raises UsageError for values that do not go together.

    With z[E] a token's logits, a score is p = softmax(z) or sigmoid(z). The ``top_k`` experts of the highest score (of
    the highest logit where the softmax comes ``after``), plus the bias if there is one, are chosen, best first, a tie
    going to the lower expert. The outputs of the chosen are weighted by their scores, without the bias: divided by
    their sum if ``renormalise``, and times ``scale``. A softmax after the choice is one over the chosen alone: what
    ``renormalise`` makes of one before it.

    With ``groups``, a token chooses only among its ``top_groups`` best groups of E / ``groups`` neighbouring experts;
    a group is as good as the sum of its ``group_best`` best scores (DeepSeek-V3: 2).
    """

    top_k: int = setting(2, least=1, fixed=True, help="Experts that each token chooses.")
    score: str = setting(
        "softmax", choices=("softmax", "sigmoid"), option=None, help="Function that turns logits into scores."
    )
    when: str = setting(
        "before",
        choices=("before", "after"),
        option=None,
        help="The softmax comes before the choice, or after it, over the chosen experts alone.",
    )
    renormalise: bool = setting(True, option=None, help="Divide a token's weights by their sum, before `scale`.")
    scale: float = setting(1.0, option=None, help="Factor of a token's weights; positive.")
    groups: int = setting(1, least=1, option=None, help="Groups of experts.")
    top_groups: int = setting(1, least=1, option=None, help="Best groups, in which a token chooses its experts.")
    group_best: int = setting(2, least=1, option=None, help="Best scores whose sum is the score of a group.")
    second_choice: str = setting(
        "always",
        choices=("always", "random"),
        option=None,
        help="`random`: a token uses its second choice with `second_probability` (GShard).",
    )
    second_probability: float | None = setting(
        None,
        least=0,
        most=1,
        option=None,
        unset="min(1, 2 x the second expert's part of the two weights)",
        help="Probability that a token uses its second choice.",
    )
    routing: str = setting(
        "learned",
        choices=("learned", "balanced", "random"),
        help="For benchmarks, `balanced` takes experts in turn and `random` draws them.",
    )
    capacity_factor: float | None = setting(
        None,
        unset="no limit",
        help="Capacity of an expert, as a multiple of its even share of a micro-batch's tokens; further tokens are "
        "dropped and pass by the residual.",
    )
    minimum_capacity: int = setting(1, least=0, option=None, help="Smallest capacity, in tokens.")
    drop_by: str = setting(
        "position",
        choices=("position", "probability"),
        option=None,
        help="Which tokens a full expert keeps: the first ones, or those of the highest weight.",
    )
    balance_loss: float = setting(0.0, least=0, help="Coefficient of the loss that balances experts.")
    sequence_balance_loss: float = setting(
        0.0, least=0, option=None, help="Coefficient of the same loss for each sequence, averaged."
    )
    z_loss: float = setting(0.0, least=0, help="Coefficient of mean(logsumexp(logits)^2), which keeps logits small.")
    bias_rate: float = setting(0.0, least=0, help="Step of the bias that balances experts without a loss; 0: no bias.")
    scope: str = setting(
        "micro-batch",
        choices=("micro-batch", "shard"),
        option=None,
        help="Tokens over which capacity and balance are defined: `shard` is cheaper, but results depend on the mesh.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score == "sigmoid" and self.when == "after":
            raise UsageError("when='after' is about a softmax; a sigmoid is the same before and after the choice")
        if self.scale <= 0:
            raise UsageError(f"scale is {self.scale}: it must be positive")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise UsageError(f"capacity_factor is {self.capacity_factor}: it must be positive, or None for no limit")
        if self.top_groups > self.groups:
            raise UsageError(f"top_groups is {self.top_groups}, but groups is {self.groups}")
        if self.second_choice == "random" and self.top_k != 2:
            raise UsageError(f"second_choice='random' needs top_k=2, not {self.top_k}")
        if self.second_choice != "random" and self.second_probability is not None:
            raise UsageError("second_probability needs second_choice='random'")

    def check(self, experts: int) -> None:
        """Raise UsageError unless a router over so many experts can do this."""
        if experts < 1:
            raise UsageError(f"a router needs at least one expert, not {experts}")
        if self.top_k > experts:
            raise UsageError(f"top_k is {self.top_k}, but there are {experts} experts: choose at most {experts}")
        if experts % self.groups:
            raise UsageError(f"{experts} experts do not fall into {self.groups} groups of one size")
        within = experts // self.groups * self.top_groups
        if self.routing == "learned" and self.top_k > within:
            raise UsageError(
                f"top_k is {self.top_k}, but {self.top_groups} of {self.groups} groups of {experts} experts hold only "
                f"{within}: raise top_groups, or lower top_k"
            )
