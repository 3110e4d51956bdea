"""The options of a router, and the choice of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import hash_bits, key_of, uniform_at
from spmd_engine.arrays.scatter import count_each
from spmd_engine.configuration import Configuration, setting
from spmd_engine.errors import UsageError


@dataclass(frozen=True)
class RouterOptions(Configuration):
    """How tokens choose among E experts. Raises UsageError for inconsistent values.

    With z[E] a token's logits, a score is p = softmax(z) or sigmoid(z). A token chooses the ``top_k`` experts of
    the highest score (the highest logit if the softmax comes ``after``), plus the bias if there is one: best first, and
    the lower expert of a tie. Their outputs are weighted by their scores, without the bias, divided by the sum of these
    if ``renormalise``, times ``scale``. A softmax after the choice is over the chosen experts only, which equals
    ``renormalise`` with a softmax before it.

    With ``groups``, a token chooses only among its ``top_groups`` best groups of E / ``groups`` neighbouring experts;
    the score of a group is the sum of its ``group_best`` best scores (DeepSeek-V3: 2).
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
            raise UsageError("when='after' needs score='softmax'; a sigmoid is the same before and after the choice")
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
        """Raise UsageError unless a router over this number of ``experts`` can have these options."""
        if experts < 1:
            raise UsageError(f"a router needs at least one expert, not {experts}")
        if self.top_k > experts:
            raise UsageError(f"top_k is {self.top_k}, but there are {experts} experts: choose at most {experts}")
        if experts % self.groups:
            raise UsageError(f"{experts} experts cannot be divided into {self.groups} groups of equal size")
        within = experts // self.groups * self.top_groups
        if self.routing == "learned" and self.top_k > within:
            raise UsageError(
                f"top_k is {self.top_k}, but {self.top_groups} of {self.groups} groups of {experts} experts hold only "
                f"{within}: raise top_groups, or lower top_k"
            )


# --- The experts and weights of each token: functions of arrays, for any sharding of the tokens
#
# Letters: t tokens of this rank (samples times positions, row by row), E experts, k choices of a token. All scores
# are handled as a softmax over *log scores* l[t E]: the logits z themselves, or log sigmoid(z). So a softmax and a
# sigmoid, renormalised or not, share one backward, and no divisor is a sum of tiny scores.


POSITIONS = 1 << 24  # more than any sequence has: a token's number must not depend on the sequence's length


@dataclass(frozen=True)
class Tokens:
    """The tokens of the micro-batch on a rank: positions of samples, both by their global numbers."""

    samples: Array  #: int[b], increasing
    positions: Array  #: int[s]: any runs of the sequence if it is sharded

    def numbers(self) -> Array:
        """int64[b s]: one number for each token, in the order (sample, position), the same on every mesh."""
        xp = backend_of(self.samples).xp
        return self.samples.astype(xp.int64)[:, None] * POSITIONS + self.positions.astype(xp.int64)

    def runs(self) -> tuple[Array, Array]:
        """Runs of consecutive positions of one sample: int64[r], the number of the first token of each run, and
        int64[b s], the run of each token."""
        xp = backend_of(self.samples).xp
        begins = xp.ones(len(self.positions), bool)
        begins[1:] = self.positions[1:] != self.positions[:-1] + 1
        first = self.numbers()[:, begins]
        return first.reshape(-1), xp.arange(len(first))[:, None] * first.shape[1] + begins.cumsum() - 1


@dataclass(frozen=True)
class Choices:
    """The choices of this rank's tokens, with what their gradients need."""

    experts: Array  #: int64[t k], best first, all different in a row
    weights: Array  #: [t k]: the weights of the outputs of these experts
    used: Array  #: bool[t k]: False where a second choice is randomly left out
    shares: Array  #: [t E]: all scores of a token divided by their sum
    slope: Array | None  #: [t E]: the derivative of the log scores by the logits; None where it is 1
    options: RouterOptions

    @property
    def decided(self) -> tuple[Array, Array]:
        """The choices that a recomputation reuses, by ``choose(..., decided=)``."""
        return self.experts, self.used


def choose(
    logits: Array,
    bias: Array | None,
    options: RouterOptions,
    *,
    tokens: Tokens | None = None,
    key: int = 0,
    decided: tuple[Array, Array] | None = None,
) -> Choices:
    """The choice for each row of logits[t E]; ``bias[E]`` is added to the scores only for the choice.

    ``tokens`` identifies the rows, and ``key`` (of seed, step and layer) seeds random draws: both are used only if
    ``options`` choose at random or in turn. With ``decided`` (``Choices.decided`` of the first forward) only the
    weights are computed.
    """
    xp = backend_of(logits).xp
    rows, width = logits.shape
    options.check(width)
    scores, shares, slope = _scores(logits, options)
    required_tokens: Any = tokens  # not None where it is used
    if decided is not None:
        experts, used = decided
    elif options.routing == "balanced":
        turn = (required_tokens.samples[:, None] + required_tokens.positions[None, :]).reshape(-1, 1) * options.top_k
        experts = (turn + xp.arange(options.top_k)) % width
    elif options.routing == "random":
        cells = required_tokens.numbers().reshape(-1, 1) * width + xp.arange(width)
        experts = top(hash_bits(key_of(key, "experts"), cells, xp).astype(xp.float64), options.top_k)
    else:
        basis = logits if options.when == "after" else scores
        basis = basis if bias is None else basis + bias
        experts = top(basis, options.top_k, _in_best_groups(basis, options) if options.groups > 1 else None)
    weights = _weights(xp.take_along_axis(logits, experts, axis=1), shares, experts, options)
    if decided is None:
        used = xp.ones(experts.shape, bool)
        if options.second_choice == "random" and rows:
            chance = uniform_at(key_of(key, "second choice"), required_tokens.numbers().reshape(-1))
            limit = options.second_probability
            used[:, 1] = 2 * weights[:, 1] > chance * weights.sum(axis=1) if limit is None else chance < limit
    return Choices(experts, weights, used, shares, slope, options)


