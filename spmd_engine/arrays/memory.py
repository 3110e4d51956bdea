"""Keep freed memory instead of returning it to the system: page faults otherwise cost 10% of a step.

glibc hands large blocks back with munmap as soon as they are freed, and the next temporary of the same
size faults every page in again. Two settings keep them in the heap. The heap consists of huge pages, which
need fewer address look-ups: another 4%.
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
    is_set = bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))
    if is_set:
        _advise_huge_pages(libc)
    return is_set


def return_freed_memory() -> None:
    """Return the memory of freed blocks to the system once, in a process that will not need it for long."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def _advise_huge_pages(libc: ctypes.CDLL) -> None:
    """Grow the heap by ``_RESERVED`` free bytes of huge pages, if the system allows it."""
    libc.malloc.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(_RESERVED))
    if block:
        first = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(_RESERVED - mmap.PAGESIZE), mmap.MADV_HUGEPAGE)
        libc.free(ctypes.c_void_p(block))


def fresh_zeros(size: int, dtype: Any, *, huge: bool) -> Array:
    """A flat array of zeros. A large one takes memory where it is written, in ``huge`` pages or in small ones, which
    keep an array that is perhaps never written out of its neighbour's huge pages."""
    length = size * CPU.xp.dtype(dtype).itemsize
    if length < _WORTH_A_MAPPING:
        return CPU.xp.zeros(size, dtype)
    mapped = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return CPU.xp.frombuffer(mapped, dtype)


def address_of(x: Array) -> int:
    """The address of ``x`` in this process."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(x))  # five times as fast
    except (TypeError, ValueError, BufferError):  # read-only, empty, not contiguous, or of a dtype unknown to buffers
        return x.__array_interface__["data"][0]
