"""Keep freed memory instead of returning it to the system: page faults otherwise cost 10% of a step.

glibc hands large blocks back with munmap as soon as they are freed, and the next temporary of the same
size faults every page in again. Two settings keep them in the heap.
"""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> bool:
    """Serve every block from the heap and never trim it. False where the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
