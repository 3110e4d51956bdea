"""Fused causal attention in CUDA C++, forward and backward: all samples and heads in a launch, no stored scores.

The method is that of Dao, "FlashAttention-2" (2023): a block of threads has a tile of queries and takes the keys tile
by tile, with the online softmax of Milakov and Gimelshein (2018). The backward has two kernels and no atomics, so that
its results do not depend on the order of blocks: one with a tile of queries for dq, one with a tile of keys for dk and
dv. Positions, windows and documents are compared inside; binary searches in them find the first and the last tile, so
that hidden tiles are not computed.

Products are multiplications and additions in the dtype of sums, not on tensor cores. The text needs neither CuPy nor a
GPU: ``tests/support/threads_on_host.py`` compiles it with any C++ compiler and runs it with fibers as threads.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from spmd_engine.arrays.backend import Array


GROUPS, LANES = 16, 8  # the threads of a block: a group of lanes shares rows of a tile, and lies in one warp
SHARED = 48 << 10  # bytes of shared memory that a block has on every GPU without a request
SUMS = 64 * 4  # bytes of results that a thread keeps in registers
WIDEST = 128 * 4  # bytes of a head: wider ones leave room for so few rows that loads from shared memory limit the speed
#: Positions are less than this: those of rows outside of an array are this, or its negative.
FAR = 1 << 30
_TYPES = {"float32": "float", "float64": "double", "bfloat16": "bfloat16", "float16": "float16"}


_HALVES = r"""
struct bfloat16 { unsigned short bits; };
struct float16 { unsigned short bits; };
template <class X> __device__ inline X widened(X x) { return x; }
__device__ inline float widened(bfloat16 x) { return __uint_as_float((unsigned int)x.bits << 16); }
__device__ inline void store(T &out, T x) { out = x; }
__device__ inline void store(bfloat16 &out, float x) {  // to nearest even
    const unsigned int bits = __float_as_uint(x);
    out.bits = x != x ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
#ifdef __CUDACC__
__device__ inline float widened(float16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ inline void store(float16 &out, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x)); }
#else
__device__ inline float widened(float16 x) { _Float16 y; memcpy(&y, &x, 2); return float(y); }
__device__ inline void store(float16 &out, float x) { const _Float16 y = _Float16(x); memcpy(&out, &y, 2); }
#endif
"""
_COMMON = r"""
constexpr int FOURS = WIDTH / 4, PARTS = FOURS / LANES, M = GROUPS * ROWS, N = LANES * COLUMNS;
struct alignas(4 * sizeof(T)) Four { T x[4]; };  // a load from shared memory; a fifth one pads rows against conflicts
typedef Four Row[FOURS + 1];
typedef Four Scores[N / 4 + 1];
typedef T Products[ROWS][COLUMNS];
typedef Four Sums[ROWS][PARTS];

struct Place { int position, document; };
struct Range { int first, last; };

__device__ inline int my_row(int i) { return threadIdx.x / LANES + GROUPS * i; }
__device__ inline int my_column(int j) { return threadIdx.x % LANES + LANES * j; }
__device__ inline T hidden() { return T(__uint_as_float(0xFF800000u)); }  // -infinity

__device__ inline T sum_of_lanes(T x) {
    for (int apart = LANES / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, apart);
    return x;
}

// How many of the ascending numbers are at most x.
__device__ inline int up_to(const long long *numbers, int count, long long x) {
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (numbers[middle] <= x) low = middle + 1; else high = middle;
    }
    return low;
}

// Those of ``count`` whose positions are low to high, and whose documents, if any, are those of an own tile.
__device__ inline Range range(const long long *positions, const long long *documents, int count, long long low,
                              long long high, const long long *own_documents, int own_first, int own_last) {
    Range found = {up_to(positions, count, low - 1), up_to(positions, count, high)};
    if (documents) {
        found.first = max(found.first, up_to(documents, count, own_documents[own_first] - 1));
        found.last = min(found.last, up_to(documents, count, own_documents[own_last]));
    }
    return found;
}

__device__ inline Place place(const long long *positions, const long long *documents, int i, int count, int outside) {
    if (i >= count) return {outside, 0};
    return {int(positions[i]), documents ? int(documents[i]) : 0};
}

__device__ inline bool sees(Place query, Place key, int window) {
    return key.position <= query.position && key.position > query.position - window && key.document == query.document;
}

