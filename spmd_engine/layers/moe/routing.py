"""Which experts a token goes to, and with what weights: functions of arrays, of any cut of the tokens.

Letters: t tokens of this rank (samples times positions, row by row), E experts, k choices of a token.
All scores are handled as a softmax over *log scores* l[t E]: the logits z themselves, or log sigmoid(z). So a softmax
and a sigmoid, renormalised or not, share one backward, and no sum of tiny scores is ever divided by.
"""

from __future__ import annotations

from dataclasses import dataclass

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.arrays.random import hash_bits, key_of, uniform_at
from spmd_engine.arrays.scatter import count_each
from spmd_engine.layers.moe.router_options import RouterOptions

POSITIONS = 1 << 24  # more than any sequence has: a token's number must not depend on the sequence's length


@dataclass(frozen=True)
class Tokens:
    """Which tokens of the micro-batch a rank has: some positions of some samples, both by their global numbers."""

    samples: Array  #: int[b], increasing
    positions: Array  #: int[s]: of a sequence that is cut, any runs of it

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
    """What the tokens of this rank chose, and what the gradients need of it."""

    experts: Array  #: int64[t k], best first, all different in a row
    weights: Array  #: [t k]: what the output of each of these experts is multiplied by
    used: Array  #: bool[t k]: False where a second choice is left out by chance
    shares: Array  #: [t E]: all scores of a token divided by their sum
    slope: Array | None  #: [t E]: the derivative of the log scores by the logits; None where it is 1
    options: RouterOptions

    @property
    def decided(self) -> tuple[Array, Array]:
        """What a recomputation must not choose anew: ``choose(..., decided=)`` takes it."""
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
    """The choice for each row of logits[t E]; ``bias[E]`` is added to the scores for the choice alone.

    ``tokens`` says which tokens these are, and ``key`` (of seed, step and layer) seeds what is drawn by chance: both
    are looked at only where ``options`` leave something to chance or to turns. With ``decided`` (``Choices.decided``
    of the first forward) only the weights are computed.
    """
    xp = backend_of(logits).xp
    rows, width = logits.shape
    options.check(width)
    scores, shares, slope = _scores(logits, options)
    if decided is not None:
        experts, used = decided
    elif options.routing == "balanced":
        turn = (tokens.samples[:, None] + tokens.positions[None, :]).reshape(-1, 1) * options.top_k
        experts = (turn + xp.arange(options.top_k)) % width
    elif options.routing == "random":
        cells = tokens.numbers().reshape(-1, 1) * width + xp.arange(width)
        experts = top(hash_bits(key_of(key, "experts"), cells, xp).astype(xp.float64), options.top_k)
    else:
        basis = logits if options.when == "after" else scores
        basis = basis if bias is None else basis + bias
        experts = top(basis, options.top_k, _in_best_groups(basis, options) if options.groups > 1 else None)
    weights = _weights(xp.take_along_axis(logits, experts, axis=1), shares, experts, options)
    if decided is None:
        used = xp.ones(experts.shape, bool)
        if options.second_choice == "random" and rows:
            chance = uniform_at(key_of(key, "second choice"), tokens.numbers().reshape(-1))
            given = options.second_probability
            used[:, 1] = 2 * weights[:, 1] > chance * weights.sum(axis=1) if given is None else chance < given
    return Choices(experts, weights, used, shares, slope, options)


def weights_gradient(choices: Choices, dweights: Array) -> Array:
    """dlogits[t E] of dweights[t k], which is 0 where a pair was not used or was dropped. Linear in dweights."""
    xp = backend_of(dweights).xp
    options, experts, weights = choices.options, choices.experts, choices.weights
    chosen = dweights * weights  # gradients of the log scores, but for what normalisation takes away
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
    """int64[n E]: how many pairs (token, choice) use each expert, before any is dropped for want of capacity.

    ``sequences``: into how many equal runs of tokens these are counted, such as one a sample; 1 counts them all.
    """
    xp = backend_of(choices.experts).xp
    rows, width = choices.shares.shape
    run = xp.arange(sequences).repeat(rows // sequences if sequences else 0)
    cells = (run[:, None] * width + choices.experts)[choices.used]
    return count_each(cells, sequences * width).reshape(sequences, width)


def top(scores: Array, k: int, allowed: Array | None = None) -> Array:
    """int64[t k]: the columns of the k highest scores[t E] in each row, highest first, the lower column of a tie.

    ``allowed`` bool[t E] names the columns among which to choose, at least k a row. For the few k of a router, k
    searches for the maximum are several times as fast as sorting, and as stable.
    """
    xp = backend_of(scores).xp
    left = xp.maximum(scores, xp.finfo(scores.dtype).min)  # so that -inf marks only what may not be chosen
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
    """[t] of x[t E]: down the columns of a copy, since NumPy takes ten times as long for maxima of short rows."""
    return x.T.copy().max(axis=0)


def _softmax(x: Array) -> Array:
    y = x - highest(x)[:, None]
    y = backend_of(x).xp.exp(y, out=y)
    y /= y.sum(axis=1, keepdims=True)
    return y


def _log_sigmoid(z: Array) -> tuple[Array, Array]:
    """log sigmoid(z), and its derivative 1 - sigmoid(z), neither of which overflows or cancels."""
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
