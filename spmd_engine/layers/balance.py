"""What keeps experts equally busy: losses of the router, each beside its gradient, and a bias that needs no loss.

Letters as in ``routing``: t tokens of this rank, E experts. T is the number of tokens of the *whole* micro-batch, and
every loss here is this rank's share of one that is defined over the whole micro-batch: shares are summed over the ranks
that cut the tokens, gradients are those of the rank's own tokens, with no further factor.
"""

from __future__ import annotations

from spmd_engine.arrays.backend import Array, backend_of
from spmd_engine.layers.routing import Choices, highest


def balance_loss(choices: Choices, counts: Array, tokens: int, coefficient: float) -> float:
    """This rank's share of coefficient · E · Σ_i f_i P_i, the loss of Switch and GShard.

    f_i is the part of all pairs (token, choice) that went to expert i, from counts[1 E] (``expert_counts``, summed
    over the ranks that cut the tokens), so that f sums to 1 for any k. P_i is the mean over T ``tokens`` of expert i's
    share of a token's scores, over all experts. Perfect balance gives 1 (times the coefficient).

    With counts[b E] of b sequences (tokens in b equal runs; summed over the ranks that cut a sequence) it is the mean
    of that loss of each sequence (DeepSeek-V3, eq. 17-20). With a rank's own counts (scope "shard") it is the mean of
    the ranks' own losses, weighted by their tokens.
    """
    if not choices.shares.size:
        return 0.0
    pull = _pull(choices, counts, tokens, coefficient)
    shares = choices.shares.reshape(len(pull), -1, choices.shares.shape[1])
    return float((shares.sum(axis=1) * pull).sum())


def balance_gradient(choices: Choices, counts: Array, tokens: int, coefficient: float) -> Array:
    """dlogits[t E] of ``balance_loss``. Counts are constants: only the scores carry a gradient."""
    rows, width = choices.shares.shape
    pull = _pull(choices, counts, tokens, coefficient)
    pull = pull.repeat(rows // len(pull) if len(pull) else 0, axis=0)
    dlogits = pull - (choices.shares * pull).sum(axis=1, keepdims=True)
    dlogits *= choices.shares
    if choices.slope is not None:
        dlogits *= choices.slope
    return dlogits


def z_loss(logits: Array, tokens: int, coefficient: float) -> float:
    """This rank's share of coefficient · mean over T ``tokens`` of logsumexp(logits[t E])^2 (ST-MoE, eq. 5)."""
    return float((_log_sum(logits)[0] ** 2).sum()) * coefficient / max(tokens, 1)


def z_gradient(logits: Array, tokens: int, coefficient: float) -> Array:
    """dlogits[t E] of ``z_loss``."""
    log_sum, softmax = _log_sum(logits)
    return softmax * (log_sum * logits.dtype.type(2 * coefficient / max(tokens, 1)))[:, None]


def entropy(choices: Choices, tokens: int) -> float:
    """This rank's share of the mean over T ``tokens`` of -Σ q log q, in nats, with q a token's shares of scores.

    log E where all experts score alike, 0 where one has it all.
    """
    xp = backend_of(choices.shares).xp
    logs = xp.log(xp.maximum(choices.shares, xp.finfo(choices.shares.dtype).tiny))
    return -float((choices.shares * logs).sum()) / max(tokens, 1)


def bias_fold(bias: Array, counts: Array, rate: float) -> Array:
    """The next step's bias[E]: raised by ``rate`` for experts that got fewer pairs than the mean, lowered for others.

    ``counts[E]``: of a whole optimizer step, over all micro-batches and axes. After Wang et al., "Auxiliary-Loss-Free
    Load Balancing" (2024); the mean of the change is taken off, so that the bias does not drift as a whole, which
    would change no choice.
    """
    xp = backend_of(bias).xp
    change = xp.sign(counts.sum() - counts * counts.size).astype(bias.dtype)  # exact: the mean is never rounded
    return bias + (change - change.mean()) * bias.dtype.type(rate)


def _pull(choices: Choices, counts: Array, tokens: int, coefficient: float) -> Array:
    """[n E]: the gradient of the loss by a token's share of each expert."""
    counts = counts.astype(choices.shares.dtype)
    f = counts / counts.sum(axis=1, keepdims=True).clip(1)
    return f * f.dtype.type(coefficient * counts.shape[1] / max(tokens, 1))


def _log_sum(logits: Array) -> tuple[Array, Array]:
    """logsumexp[t] and softmax[t E] of logits."""
    xp = backend_of(logits).xp
    top = highest(logits)
    softmax = xp.exp(logits - top[:, None])
    sums = softmax.sum(axis=1)
    softmax /= sums[:, None]
    return xp.log(sums) + top, softmax