// factor · x, of ``count`` rows, into a tile, with zeros around it
template <int TALL>
__device__ inline void load(Row (&tile)[TALL], const Stored *x, long long stride, int count, int width, T factor) {
    for (int i = threadIdx.x; i < TALL * WIDTH; i += GROUPS * LANES) {
        const int row = i / WIDTH, column = i % WIDTH;
        const bool inside = row < count && column < width;
        tile[row][column / 4].x[column % 4] = inside ? widened(x[row * stride + column]) * factor : T(0);
    }
}

// s += own · others
__device__ inline void multiply(Products &s, const Row (&own)[M], const Row (&others)[N]) {
    #pragma unroll 2
    for (int d = 0; d < FOURS; ++d) {
        Four x[ROWS];
        for (int i = 0; i < ROWS; ++i) x[i] = own[my_row(i)][d];
        for (int j = 0; j < COLUMNS; ++j) {
            const Four y = others[my_column(j)][d];
            for (int i = 0; i < ROWS; ++i)
                for (int e = 0; e < 4; ++e) s[i][j] += x[i].x[e] * y.x[e];
        }
    }
}

// sums += weights · others
__device__ inline void mix(Sums &sums, const Scores (&weights)[M], const Row (&others)[N]) {
    #pragma unroll 1
    for (int n = 0; n < N / 4; ++n) {
        Four weight[ROWS];
        for (int i = 0; i < ROWS; ++i) weight[i] = weights[my_row(i)][n];
        for (int k = 0; k < 4; ++k) {
            for (int c = 0; c < PARTS; ++c) {
                const Four y = others[4 * n + k][my_column(c)];
                for (int i = 0; i < ROWS; ++i)
                    for (int e = 0; e < 4; ++e) sums[i][c].x[e] += weight[i].x[k] * y.x[e];
            }
        }
    }
}

__device__ inline void write(Result *out, const Four (&sums)[PARTS], int width, T factor) {
    for (int c = 0; c < PARTS; ++c)
        for (int e = 0; e < 4; ++e) {
            const int column = 4 * my_column(c) + e;
            if (column < width) store(out[column], sums[c].x[e] * factor);
        }
}

__device__ inline void put(Scores (&scores)[M], int i, int j, T x) {
    scores[my_row(i)][my_column(j) / 4].x[my_column(j) % 4] = x;
}

__device__ inline T capped(T score, T cap) { return cap > 0 ? cap * tanh(score / cap) : score; }

// exp(score - log_sum), and with it the gradient of the score, from that of the probability
__device__ inline T probability(T &score, T &gradient, T cap, bool seen, T log_sum, T projection) {
    score = capped(score, cap);
    const T p = seen ? exp(score - log_sum) : T(0);
    const T slope = cap > 0 ? 1 - score / cap * (score / cap) : T(1);
    gradient = p * (gradient - projection) * slope;
    return p;
}
"""

#: What all kernels take: arrays by their first number and strides; rows of queries are s, those of keys t.
_ARRAYS = "".join(
    f"const Stored *{x}, long long {x}_sample, long long {x}_row, long long {x}_head, "
    for x in ("q", "k", "v", "y", "dy")
)
_PARAMETERS = (
    _ARRAYS
    + """const long long *positions, const long long *key_positions, const long long *documents,
    const long long *key_documents, long long s, long long t, long long shared, long long width, long long window,
    double score_cap, double scale, T *log_sums, T *projections, Result *first_out, Result *second_out"""
)
#: Of a tile of queries: its first row and its rows, and where its head and sample begin.
_QUERY_TILE = """
    const int sample = blockIdx.z, head = blockIdx.y, heads = gridDim.y, first = (gridDim.x - 1 - blockIdx.x) * M;
    const int count = min(M, int(s) - first);
    const T cap = T(score_cap);
    q += sample * q_sample + first * q_row + head * q_head;
    k += sample * k_sample + head / shared * k_head;
    v += sample * v_sample + head / shared * v_head;
    if (documents) documents += sample * s, key_documents += sample * t;
    const Range keys_seen = range(key_positions, key_documents, t, positions[first] - window + 1,
                                  positions[first + count - 1], documents, first, first + count - 1);
    Place queries_at[ROWS];
    Sums sums = {};
    for (int i = 0; i < ROWS; ++i) queries_at[i] = place(positions, documents, first + my_row(i), s, -FAR);
    const long long row_of_sums = ((long long)sample * heads + head) * s + first;
