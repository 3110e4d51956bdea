"""Blocks of CUDA threads without a GPU: the host's C++ compiler compiles a kernel's text, fibers are its threads.

The text is that which NVRTC compiles: shared memory, barriers of blocks and warps, and shuffles work as on a device.
The threads of a block run one after the other, each up to its next barrier, and each warp up to a barrier of its block,
in ascending or descending order: where a barrier is missing, the results of the two orders differ. Shared memory is NaN
when a block starts. These raise KernelError: threads that wait at different barriers, or end while others wait, and an
index outside of an array.
"""

import ctypes
import re
from functools import cached_property
from pathlib import Path

import numpy as np

from support.cuda_on_host import compiled

FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wdouble-promotion", "-Wno-unknown-pragmas"]
FLAGS += ["-Werror", "-c"]
#: Indices of arrays are checked by code of the compiler, which calls a function of RUNTIME: no library of it is linked.
CHECKED = ["-fsanitize=bounds"]

#: What RUNTIME and a kernel share. The headers of RUNTIME take longer to compile than a kernel.
SHARED = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
using namespace std;

struct Index { int x, y, z; };
extern __thread Index threadIdx, blockIdx, blockDim, gridDim;

namespace fibers {
    enum Wait { READY, WARP, BLOCK, ENDED };
    typedef void Body(void **);
    void pause(Wait wait, int line);
    uint64_t *exchange(unsigned mask, int line);
    void clear(void *shared, size_t size);
    const char *launch(Body *kernel, const int *grid, int threads, int descending, void **arguments);
}
"""

RUNTIME = r"""
#include <csetjmp>
#include <cstdio>
#include <algorithm>
#include <memory>
#include <vector>
#include <ucontext.h>

__thread Index threadIdx, blockIdx, blockDim, gridDim;

namespace fibers {
    struct Fiber { jmp_buf context; ucontext_t first; bool begun; Wait wait; int line, shuffles; };
    constexpr int STACK = 1 << 16, WARP_SIZE = 32;
    static thread_local vector<Fiber> all;
    static thread_local unique_ptr<char[]> stacks;
    static thread_local vector<uint64_t> exchanged[2];
    static thread_local jmp_buf scheduler;
    static thread_local int current, started;
    static thread_local char error[256];
    static thread_local Body *body;
    static thread_local void **arguments;

