"""Helpers for the tests of routing: all kinds of routers, tokens sharded over ranks, a collective without ranks."""

import numpy as np

from spmd_engine.layers.moe.routing import Choices, RouterOptions, Tokens, choose
from support.numerics import normals

EXPERTS = 8
ROUTERS = {
    "mixtral": RouterOptions(),
    "after": RouterOptions(when="after", scale=1.5),
    "plain": RouterOptions(top_k=3, renormalise=False, scale=0.5),
    "switch": RouterOptions(top_k=1, renormalise=False),
    "sigmoid": RouterOptions(score="sigmoid", renormalise=False),
    "deepseek": RouterOptions(top_k=3, score="sigmoid", scale=2.5, groups=4, top_groups=2),
    "groups": RouterOptions(top_k=3, renormalise=False, groups=2, top_groups=1, group_best=1),
    "everyone": RouterOptions(top_k=EXPERTS),
}

#: Shardings of six samples of nine positions: the samples and positions of each rank.
CUTS = {
    "one": [(range(6), range(9))],
    "batch": [(range(0, 1), range(9)), (range(1, 6), range(9))],
    "batch, an empty rank": [(range(0, 4), range(9)), (range(0), range(9)), (range(4, 6), range(9))],
    "sequence": [(range(6), range(0, 2)), (range(6), range(2, 9)), (range(6), range(0))],
    "zigzag": [(range(6), [0, 1, 2, 8]), (range(6), [3, 4, 5, 6, 7])],
    "both": [(b, s) for b in (range(2), range(2, 6)) for s in ([0, 1, 7, 8], [2, 3, 6], [4, 5])],
    "both, in another order": [(b, s) for s in ([4, 5], [0, 8], [1, 2, 3, 6, 7]) for b in (range(3, 6), range(3))],
}
WHOLE = CUTS["one"]


def tokens_of(samples, positions):
    return Tokens(np.asarray(samples, np.int64), np.asarray(positions, np.int64))


def block(whole, samples, positions):
    """A rank's rows of whole[6 9 ...], as [t ...]."""
    part = whole[np.ix_(list(samples), list(positions))]
    return part.reshape(part.shape[0] * part.shape[1], *whole.shape[2:])


def assembled(cut, parts):
    """whole[6 9 ...], joined from the rows of all ranks; every token must be on exactly one rank."""
    whole = np.zeros((6, 9, *parts[0].shape[1:]), parts[0].dtype)
    held = np.zeros((6, 9), int)
    for (samples, positions), part in zip(cut, parts, strict=True):
        index = np.ix_(list(samples), list(positions))
        whole[index] = part.reshape(len(samples), len(positions), *part.shape[1:])
        held[index] += 1
    assert (held == 1).all()
    return whole


def on_ranks(cut, logits, options, bias=None, key=0):
    """(Choices, Tokens) of each rank, for logits[6 9 E]."""
    out = []
    for samples, positions in cut:
        tokens = tokens_of(samples, positions)
        out.append((choose(block(logits, samples, positions), bias, options, tokens=tokens, key=key), tokens))
    return out


def collectively(function, ranks):
    """``function(*rank, gather)`` of each rank, in two passes: the first collects the contributions of all ranks."""
    given = []

    def contribute(own):
        given.append(own)
        return [own]

    for rank in ranks:
        function(*rank, contribute)
    return [function(*rank, lambda own: list(given)) for rank in ranks]


def chosen(experts, width=EXPERTS, used=None, weights=None):
    """Choices of given experts[t k]."""
    experts = np.asarray(experts, np.int64)
    options = RouterOptions(top_k=experts.shape[1])
    used = np.ones(experts.shape, bool) if used is None else used
    weights = np.full(experts.shape, 0.5) if weights is None else weights
    shares = np.full((len(experts), width), 1 / width)
    return Choices(experts, weights, used, shares, None, options)


LOGITS = normals(6, 9, EXPERTS, seed=3) * 2