"""
_FORWARD = (
    _QUERY_TILE
    + """
    __shared__ Row queries[M], keys[N];
    __shared__ Scores weights[M];
    load(queries, q, q_row, count, width, scale);
    T top[ROWS], total[ROWS];
    for (int i = 0; i < ROWS; ++i) top[i] = hidden(), total[i] = 0;
    for (int start = keys_seen.first; start < keys_seen.last; start += N) {
        const int found = min(N, keys_seen.last - start);
        __syncthreads();
        load(keys, k + start * k_row, k_row, found, width, 1);
        __syncthreads();
        Products scores = {};
        multiply(scores, queries, keys);
        for (int j = 0; j < COLUMNS; ++j) {
            const Place key = place(key_positions, key_documents, start + my_column(j), t, FAR);
            for (int i = 0; i < ROWS; ++i)
                scores[i][j] = sees(queries_at[i], key, window) ? capped(scores[i][j], cap) : hidden();
        }
        for (int i = 0; i < ROWS; ++i) {
            T highest = top[i];
            for (int j = 0; j < COLUMNS; ++j) highest = scores[i][j] > highest ? scores[i][j] : highest;
            for (int apart = LANES / 2; apart > 0; apart /= 2) {
                const T other = __shfl_xor_sync(0xFFFFFFFFu, highest, apart);
                highest = other > highest ? other : highest;
            }
            const T shift = highest == hidden() ? T(0) : highest, factor = exp(top[i] - shift);
            top[i] = highest;
            total[i] *= factor;
            for (int j = 0; j < COLUMNS; ++j) {
                const T weight = exp(scores[i][j] - shift);
                total[i] += weight;
                put(weights, i, j, weight);
            }
            for (int c = 0; c < PARTS; ++c)
                for (int e = 0; e < 4; ++e) sums[i][c].x[e] *= factor;
        }
        __syncthreads();
        load(keys, v + start * v_row, v_row, found, width, 1);
        __syncthreads();
        mix(sums, weights, keys);
    }
    for (int i = 0; i < ROWS; ++i) {
        const T whole = sum_of_lanes(total[i]);
        if (my_row(i) >= count) continue;
        write(first_out + ((sample * s + first + my_row(i)) * heads + head) * width, sums[i], width,
              whole == 0 ? T(0) : 1 / whole);
        if (threadIdx.x % LANES == 0) log_sums[row_of_sums + my_row(i)] = top[i] + log(whole);
    }
"""
)
_BACKWARD_QUERIES = (
    _QUERY_TILE
    + """
    __shared__ Row queries[M], gradients[M], keys[N];
    __shared__ Scores weights[M];
    y += sample * y_sample + first * y_row + head * y_head;
    dy += sample * dy_sample + first * dy_row + head * dy_head;
    load(queries, q, q_row, count, width, scale);
    load(gradients, dy, dy_row, count, width, 1);
    T log_sum[ROWS], projection[ROWS];
    for (int i = 0; i < ROWS; ++i) {
        const int row = my_row(i);
        T sum = 0;
        for (int d = threadIdx.x % LANES; row < count && d < width; d += LANES)
            sum += widened(dy[row * dy_row + d]) * widened(y[row * y_row + d]);
        projection[i] = sum_of_lanes(sum);
        log_sum[i] = row < count ? log_sums[row_of_sums + row] : T(0);
        if (row < count && threadIdx.x % LANES == 0) projections[row_of_sums + row] = projection[i];
    }
    for (int start = keys_seen.first; start < keys_seen.last; start += N) {
        const int found = min(N, keys_seen.last - start);
        Products scores = {}, of_scores = {};
        __syncthreads();
        load(keys, v + start * v_row, v_row, found, width, 1);
        __syncthreads();
        multiply(of_scores, gradients, keys);
        __syncthreads();
        load(keys, k + start * k_row, k_row, found, width, 1);
        __syncthreads();
        multiply(scores, queries, keys);
        #pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const Place key = place(key_positions, key_documents, start + my_column(j), t, FAR);
            #pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const bool seen = sees(queries_at[i], key, window);
                probability(scores[i][j], of_scores[i][j], cap, seen, log_sum[i], projection[i]);
                put(weights, i, j, of_scores[i][j]);
            }
        }
        __syncwarp();  // a row of weights is written and read by the lanes of one group
        mix(sums, weights, keys);
    }
    for (int i = 0; i < ROWS; ++i) {
        if (my_row(i) >= count) continue;
        write(first_out + ((sample * s + first + my_row(i)) * heads + head) * width, sums[i], width, scale);
    }
