"""Random numbers as functions of (key, global index): counter-based, so ranks draw independently.

A rank computes only its block of an array, with the values of the global array, on any mesh. The hash is 32-bit
multiply-xorshift (the `lowbias32` constants of Chris Wellons' hash prospector), which is the same in NumPy and CuPy and
takes about 2 ns per element.
"""

from __future__ import annotations

from math import prod
from zlib import crc32

import numpy as np

from spmd_engine.arrays.backend import CPU, Array, Backend, backend_of

_CHUNK = 1 << 15  # elements hashed at a time: a few temporaries of that size stay in cache


def key_of(*parts: object) -> int:
    """A 32-bit key of anything printable: ``key_of(seed, "block0/mlp/w0")``. Equal on every machine."""
    return crc32("\x1f".join(map(str, parts)).encode())


def hash_bits(key: int, index: Array, xp=np) -> Array:
    """32 random bits for each ``index``, uint64, or, in half the time, uint32."""
    x, high = index, xp.uint32(0)
    if index.dtype != xp.uint32:
        x, high = (index & 0xFFFFFFFF).astype(xp.uint32), (index >> 32).astype(xp.uint32)
    x = _mix(x ^ xp.uint32(_seed_of(key)), xp)
    x ^= high * xp.uint32(0x85EBCA6B) + xp.uint32(key)
    return _mix(x, xp)


def uniform(key: int, shape, dtype, block=None, backend: Backend = CPU) -> Array:
    """Uniform in (0, 1), rounded to ``dtype``: a ``block`` (slices; default all) of a ``shape`` array."""
    draw = lambda index, xp: _unit(hash_bits(key, index, xp), xp)
    return _fill(shape, dtype, block, backend, draw, "uniform", (_seed_of(key), key))


def normal(key: int, shape, dtype, block=None, backend: Backend = CPU) -> Array:
    """Standard normal numbers, by Box and Muller from two uniforms of each index."""
    first, second = key_of(key, "radius"), key_of(key, "angle")

    def draw(index, xp):
        radius, angle = (_unit(hash_bits(seed, index, xp), xp) for seed in (first, second))
        xp.log(radius, out=radius)
        radius *= -2.0
        xp.sqrt(radius, out=radius)
        angle *= 2.0 * np.pi
        radius *= xp.cos(angle, out=angle)
        return radius

    return _fill(shape, dtype, block, backend, draw, "normal", (_seed_of(first), first, _seed_of(second), second))


def bernoulli(key: int, probability: float, rows: Array, width: int, backend: Backend = CPU) -> Array:
    """bool[..., width]: True with ``probability``, a function of (key, row's index, column) alone.

    ``rows`` holds global row indices (for dropout: sample and position), of any shape.
    """
    xp = backend.xp
    threshold = xp.uint32(min(int(probability * 2.0**32), 2**32 - 1))
    flat = xp.asarray(rows, xp.uint64).reshape(-1)
    if backend.on_device and backend.kernels is not None:
        mask = backend.kernels.bernoulli(flat, width, (_seed_of(key), key), int(threshold))
        return mask.reshape((*np.shape(rows), width))
    columns = xp.arange(width, dtype=xp.uint64)
    mask = backend.empty((flat.size, width), bool)
    step = max(1, _CHUNK // max(width, 1))
    for start in range(0, flat.size, step):
        index = flat[start : start + step, None] * xp.uint64(width) + columns
        mask[start : start + step] = hash_bits(key, index, xp) < threshold
    return mask.reshape((*np.shape(rows), width))


def uniform_at(key: int, index: Array) -> Array:
    """float64 in (0, 1) for each ``index``, nonnegative integers of any shape, on their device."""
    xp = backend_of(index).xp
    return _unit(hash_bits(key, index, xp), xp)


def gumbel_at(key: int, index: Array) -> Array:
    """float64 with Gumbel's distribution for each ``index``: the argmax of scores plus these draws from the softmax."""
    xp = backend_of(index).xp
    return -xp.log(-xp.log(uniform_at(key, index)))


def integers(key: int, high: int, index: Array) -> np.ndarray:
    """Integers in [0, high) for each index; 64 bits are drawn, so the bias is below high / 2^64."""
    index = np.asarray(index, np.uint64)
    bits = hash_bits(key_of(key, 0), index).astype(np.uint64) << np.uint64(32)
    return ((bits | hash_bits(key_of(key, 1), index)) % np.uint64(high)).astype(np.int64)


def _fill(shape, dtype, block, backend, draw, kernel, keys):
    """``draw(index, xp)`` of the global indices of a block; a device has a ``kernel`` that does it in one launch."""
    xp = backend.xp
    block = tuple(block) if block is not None else (slice(None),) * len(shape)
    ranges = [range(*part.indices(size)) for part, size in zip(block, shape, strict=True)]
    out = backend.empty([len(r) for r in ranges], dtype)
    if out.size == 0:
        return out
    # The leading dimensions merge into rows of indices, the last gives columns; a chunk of both at a time.
    strides = np.cumprod([1, *reversed(shape[1:])])[::-1] if len(shape) else np.array([1])
    number = np.uint32 if prod(shape) < 1 << 32 else np.uint64  # large enough for every index, and for their number
    rows = np.zeros(1, number)
    for r, stride in zip(ranges[:-1], strides[:-1], strict=True):
        offsets = np.asarray(r, number) * number(stride)
        rows = (rows[:, None] + offsets).reshape(-1)
    columns = xp.arange(ranges[-1].start, ranges[-1].stop, dtype=number) if shape else xp.zeros(1, number)
    flat = out.reshape(rows.size, columns.size)
    rows = xp.asarray(rows)
    if backend.on_device and backend.kernels is not None and backend.kernels.takes(out.dtype):
        getattr(backend.kernels, kernel)(rows.astype(xp.uint64), columns.astype(xp.uint64), keys, flat)
        return out
    height = max(1, _CHUNK // columns.size)
    for top in range(0, rows.size, height):
        for left in range(0, columns.size, _CHUNK):
            part = slice(top, top + height), slice(left, left + _CHUNK)
            flat[part] = draw(rows[part[0], None] + columns[part[1]], xp)
    return out


def _unit(bits: Array, xp) -> Array:
    """float64 in (0, 1): never 0, so that its logarithm exists."""
    x = bits.astype(xp.float64)
    x += 0.5
    x *= 2.0**-32
    return x


def _mix(x: Array, xp) -> Array:
    x ^= x >> xp.uint32(16)
    x *= xp.uint32(0x7FEB352D)
    x ^= x >> xp.uint32(15)
    x *= xp.uint32(0x846CA68B)
    x ^= x >> xp.uint32(16)
    return x


def _seed_of(key: int) -> int:
    """What ``hash_bits`` mixes with the low bits of an index."""
    x = key ^ 0x9E3779B9
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
