"""Encoding of a long text in bounded memory; the tokens are the same as when the text is encoded at once.

The text is encoded in overlapping windows. Two neighbours are joined at a border in their overlap: no token on one side
of it depends on text of the other side. There are two kinds of borders:

- between words, if the tokenizer splits a text into words. Its patterns match from left to right, so after a border
  they find the same words wherever the text begins. Both windows must have the border, with ``ALIKE`` equal tokens on
  both sides, because the end of a window can change its last words, and its beginning the first ones;
- between tokens, if a whole text is one word to the tokenizer: the two characters at the border are neighbours in no
  token of the vocabulary, so no merge can cross it.

If there is no border (a word is longer than the overlap), the two windows are encoded as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

WINDOW = 1 << 17  #: characters of a window
SHARED = 1 << 12  #: characters that two neighbouring windows share
TOGETHER = 8  #: windows that the library encodes in parallel
ALIKE = 16  #: tokens on each side of a border that both windows must have
_SAMPLE = "Some words, and 1234 numbers.\n\nA line;\t\u65e5\u672c."

#: Whether no token can hold the end of the first token and the beginning of the second.
Separates = Callable[[int, int], bool]


@dataclass(frozen=True)
class _Encoded:
    begin: int  #: in characters of the whole text
    text: str
    ids: np.ndarray
    places: np.ndarray  #: the first character of each token, in the whole text
    words: np.ndarray  #: the number of each token's word within the window


def encode_long(inner: Any, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the tokens of a text in pieces; ``inner`` is a tokenizer of the ``tokenizers`` library."""
    separates = _separates(inner)
    windows = _windows(inner, texts)
    left, first = next(windows, None), 0  # a window, and its first token that is not yet returned
    for right in windows:
        assert left is not None
        if border := _border(left, right, separates):
            yield left.ids[first : border[0]]
            left, first = right, border[1]
            continue
        # At least double the text: adding one window at a time to a word of n characters takes n^2 steps.
        more = islice(windows, len(left.text) // WINDOW)
        text = "".join([left.text, *(window.text[SHARED:] for window in (right, *more))])
        left = _encoded(inner, [(left.begin, text)])[0]
    if left is not None:
        yield left.ids[first:]


def _windows(inner: Any, texts: Iterable[str]) -> Iterator[_Encoded]:
    windows = _overlapping(texts)
    while batch := list(islice(windows, TOGETHER)):
        yield from _encoded(inner, batch)


def _overlapping(texts: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Overlapping windows of the text, each with the place where it begins."""
    begin, held = 0, ""
    for text in texts:
        held += text
        while len(held) > WINDOW + SHARED:  # the last window is at least as long as its overlap
            yield begin, held[:WINDOW]
            begin, held = begin + WINDOW - SHARED, held[WINDOW - SHARED :]
    if held:
        yield begin, held


def _encoded(inner: Any, texts: Sequence[tuple[int, str]]) -> list[_Encoded]:
    windows = []
    encodings = inner.encode_batch([text for _, text in texts], add_special_tokens=False)
    for (begin, text), encoding in zip(texts, encodings, strict=True):
        places = np.array([place for place, _ in encoding.offsets], np.int64) + begin
        words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
        windows.append(_Encoded(begin, text, np.array(encoding.ids, np.uint32), places, words))
    return windows


def _border(left: _Encoded, right: _Encoded, separates: Separates) -> tuple[int, int] | None:
    """The indices, in both windows, of the first token after a border; None if there is no border."""
    for middle in (right.begin + SHARED * part // 4 for part in (2, 1, 3)):
        i, j = (int(np.searchsorted(window.places, middle)) for window in (left, right))
        # i and j are the same token; the border is the first place after it where both windows agree.
        count = min(len(left.ids) - i, len(right.ids) - j) - ALIKE
        before = min(i, j, ALIKE)
        if before < ALIKE or count < 1:
            continue
        ours, theirs = (slice(at - ALIKE, at + count + ALIKE) for at in (i, j))
        same = (left.ids[ours] == right.ids[theirs]) & (left.places[ours] == right.places[theirs])
        agreed = np.convolve(same, np.ones(2 * ALIKE, np.int64), "valid") == 2 * ALIKE
        for k in np.flatnonzero(agreed[:count]).tolist():
            borders = all(window.words[at + k - 1] != window.words[at + k] for window, at in ((left, i), (right, j)))
            if borders or separates(int(left.ids[i + k - 1]), int(left.ids[i + k])):
                return i + k, j + k
    return None


def _separates(inner: Any) -> Separates:
    model = inner.model
    marks = ("continuing_subword_prefix", "end_of_word_suffix")  # they change a token's characters
    if (
        _splits(inner)
        or type(model).__name__ not in ("BPE", "Unigram")
        or any(getattr(model, mark, None) for mark in marks)
    ):
        return lambda before, behind: False
    pairs: set[str] = set()
    for token in inner.get_vocab(with_added_tokens=False):
        pairs.update(map(str.__add__, token, token[1:]))

    def separates(before: int, behind: int) -> bool:
        return inner.id_to_token(before)[-1:] + inner.id_to_token(behind)[:1] not in pairs

    return separates


def _splits(inner: Any) -> bool:
    """Whether this tokenizer splits a text into words."""
    if inner.pre_tokenizer is None:
        return False
    sample = inner.normalizer.normalize_str(_SAMPLE) if inner.normalizer else _SAMPLE
    return len(inner.pre_tokenizer.pre_tokenize_str(sample)) > 1