"""
)
_BACKWARD_KEYS = """
    __shared__ Row keys[M], values[M], queries[N], gradients[N];
    __shared__ Scores weights[M];
    const int sample = blockIdx.z, head = blockIdx.y, heads = gridDim.y, first = blockIdx.x * M;
    const int count = min(M, int(t) - first);
    const T cap = T(score_cap);
    load(keys, k + sample * k_sample + first * k_row + head * k_head, k_row, count, width, 1);
    load(values, v + sample * v_sample + first * v_row + head * v_head, v_row, count, width, 1);
    if (documents) documents += sample * s, key_documents += sample * t;
    const Range queries_that_see = range(positions, documents, s, key_positions[first],
                                         key_positions[first + count - 1] + window - 1, key_documents, first,
                                         first + count - 1);
    Place keys_at[ROWS];
    Sums of_keys = {}, of_values = {};
    for (int i = 0; i < ROWS; ++i) keys_at[i] = place(key_positions, key_documents, first + my_row(i), t, FAR);
    for (int query_head = head * shared; query_head < (head + 1) * shared; ++query_head)
        for (int start = queries_that_see.first; start < queries_that_see.last; start += N) {
            const int found = min(N, queries_that_see.last - start);
            __syncthreads();
            load(queries, q + sample * q_sample + start * q_row + query_head * q_head, q_row, found, width, scale);
            load(gradients, dy + sample * dy_sample + start * dy_row + query_head * dy_head, dy_row, found, width, 1);
            __syncthreads();
            Products scores = {}, of_scores = {};
            multiply(scores, keys, queries);
            multiply(of_scores, values, gradients);
            const long long row_of_sums = ((long long)sample * heads * shared + query_head) * s + start;
            #pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                const int row = my_column(j);
                const Place query = place(positions, documents, start + row, s, -FAR);
                const T log_sum = row < found ? log_sums[row_of_sums + row] : T(0);
                const T projection = row < found ? projections[row_of_sums + row] : T(0);
                #pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    const bool seen = sees(query, keys_at[i], window);
                    put(weights, i, j, probability(scores[i][j], of_scores[i][j], cap, seen, log_sum, projection));
                }
            }
            __syncwarp();  // a row of weights is written and read by the lanes of one group
            mix(of_values, weights, gradients);
            __syncwarp();
            for (int i = 0; i < ROWS; ++i)
                for (int j = 0; j < COLUMNS; ++j) put(weights, i, j, of_scores[i][j]);
            __syncwarp();
            mix(of_keys, weights, queries);
        }
    for (int i = 0; i < ROWS; ++i) {
        if (my_row(i) >= count) continue;
        const long long row = ((sample * t + first + my_row(i)) * heads + head) * width;
        write(first_out + row, of_keys[i], width, 1);
        write(second_out + row, of_values[i], width, 1);
    }
