"""Images that are shifted and mirrored at random, as functions of a seed and a place alone."""

from __future__ import annotations

import numpy as np

from spmd_engine.arrays.random import integers, key_of

#: What may be done to an image before it is learnt from.
AUGMENT = ("none", "shift", "shift-flip")


def augmented(x: np.ndarray, places: np.ndarray, seed: int, how: str) -> np.ndarray:
    """Images[b h w c], each changed as its place in all epochs says: the same on any mesh, and after any resume.

    ``shift`` moves an image by up to an eighth of its height and width, each way and each amount as likely as any
    other, and fills with 0; ``shift-flip`` also mirrors every second one, left to right; ``none`` changes nothing.
    """
    if how == "none":
        return x
    x = shifted(x, *(_offsets(seed, dim, length, places) for dim, length in zip("hw", x.shape[1:3], strict=True)))
    if how == "shift-flip":
        mirrored = integers(key_of(seed, "flip"), 2, places) == 1
        x[mirrored] = x[mirrored, :, ::-1]
    return x


def shifted(x: np.ndarray, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Images[b h w c], each moved by its own numbers of pixels, down[b] and right[b], with 0 where nothing was."""
    _, height, width, _ = x.shape
    rows = np.arange(height) - down[:, None]  # b h: where each row comes from
    columns = np.arange(width) - right[:, None]
    here = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    samples = np.arange(len(x))[:, None, None]
    taken = x[samples, (rows % height)[:, :, None], (columns % width)[:, None, :]]
    return np.where(here[..., None], taken, x.dtype.type(0))


def _offsets(seed: int, dim: str, length: int, places: np.ndarray) -> np.ndarray:
    most = length // 8
    return integers(key_of(seed, "shift", dim), 2 * most + 1, places) - most
