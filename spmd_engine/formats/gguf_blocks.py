"""Numbers that a GGUF file packs in blocks: each block has a scale, many an offset, and a few bits a number.

After https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. In every function ``b`` are the bytes of n blocks,
uint8[n bytes]; the result is float32[n numbers], computed as ggml does, product by product, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

#: What the 4 bits of an IQ4 number stand for.
_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


@dataclass(frozen=True)
class BlockKind:
    """A way to pack: how many numbers lie in how many bytes."""

    name: str
    numbers: int
    nbytes: int
    unpack: Callable[[np.ndarray], np.ndarray]


def _half(b: np.ndarray, at: int) -> np.ndarray:
    """float32[n 1] of the float16 that begins at that byte."""
    return b[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(b: np.ndarray) -> np.ndarray:
    """uint8[... 2 bytes]: the low four bits of all bytes, then the high ones."""
    return np.stack((b & 15, b >> 4), axis=-2)


def _bits(b: np.ndarray, shifts: range, mask: int) -> np.ndarray:
    """uint8[... shifts bytes]: of all bytes the bits from each shift on."""
    return b[..., None, :] >> np.array(shifts, np.uint8)[:, None] & np.uint8(mask)


def _q4_0(b: np.ndarray) -> np.ndarray:
    return (_nibbles(b[:, 2:]).reshape(-1, 32).astype(np.int8) - 8) * _half(b, 0)


def _q4_1(b: np.ndarray) -> np.ndarray:
    return _nibbles(b[:, 4:]).reshape(-1, 32) * _half(b, 0) + _half(b, 2)


def _fifth_bit(b: np.ndarray) -> np.ndarray:
    """uint8[n 32] of four bytes: a bit a number, as the 16."""
    return np.unpackbits(b, axis=1, bitorder="little") << 4


def _q5_0(b: np.ndarray) -> np.ndarray:
    small = _nibbles(b[:, 6:]).reshape(-1, 32) | _fifth_bit(b[:, 2:6])
    return (small.astype(np.int8) - 16) * _half(b, 0)


def _q5_1(b: np.ndarray) -> np.ndarray:
    small = _nibbles(b[:, 8:]).reshape(-1, 32) | _fifth_bit(b[:, 4:8])
    return small * _half(b, 0) + _half(b, 2)


def _q8_0(b: np.ndarray) -> np.ndarray:
    return b[:, 2:].view(np.int8) * _half(b, 0)


def _q2_k(b: np.ndarray) -> np.ndarray:
    """16 scales and offsets of 4 bits; 2 bits a number, four neighbouring runs of 32 of which share 32 bytes."""
    small = _bits(b[:, 16:80].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 16, 16)
    scale, offset = _half(b, 80) * (b[:, :16] & 15), _half(b, 82) * (b[:, :16] >> 4)
    return (scale[:, :, None] * small - offset[:, :, None]).reshape(-1, 256)


def _q3_k(b: np.ndarray) -> np.ndarray:
    """16 scales of 6 bits, about 32; 2 bits a number as in Q2_K, a third one in the first 32 bytes, about 4."""
    high = _bits(b[:, :32], range(8), 1).reshape(-1, 16, 16)
    small = _bits(b[:, 32:96].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 16, 16)
    low, upper = _nibbles(b[:, 96:104]).reshape(-1, 16), _bits(b[:, 104:108], range(0, 8, 2), 3).reshape(-1, 16)
    scale = _half(b, 108) * ((low | upper << 4).astype(np.int8) - 32)
    return (scale[:, :, None] * ((small | high << 2).astype(np.int8) - 4)).reshape(-1, 256)


def _scales_and_offsets(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32[n 8 1] each, 6 bits in twelve bytes that follow the two float16 by which all are multiplied."""
    first, second, third = (b[:, at : at + 4] for at in (4, 8, 12))
    scale = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    offset = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    return (_half(b, 0) * scale)[:, :, None], (_half(b, 2) * offset)[:, :, None]


def _q4_k(b: np.ndarray) -> np.ndarray:
    scale, offset = _scales_and_offsets(b)
    small = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (scale * small - offset).reshape(-1, 256)


def _q5_k(b: np.ndarray) -> np.ndarray:
    scale, offset = _scales_and_offsets(b)
    small = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | _bits(b[:, 16:48], range(8), 1) << 4
    return (scale * small - offset).reshape(-1, 256)


def _q6_k(b: np.ndarray) -> np.ndarray:
    """16 scales of 8 bits; 4 bits a number, and two more, about 32; each half of the 256 by itself."""
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 128)
    high = _bits(b[:, 128:192].reshape(-1, 2, 32), range(0, 8, 2), 3).reshape(-1, 2, 128)
    small = ((low | high << 4).astype(np.int8) - 32).reshape(-1, 16, 16)
    return ((_half(b, 208) * b[:, 192:208].view(np.int8))[:, :, None] * small).reshape(-1, 256)


def _iq4_nl(b: np.ndarray) -> np.ndarray:
    return _LEVELS[_nibbles(b[:, 2:]).reshape(-1, 32)] * _half(b, 0)


def _iq4_xs(b: np.ndarray) -> np.ndarray:
    """8 scales of 6 bits, about 32: four bits of each in bytes 4 to 8, the upper two in bytes 2 and 3."""
    low = np.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    high = (b[:, 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 8)
    scale = _half(b, 0) * ((low | high << 4).astype(np.int8) - 32)
    return (scale[:, :, None] * _LEVELS[_nibbles(b[:, 8:].reshape(-1, 8, 16))].reshape(-1, 8, 32)).reshape(-1, 256)


#: By the number that a file says.
KINDS = {
    2: BlockKind("Q4_0", 32, 18, _q4_0),
    3: BlockKind("Q4_1", 32, 20, _q4_1),
    6: BlockKind("Q5_0", 32, 22, _q5_0),
    7: BlockKind("Q5_1", 32, 24, _q5_1),
    8: BlockKind("Q8_0", 32, 34, _q8_0),
    10: BlockKind("Q2_K", 256, 84, _q2_k),
    11: BlockKind("Q3_K", 256, 110, _q3_k),
    12: BlockKind("Q4_K", 256, 144, _q4_k),
    13: BlockKind("Q5_K", 256, 176, _q5_k),
    14: BlockKind("Q6_K", 256, 210, _q6_k),
    20: BlockKind("IQ4_NL", 32, 18, _iq4_nl),
    23: BlockKind("IQ4_XS", 256, 136, _iq4_xs),
}
BY_NAME = {kind.name: kind for kind in KINDS.values()}