"""


#: Each with the number of its tiles of rows and of columns, and of the results of a row.
KERNELS = {
    "flash_attention": (_FORWARD, 1, 1, 1),
    "flash_attention_queries": (_BACKWARD_QUERIES, 2, 1, 1),
    "flash_attention_keys": (_BACKWARD_KEYS, 2, 2, 2),
}


class Variant(NamedTuple):
    """What a kernel is compiled for: C++ types, and the width of a head, rounded up to a multiple of 4 · LANES."""

    stored: str
    sums: str
    result: str
    width: int


def source(name: str, variant: Variant) -> tuple[str, int]:
    """The CUDA text of a kernel, and the number of rows of its tile: the largest that fits memory and registers.

    A thread computes ``rows`` x ``columns`` scores of a tile of GROUPS · rows by LANES · columns.
    """
    (body, own, others, sums), itemsize = KERNELS[name], 8 if variant.sums == "double" else 4
    rows, columns = next(
        (m // GROUPS, n // LANES)
        for m, n in product((4 * GROUPS, 2 * GROUPS, GROUPS), (4 * LANES, 2 * LANES, LANES))
        if ((own * m + others * n) * (variant.width + 4) + m * (n + 4)) * itemsize <= SHARED
        and sums * m // GROUPS * variant.width // LANES * itemsize <= SUMS
    )
    text = f"""typedef {variant.sums} T;
{_HALVES}
typedef {variant.stored} Stored;
typedef {variant.result} Result;
constexpr int WIDTH = {variant.width}, ROWS = {rows}, COLUMNS = {columns};
constexpr int GROUPS = {GROUPS}, LANES = {LANES}, FAR = {FAR};
{_COMMON}
extern "C" __global__ void __launch_bounds__(GROUPS * LANES) {name}({_PARAMETERS}) {{{body}}}"""
    return text, GROUPS * rows


class FlashAttention:
    """Launches of the kernels, which CuPy (``xp``) compiles when first launched."""

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        self._kernel = cache(self._make)

    def takes(self, q: Array, wide: Any) -> bool:
        """Whether there are tiles for queries of this dtype and width, computed in the dtype ``wide``."""
        fits = q.shape[-1] * wide.itemsize <= WIDEST and max(q.shape[0], prod(q.shape[2:-1])) < 1 << 16
        emulated = q.dtype.itemsize == 2 and wide.itemsize > 4
        return fits and not emulated and q.dtype.name in _TYPES

    def forward(self, q, k, v, positions, key_positions, apart, window, cap, dtype, wide) -> tuple[Array, Array]:
        """See ``attention.causal_attention``; of at least one key, computed in the dtype ``wide``."""
        y = self._xp.empty(q.shape, dtype)
        log_sums = self._xp.empty((q.shape[0], *q.shape[2:-1], q.shape[1]), wide)
        seen = positions, key_positions, apart, window, cap
        self._launch("flash_attention", (q, k, v, None, None), seen, (log_sums, None, y, None))
        return y, log_sums

    def backward(
        self, dy, q, k, v, y, log_sums, positions, key_positions, apart, window, cap, dtype
    ) -> tuple[Array, Array, Array]:
        """See ``attention.causal_attention_backward``; of at least one key, computed in the dtype of log_sums."""
        arrays, seen = (q, k, v, y, dy), (positions, key_positions, apart, window, cap)
        log_sums = self._xp.ascontiguousarray(log_sums)
        projections = self._xp.empty(log_sums.shape, log_sums.dtype)
        dq, dk, dv = (self._xp.empty(x.shape, dtype) for x in (q, k, v))
        self._launch("flash_attention_queries", arrays, seen, (log_sums, projections, dq, None))
        self._launch("flash_attention_keys", arrays, seen, (log_sums, projections, dk, dv))
        return dq, dk, dv

    def _launch(self, name: str, arrays: tuple, seen: tuple, results: tuple) -> None:
        q, k = arrays[:2]
        batch, length, width = q.shape[0], q.shape[1], q.shape[-1]
        positions, key_positions, apart, window, cap = seen
        of_keys = name == "flash_attention_keys"
        (rows, heads) = (k.shape[1], k.shape[2]) if of_keys else (length, prod(q.shape[2:-1]))
        padded = -(-width // (4 * LANES)) * 4 * LANES
        types = (_TYPES[x.dtype.name] for x in (q, results[0], results[2]))
        kernel, tall = self._kernel(name, Variant(*types, padded))  # pyright: ignore[reportCallIssue]
        by_head = [part for x in arrays for part in self._by_head(x, q.dtype)]
        places = [self._integers(x) for x in (positions, key_positions, *(apart or (None, None)))]
        shape = length, k.shape[1], prod(q.shape[3:-1]), width, FAR if window is None else min(window, FAR)
        numbers = 0.0 if cap is None else float(cap), width**-0.5
        grid = -(-rows // tall), heads, batch
        kernel(grid, (GROUPS * LANES, 1, 1), (*by_head, *places, *shape, *numbers, *results))

    def _make(self, name: str, variant: Variant) -> tuple[Any, int]:
        text, rows = source(name, variant)
        return self._xp.RawKernel(text, name), rows

    def _by_head(self, x: Array, dtype: Any) -> tuple:
        """x[b s h k] or [b s h r k], and its strides in numbers by sample, row and head."""
        if x is None:
            return None, 0, 0, 0
        x = x.astype(dtype, copy=False)
        x = x.reshape(*x.shape[:2], -1, x.shape[-1])
        if x.strides[-1] != x.itemsize:
            x = self._xp.ascontiguousarray(x)
        return x, *(stride // x.itemsize for stride in x.strides[:3])

    def _integers(self, x: Array | None) -> Array | None:
        return None if x is None else self._xp.ascontiguousarray(x.astype(self._xp.int64, copy=False))
