"""Keep freed memory instead of returning it to the system: page faults otherwise cost 10% of a step.

glibc hands large blocks back with munmap as soon as they are freed, and the next temporary of the same
size faults every page in again. Two settings keep them in the heap. The heap is made of huge pages, which
need fewer look-ups of addresses: another 4%.
"""

import ctypes
import mmap
import platform
from contextlib import suppress
from typing import Any

from spmd_engine.arrays.backend import CPU, Array

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = -1
_WORTH_A_MAPPING = 1 << 18  # bytes
_RESERVED = 8 << 30  # bytes of addresses; memory is taken page by page, where it is written


def keep_freed_memory() -> bool:
    """Serve every block from the heap and never trim it. False where the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    kept = bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))
    if kept:
        _advise_huge_pages(libc)
    return kept


def _advise_huge_pages(libc: ctypes.CDLL) -> None:
    """Grow the heap by ``_RESERVED`` bytes of huge pages, which are free at once; by none if the system objects."""
    libc.malloc.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(_RESERVED))
    if block:
        first = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(_RESERVED - mmap.PAGESIZE), mmap.MADV_HUGEPAGE)
        libc.free(ctypes.c_void_p(block))


def fresh_zeros(size: int, dtype: Any, *, huge: bool) -> Array:
    """A flat array of zeros; a large one takes memory only where it is written to first, in ``huge`` pages or in
    small ones, as which an array that is perhaps never written to is none of its neighbour's huge ones."""
    length = size * CPU.xp.dtype(dtype).itemsize
    if length < _WORTH_A_MAPPING:
        return CPU.xp.zeros(size, dtype)
    mapped = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return CPU.xp.frombuffer(mapped, dtype)


def address_of(x: Array) -> int:
    """Where in this process's memory ``x`` begins."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(x))  # in a fifth of the time
    except (TypeError, ValueError, BufferError):  # read-only, empty, in pieces, or of a dtype that buffers do not know
        return x.__array_interface__["data"][0]