    __attribute__((noinline)) void pause(Wait wait, int line) {
        Fiber &me = all[current];
        me.wait = wait, me.line = line;
        if (!_setjmp(me.context)) _longjmp(scheduler, 1);
    }
    void live() {
        for (;;) {
            body(arguments);
            pause(ENDED, 0);
        }
    }
    __attribute__((noinline)) void resume(int i) {
        current = i, threadIdx = {i, 0, 0};
        if (_setjmp(scheduler)) return;
        if (all[i].begun) _longjmp(all[i].context, 1);
        all[i].begun = true, ++started;
        setcontext(&all[i].first);
    }
    void make(int threads) {
        all.assign(threads, Fiber());
        stacks.reset(new char[size_t(STACK) * threads]);
        for (int i = 0; i < threads; ++i) {
            getcontext(&all[i].first);
            all[i].first.uc_stack.ss_sp = &stacks[size_t(STACK) * i], all[i].first.uc_stack.ss_size = STACK;
            makecontext(&all[i].first, live, 0);
        }
        for (auto &each : exchanged) each.assign(threads, 0);
    }
    // Lets those from first to last go on if all wait alike; false if they do not.
    bool release(int first, int last, Wait wait) {
        for (int i = first; i < last; ++i)
            if (all[i].wait != wait || all[i].line != all[first].line) return false;
        for (int i = first; i < last; ++i) all[i].wait = READY;
        return true;
    }
    const char *text(const Fiber &fiber, char *out, size_t size) {
        if (fiber.wait == ENDED) return "has ended";
        snprintf(out, size, "waits for its %s at line %d", fiber.wait == WARP ? "warp" : "block", fiber.line);
        return out;
    }
    // Each warp runs as far as it can before the next one begins.
    void run_block(bool descending) {
        const int threads = all.size(), warps = (threads + WARP_SIZE - 1) / WARP_SIZE;
        started = 0;
        for (auto &fiber : all) fiber.wait = READY;
        do {
            for (int w = 0; w < warps; ++w) {
                const int first = WARP_SIZE * (descending ? warps - 1 - w : w), last = min(first + WARP_SIZE, threads);
                do {
                    for (int n = first; n < last; ++n) {
                        const int i = descending ? first + last - 1 - n : n;
                        if (all[i].wait == READY) resume(i);
                        if (*error) return;
                    }
                } while (release(first, last, WARP));
            }
        } while (release(0, threads, BLOCK));
        char here[64], there[64];
        for (int i = 0; i < threads; ++i)
            if (all[i].wait != all[0].wait || all[i].line != all[0].line) {
                snprintf(error, sizeof error, "thread 0 %s, thread %d %s", text(all[0], here, sizeof here), i,
                         text(all[i], there, sizeof there));
                return;
            }
    }
    // Where all threads put what they shuffle next.
    uint64_t *exchange(unsigned mask, int line) {
        if (mask != 0xFFFFFFFFu) snprintf(error, sizeof error, "a shuffle of some lanes at line %d", line);
        return exchanged[all[current].shuffles++ % 2].data();
    }
    void clear(void *shared, size_t size) {
        if (started == 1 && all[current].wait == READY) memset(shared, 0xFF, size);
    }
    const char *launch(Body *kernel, const int *grid, int threads, int descending, void **given) {
        if (int(all.size()) != threads || *error) make(threads);
        *error = 0, body = kernel, arguments = given;
        gridDim = {grid[0], grid[1], grid[2]}, blockDim = {threads, 1, 1};
        for (int z = 0; z < grid[2]; ++z)
            for (int y = 0; y < grid[1]; ++y)
                for (int x = 0; x < grid[0] && !*error; ++x) {
                    blockIdx = {x, y, z};
                    run_block(descending);
                }
        return *error ? error : nullptr;
    }
}
struct Place_ { const char *file; uint32_t line, column; };
extern "C" void __ubsan_handle_out_of_bounds(void *place, uintptr_t index) {
    snprintf(fibers::error, sizeof fibers::error, "index %zd is outside of its array at line %u", ptrdiff_t(index),
             ((Place_ *)place)->line);
    _longjmp(fibers::scheduler, 1);
}
"""

CUDA = r"""
namespace fibers {
    template <class V> V shuffle(unsigned mask, V x, int lanes, int line) {
        uint64_t *slots = exchange(mask, line);
        memcpy(&slots[threadIdx.x], &x, sizeof x);
        pause(WARP, line);
        memcpy(&x, &slots[threadIdx.x ^ lanes], sizeof x);
        return x;
    }
    template <class... A, size_t... I> void call(void (*kernel)(A...), void **given, index_sequence<I...>) {
        kernel(*(A *)given[I]...);
    }
    template <class... A> void unpack(void (*kernel)(A...), void **given) {
        call(kernel, given, index_sequence_for<A...>());
    }
}
#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __shared__ static thread_local
#define __syncthreads() fibers::pause(fibers::BLOCK, __LINE__)
#define __syncwarp() fibers::pause(fibers::WARP, __LINE__)
#define __shfl_xor_sync(mask, x, lanes) fibers::shuffle(mask, x, lanes, __LINE__)
static inline float __uint_as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t __float_as_uint(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
#line 1 "kernel"
"""

LAUNCH = r"""
extern "C" __attribute__((visibility("default")))
const char *launch(const int *grid, int threads, int descending, void **arguments) {
    return fibers::launch([](void **given) { fibers::unpack(NAME, given); }, grid, threads, descending, arguments);
}
"""


class KernelError(Exception):
    """Threads of a block diverge at a barrier, or an index is outside of its array."""


class ThreadedKernel:
    """A kernel that is called like cupy.RawKernel, on arrays of the host."""

    def __init__(self, text: str, name: str, folder: Path, checked: bool = False) -> None:
        self.text, self.name, self.folder, self.checked = text, name, folder, checked

    @cached_property
    def launch(self):
        flags = [*FLAGS, *(CHECKED if self.checked else [])]
        text = re.sub(r"(__shared__ \w+) ([^;]+;)", _cleared, self.text)
        runtime = compiled(self.folder, "runtime", SHARED + RUNTIME, FLAGS)
        kernel = compiled(self.folder, self.name, SHARED + CUDA + text + LAUNCH.replace("NAME", self.name), flags)
        launch = ctypes.CDLL(str(compiled(self.folder, self.name, "", ["-shared", kernel, runtime]))).launch
        launch.restype = ctypes.c_char_p
        return launch

    def __call__(self, grid, block, args, descending=False):
        assert block[1:] == (1, 1) and min(grid) > 0, (grid, block)
        values = [_value(x) for x in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        if error := self.launch((ctypes.c_int * 3)(*grid), block[0], descending, pointers):
            raise KernelError(f"{self.name}: {error.decode()}")


def _cleared(declaration):
    names = re.findall(r"(\w+)\[", declaration[2])
    return declaration[0] + " ".join(f"fibers::clear({name}, sizeof {name});" for name in names)


def _value(x):
    if x is None or isinstance(x, np.ndarray):
        return ctypes.c_void_p(None if x is None else x.ctypes.data)
    return ctypes.c_double(x) if isinstance(x, float) else ctypes.c_longlong(x)