def weights_gradient(choices: Choices, dweights: Array) -> Array:
    """dlogits[t E] of dweights[t k], which is 0 where a pair was not used or was dropped. Linear in dweights."""
    xp = backend_of(dweights).xp
    options, experts, weights = choices.options, choices.experts, choices.weights
    chosen = dweights * weights  # gradients of the log scores, without the term of a normalisation
    total = chosen.sum(axis=1, keepdims=True)
    if _normalised(options):
        chosen -= weights * (total * weights.dtype.type(1 / options.scale))
    if options.score == "softmax" and not _normalised(options):
        dlogits = -total * choices.shares
    else:
        dlogits = xp.zeros_like(choices.shares)
    dlogits[xp.arange(len(experts))[:, None], experts] += chosen
    if choices.slope is not None:
        dlogits *= choices.slope
    return dlogits


def expert_counts(choices: Choices, sequences: int = 1) -> Array:
    """int64[n E]: how many pairs (token, choice) use each expert, before any is dropped for lack of capacity.

    ``sequences``: the number of equal runs of tokens that are counted separately, such as one for each sample.
    """
    xp = backend_of(choices.experts).xp
    rows, width = choices.shares.shape
    run = xp.arange(sequences).repeat(rows // sequences if sequences else 0)
    cells = sequences * width  # and one more, of unused pairs
    cell = xp.where(choices.used, run[:, None] * width + choices.experts, cells)
    return count_each(cell.reshape(-1), cells + 1)[:cells].reshape(sequences, width)


def top(scores: Array, k: int, allowed: Array | None = None) -> Array:
    """int64[t k]: the columns of the k highest scores[t E] in each row, highest first, the lower column of a tie.

    ``allowed`` bool[t E] marks the columns to choose from, at least k in each row. For the small k of a router, k
    searches for the maximum are several times as fast as sorting, and as stable.
    """
    xp = backend_of(scores).xp
    left = xp.maximum(scores, xp.finfo(scores.dtype).min)  # so that -inf only marks columns that may not be chosen
    if allowed is not None:
        left[~allowed] = -xp.inf
    rows = xp.arange(len(scores))
    chosen = xp.empty((len(scores), k), xp.int64)
    for choice in range(k):
        chosen[:, choice] = left.argmax(axis=1)
        left[rows, chosen[:, choice]] = -xp.inf
    return chosen


def _scores(logits: Array, options: RouterOptions) -> tuple[Array, Array, Array | None]:
    """Scores, shares (scores divided by their sum) and slope (None: 1), all t E."""
    if options.score == "softmax":
        shares = _softmax(logits)
        return shares, shares, None
    log_scores, slope = _log_sigmoid(logits)
    return backend_of(logits).xp.exp(log_scores), _softmax(log_scores), slope


def _weights(chosen: Array, shares: Array, experts: Array, options: RouterOptions) -> Array:
    """The weights[t k] of the experts whose logits are chosen[t k]."""
    xp = backend_of(chosen).xp
    log_scores = _log_sigmoid(chosen)[0] if options.score == "sigmoid" else chosen
    if _normalised(options):
        weights = _softmax(log_scores)
    elif options.score == "sigmoid":
        weights = xp.exp(log_scores)
    else:
        weights = xp.take_along_axis(shares, experts, axis=1)
    return weights * weights.dtype.type(options.scale)


def _normalised(options: RouterOptions) -> bool:
    return options.renormalise or options.when == "after"


def highest(x: Array) -> Array:
    """The maxima[t] of x[t E], over columns of a copy: NumPy takes ten times as long for maxima of short rows."""
    return x.T.copy().max(axis=0)


def _softmax(x: Array) -> Array:
    y = x - highest(x)[:, None]
    y = backend_of(x).xp.exp(y, out=y)
    y /= y.sum(axis=1, keepdims=True)
    return y


def _log_sigmoid(z: Array) -> tuple[Array, Array]:
    """log sigmoid(z), and its derivative 1 - sigmoid(z), without overflow and cancellation."""
    xp = backend_of(z).xp
    small = xp.exp(-xp.abs(z))
    return xp.minimum(z, 0) - xp.log1p(small), xp.where(z >= 0, small, z.dtype.type(1)) / (1 + small)


def _in_best_groups(basis: Array, options: RouterOptions) -> Array:
    """bool[t E]: whether each expert is in one of its token's best groups."""
    xp = backend_of(basis).xp
    rows, width = basis.shape
    size = width // options.groups
    ordered = xp.sort(basis.reshape(rows, options.groups, size), axis=2)
    best = top(ordered[:, :, -options.group_best :].sum(axis=2), options.top_groups)
    allowed = xp.zeros((rows, options.groups), bool)
    allowed[xp.arange(rows)[:, None], best] = True
    return allowed.repeat(size, axis=1)
