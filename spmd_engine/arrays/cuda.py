"""The functions marked ``@fused`` as CUDA kernels.

First the kernels as text: parameters and operation, as cupy.ElementwiseKernel and cupy.ReductionKernel take them.

T is float or double, the same for all of a kernel's T. S is T, or 16-bit floats if T is float: an S is read as T and
rounded when it is written. An input may be an array, broadcast with the others, or a
number. An output that an operation reads is updated in place. Literals are integers or in T(...): a bare 0.5 would
make the arithmetic of floats double. The text needs neither CuPy nor a GPU: any C++ compiler can check it.
"""

import os
from ctypes import addressof, c_float
from math import pi, prod
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from spmd_engine.arrays.factors import GELU_A, GELU_C, OF_HALVES, adamw_factors, halves, over_heads
from spmd_engine.arrays.flash_attention import FlashAttention


class Elementwise(NamedTuple):
    """``operation`` runs for every element of the broadcast arrays; ``i`` counts them in C order."""

    in_params: str
    out_params: str
    operation: str


class Reduction(NamedTuple):
    """``map_expr`` maps every element, ``reduce_expr`` joins ``a`` and ``b``, ``post_map_expr`` maps the last ``a``."""

    in_params: str
    out_params: str
    map_expr: str
    reduce_expr: str
    post_map_expr: str
    identity: str  # arguments of the constructor of reduce_type for no elements
    reduce_type: str
    preamble: str


# --- activations

_WIDE = "typedef decltype(z + 0.0f) T;"  # where no parameter has the type T

_RELU = _WIDE + "y = z <= 0 ? T(0) : T(z);"  # a NaN stays one

_GELU = f"""
    {_WIDE}
    const T square = z * z;
    const T gate = 1 / (1 + exp(z * (square * T({-2.0 * GELU_C * GELU_A!r}) - T({2.0 * GELU_C!r}))));
    const T value = z * gate;
    y = value;
"""
_GELU_SLOPE = f"""
    slope = gate + (1 - gate) * value * (square * T({6.0 * GELU_C * GELU_A!r}) + T({2.0 * GELU_C!r}));
"""

_SILU = f"""
    {_WIDE}
    const T sigmoid = 1 / (1 + exp(-z));
    const T silu = z * sigmoid;
    h = silu * u;
"""
_SILU_SLOPES = """
    of_gate = (sigmoid + silu * (1 - sigmoid)) * u;
    of_value = silu;
"""

# --- norms

_MOMENTS = """
    struct Moments {  // of some numbers: how many, their mean, and the sum of squares of what they differ from it
        T count, mean, squares;
        __device__ Moments(T count, T mean, T squares) : count(count), mean(mean), squares(squares) {}
    };
    __device__ Moments together(const Moments &a, const Moments &b) {
        const T count = a.count + b.count;
        if (count == 0) return a;
        const T apart = b.mean - a.mean, share = b.count / count;
        return Moments(count, a.mean + apart * share, a.squares + b.squares + apart * apart * a.count * share);
    }
"""

_PAIR = """
    struct Pair {
        T first, second;
        __device__ Pair(T first, T second) : first(first), second(second) {}
    };
    __device__ Pair operator+(const Pair &a, const Pair &b) {
        return Pair(a.first + b.first, a.second + b.second);
    }
"""

# --- random numbers: the text of random.hash_bits and of what is made of 32 bits

_BITS = """
    auto mix = [](unsigned int x) {
        x = (x ^ (x >> 16)) * 0x7FEB352Du;
        x = (x ^ (x >> 15)) * 0x846CA68Bu;
        return x ^ (x >> 16);
    };
    auto bits = [mix](unsigned long long index, unsigned int seed, unsigned int key) {
        const unsigned int low = index, high = index >> 32;
        return mix(mix(low ^ seed) ^ (high * 0x85EBCA6Bu + key));
    };
"""
_UNIT = _BITS + "auto unit = [](unsigned int x) { return (double(x) + 0.5) * (1.0 / 4294967296.0); };"

# --- the kernels

ELEMENTWISE = {
    "bernoulli": Elementwise(
        "uint64 row, uint64 width, uint32 seed, uint32 key, uint32 threshold",
        "bool y",
        _BITS + "y = bits(row * width + i % width, seed, key) < threshold",
    ),
    "uniform": Elementwise(
        "uint64 row, uint64 column, uint32 seed, uint32 key",
        "T y",
        _UNIT + "y = T(unit(bits(row + column, seed, key)))",
    ),
    "normal": Elementwise(
        "uint64 row, uint64 column, uint32 seed, uint32 key, uint32 angle_seed, uint32 angle_key",
        "T y",
        _UNIT
        + f"""
        const double radius = sqrt(log(unit(bits(row + column, seed, key))) * -2.0);
        y = T(radius * cos(unit(bits(row + column, angle_seed, angle_key)) * {2.0 * pi!r}));
        """,
    ),
    "relu": Elementwise("S z", "S y, bool slope", _RELU + "slope = z > 0"),
    "relu_value": Elementwise("S z", "S y", _RELU),
    "gelu": Elementwise("S z", "S y, S slope", _GELU + _GELU_SLOPE),
    "gelu_value": Elementwise("S z", "S y", _GELU),
    "normalize": Elementwise(
        "S x, T mean, T inverse, S scale, S shift",
        "S y, S normal",
        "const T n = (x - mean) * inverse; normal = n; y = n * scale + shift",
    ),
    "normalize_backward": Elementwise(
        "S dy, S normal, T inverse, S scale, T total, T projection, T share",
        "S dx",
        "dx = (dy * scale - share * total - normal * (share * projection)) * inverse",
    ),
    "silu_gate": Elementwise("S z, S u", "S h, S of_gate, S of_value", _SILU + _SILU_SLOPES),
    "silu_gate_value": Elementwise("S z, S u", "S h", _SILU),
    "rotate": Elementwise(
        "S first, S second, T cosine, T sine, T way",
        "S rotated_first, S rotated_second",
        """
        rotated_first = first * cosine - second * (way * sine);
        rotated_second = second * cosine + first * (way * sine);
        """,
    ),
    "adamw": Elementwise(
        "T g, T fresh, T beta1, T weight, T beta2, T epsilon, T size, T kept",
        "T p, T mean, T square",
        """
        const T part = g * fresh;
        const T m = mean * beta1 + part;
        const T v = square * beta2 + part * part * weight;
        mean = m;
        square = v;
        p = p * kept - m / (sqrt(v) + epsilon) * size;
        """,
    ),
    "sgd": Elementwise("T g, T size, T kept", "T p", "p = p * kept - g * size"),
    "momentum_sgd": Elementwise(
        "T g, T scale, T momentum, T rate, T kept",
        "T p, T velocity",
        "const T v = velocity * momentum + g * scale; velocity = v; p = p * kept - v * rate",
    ),
    "exponentiate": Elementwise("T shift", "T score", "score = exp(score - shift)"),
    "softmax_backward": Elementwise("T p, T projection", "T ds", "ds = (ds - projection) * p"),
    "scores_of_targets": Elementwise(
        "raw T scores, T top, int64 target, int64 width",
        "T score",
        "score = 0 <= target && target < width ? scores[i * width + target] - top : T(0)",
    ),
    "add_runs": Elementwise(  # rows of equal indices, added by the thread of the first
        "raw int64 order, raw int64 sorted, raw S rows, int64 width, int64 count",
        "raw T table",
        """
        const long long n = i / width, column = i % width;
        if (sorted[n] >= 0 && (n == 0 || sorted[n] != sorted[n - 1])) {
            T sum = 0;
            for (long long m = n; m < count && sorted[m] == sorted[n]; ++m) sum += rows[order[m] * width + column];
            table[sorted[n] * width + column] += sum;
        }
        """,
    ),
    "cross_entropy_gradient": Elementwise(
        "T total, T weight, int64 target, int64 width",
        "T p",
        "p = p * (weight / total) - (i % width == target ? weight : T(0))",
    ),
}


def pair_of_sums(in_params: str, out_params: str, pair: str, post_map_expr: str) -> Reduction:
    """Two sums at once, ``a.first`` and ``a.second``, of the ``pair`` of each element."""
    return Reduction(in_params, out_params, f"Pair({pair})", "a + b", post_map_expr, "0, 0", "Pair", _PAIR)


REDUCTIONS = {
    "moments": Reduction(  # Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm" (1979)
        in_params="S x, T epsilon",
        out_params="T mean, T inverse",
        map_expr="Moments(1, x, 0)",
        reduce_expr="together(a, b)",
        post_map_expr="mean = a.mean, inverse = 1 / sqrt(a.squares / a.count + epsilon)",
        identity="0, 0, 0",
        reduce_type="Moments",
        preamble=_MOMENTS,
    ),
    "sum_of_squares": Reduction(
        "T x", "float64 total", "double(x) * double(x)", "a + b", "total = a", "0", "double", ""
    ),
    "count_each": Reduction(
        "int64 index, int64 number", "int64 count", "index == number", "a + b", "count = a", "0", "long long", ""
    ),
    "root_mean_square": pair_of_sums(
        "S x, T epsilon", "T inverse", "x * x, 1", "inverse = 1 / sqrt(a.first / a.second + epsilon)"
    ),
    "row_sums": pair_of_sums(
        "S dy, S scale, S normal",
        "T total, T projection",
        "dy * scale, dy * scale * normal",
        "total = a.first, projection = a.second",
    ),
    "column_sums": pair_of_sums(
        "S dy, S normal", "T dscale, T dshift", "dy * normal, dy", "dscale = a.first, dshift = a.second"
    ),
}


# --- The functions marked ``@fused`` as launches of CUDA kernels: every chain of elementwise steps is one launch
#
# Each has the name, signature and result of its NumPy version, which is documented. Single library calls have no
# kernels: matrix products, sums and maxima of rows. ``cuda_images`` has those of images.


class CudaFunctions:
    """Kernels for ``xp``, CuPy. CuPy compiles each for dtypes and a device when it is first launched."""

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        kernels = {name: xp.ElementwiseKernel(*text, name=name) for name, text in ELEMENTWISE.items()}
        kernels |= {name: xp.ReductionKernel(**text._asdict(), name=name) for name, text in REDUCTIONS.items()}
        self._launch = SimpleNamespace(**kernels)
        #: None, by the variable, for a comparison with products of the library
        self.flash_attention = None if os.environ.get("SPMD_FLASH_ATTENTION") == "0" else FlashAttention(xp)

    def takes(self, dtype, name=""):
        return dtype.char in "fd" or (name in OF_HALVES and dtype.itemsize == 2)

    def _sum_of(self, x):
        """The dtype of sums of ``x``, of which those of 16-bit floats are float32 here."""
        return self._xp.dtype(self._xp.float32) if x.dtype.itemsize == 2 else x.dtype

    # Products

    def matmul_halves(self, a, b, out, dtype):
        return multiply_halves(self._xp, a, b, out, dtype)

    # Activations

    def relu(self, z, want_slope=True):
        return self._launch.relu(z) if want_slope else (self._launch.relu_value(z), None)

    def gelu(self, z, want_slope=True):
        return self._launch.gelu(z) if want_slope else (self._launch.gelu_value(z), None)

    def silu_gate(self, z, u, want_slopes=True):
        if not want_slopes:
            return self._launch.silu_gate_value(z, u), None
        h, *slopes = self._launch.silu_gate(z, u)
        return h, tuple(slopes)

    # Rotary positions

    def rotate(self, x, rotation, neighbours, *, back=False):
        y, width = self._xp.empty(x.shape, x.dtype), 2 * rotation[0].shape[-1]
        pair, rotated = (halves(values[..., :width], neighbours) for values in (x, y))
        self._launch.rotate(*pair, *(over_heads(table, x.ndim) for table in rotation), -1 if back else 1, *rotated)
        y[..., width:] = x[..., width:]
        return y

    # Norms: the sums of rows in one kernel, the elementwise steps in another.

    def layer_norm(self, x, scale, shift, epsilon):
        rows = x.reshape(-1, x.shape[-1])
        mean, inverse = self._xp.empty((2, rows.shape[0]), self._sum_of(x))
        self._launch.moments(rows, epsilon, mean, inverse, axis=1)
        y, normal = self._launch.normalize(rows, mean[:, None], inverse[:, None], scale, shift)
        return y.reshape(x.shape), normal.reshape(x.shape), inverse.reshape(x.shape[:-1])

    def layer_norm_backward(self, dy, normal, inverse, scale):
        by_rows, total, projection, share = self._sums_of_rows(dy, normal, inverse, scale)
        return self._launch.normalize_backward(*by_rows, scale, total, projection, share).reshape(dy.shape)

    def layer_norm_backward_parameters(self, dy, normal):
        width = dy.shape[-1]
        dscale, dshift = self._xp.empty((2, width), self._sum_of(dy))
        self._launch.column_sums(dy.reshape(-1, width), normal.reshape(-1, width), dscale, dshift, axis=0)
        return dscale, dshift

    def rms_norm(self, x, scale, epsilon):
        rows = x.reshape(-1, x.shape[-1])
        inverse = self._xp.empty(rows.shape[0], self._sum_of(x))
        self._launch.root_mean_square(rows, epsilon, inverse, axis=1)
        y, normal = self._launch.normalize(rows, 0, inverse[:, None], scale, 0)
        return y.reshape(x.shape), normal.reshape(x.shape), inverse.reshape(x.shape[:-1])

    def rms_norm_backward(self, dy, normal, inverse, scale):
        by_rows, _, projection, share = self._sums_of_rows(dy, normal, inverse, scale)
        return self._launch.normalize_backward(*by_rows, scale, 0, projection, share).reshape(dy.shape)

    def rms_norm_backward_scale(self, dy, normal):
        return self.layer_norm_backward_parameters(dy, normal)[0]

    def _sums_of_rows(self, dy, normal, inverse, scale):
        """dy, normal and inverse as rows; of each row the sums of g = dy · scale and of g · normal; and 1/d."""
        width = dy.shape[-1]
        rows, normal_rows, inverse_rows = dy.reshape(-1, width), normal.reshape(-1, width), inverse.reshape(-1, 1)
        total, projection = self._xp.empty((2, rows.shape[0]), inverse.dtype)
        self._launch.row_sums(rows, scale, normal_rows, total, projection, axis=1)
        share = 1.0 / width if width else 0.0
        return (rows, normal_rows, inverse_rows), total[:, None], projection[:, None], share

    # Optimizers

    def adamw(self, p, g, mean, square, *, step, rate, betas, epsilon, decay, scale=1.0):
        factors = adamw_factors(step=step, rate=rate, betas=betas, epsilon=epsilon, decay=decay, scale=scale)
        self._launch.adamw(g, *factors, p, mean, square)

    def momentum_sgd(self, p, g, velocity, *, rate, momentum, decay, scale=1.0):
        kept = 1.0 - rate * decay
        if velocity is None:
            self._launch.sgd(g, scale * rate, kept, p)
        else:
            self._launch.momentum_sgd(g, scale, momentum, rate, kept, p, velocity)

    def sum_of_squares(self, x):
        """float64, on the device."""
        return self._launch.sum_of_squares(x, axis=0)

    # Random numbers, of rows[n] + columns[m]; ``keys``: of ``hash_bits``, each with the seed that is mixed from it

    def bernoulli(self, rows, width, keys, threshold):
        y = self._xp.empty((rows.size, width), bool)
        self._launch.bernoulli(rows[:, None], width, *keys, threshold, y)
        return y

    def uniform(self, rows, columns, keys, out):
        self._launch.uniform(rows[:, None], columns, *keys, out)

    def normal(self, rows, columns, keys, out):
        self._launch.normal(rows[:, None], columns, *keys, out)

    # Tables of rows

    def add_rows(self, table, indices, rows):
        order = self._xp.argsort(indices, kind="stable")
        if self._sum_of(rows) != table.dtype:
            rows = rows.astype(table.dtype)
        rows = self._xp.ascontiguousarray(rows)
        ordered = indices[order].astype(self._xp.int64, copy=False)
        self._launch.add_runs(order, ordered, rows, rows.shape[1], len(order), table, size=rows.size)

    def count_each(self, indices, size):
        """int64[size]; no array of all pairs is written."""
        numbers = self._xp.arange(size)
        return self._launch.count_each(indices.astype(self._xp.int64, copy=False)[:, None], numbers, axis=0)

    # Softmax

    def exponentiate(self, scores, shift):
        self._launch.exponentiate(shift, scores)

    def softmax_backward(self, ds, p, projection):
        self._launch.softmax_backward(p, projection, ds)

    def scores_of_targets(self, scores, targets, top):
        return self._launch.scores_of_targets(scores, top, targets, scores.shape[1])

    def cross_entropy_gradient(self, p, sums, weights, targets):
        rows = sums[:, None], weights[:, None], targets[:, None]
        self._launch.cross_entropy_gradient(*rows, p.shape[1], p)


# --- Matrix products of 16-bit floats, with sums in float32, by cuBLAS
#
# CuPy's ``matmul`` has no such product: it rounds every result to 16 bits, multiplies float32 copies of batches of
# float16, and cannot multiply batches of bfloat16. Here a result is float32 or 16 bits, and operands are copied only if
# neither their rows nor their columns are contiguous, or batches are not equally far apart.


_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
_AS_IS, _TRANSPOSED = 0, 1  # cublasOperation_t
_FLOAT32_SUMS, _ANY_ALGORITHM = 68, -1  # CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
_ONE, _ZERO = c_float(1.0), c_float(0.0)


def multiply_halves(cupy: Any, a: Any, b: Any, out: Any, dtype: Any) -> Any:
    """a[... m k] · b[... k n], both bfloat16 or both float16, in ``out`` if given; ``dtype`` is float32 or theirs."""
    batch = cupy.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = *batch, a.shape[-2], b.shape[-1]
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"shapes {a.shape} and {b.shape} do not fit in a matrix product")
    y = out
    if y is None or y.dtype != dtype or y.shape != shape or not y.flags.c_contiguous:
        y = cupy.empty(shape, dtype)
    if not a.size or not b.size:
        y[...] = 0
    elif y.size:
        (a, *of_a), (b, *of_b) = _matrices(cupy, a, batch), _matrices(cupy, b, batch)
        m, n, k = shape[-2], shape[-1], a.shape[-1]
        operands = [(x.data.ptr, _TYPES[x.dtype.name], lead, stride) for x, (_, lead, stride) in ((b, of_b), (a, of_a))]
        # cuBLAS counts by columns: it computes yᵀ = bᵀ · aᵀ.
        cupy.cuda.cublas.gemmStridedBatchedEx(
            cupy.cuda.get_cublas_handle(), of_b[0], of_a[0], n, m, k, addressof(_ONE), *operands[0], *operands[1],
            addressof(_ZERO), y.data.ptr, _TYPES[y.dtype.name], n, m * n, prod(batch), _FLOAT32_SUMS, _ANY_ALGORITHM,
        )  # fmt: skip
    if out is not None and y is not out:
        out[...] = y
        return out
    return y


def _matrices(cupy: Any, x: Any, batch: tuple[int, ...]) -> tuple[Any, int, int, int]:
    """``x``, or a copy that fits, whether its matrices are transposed, and the elements from one row (or column) and
    from one matrix to the next."""
    x = x if x.shape[:-2] == batch else cupy.broadcast_to(x, (*batch, *x.shape[-2:]))
    rows, columns = x.shape[-2:]
    steps = [stride // x.itemsize for stride in x.strides]
    apart, expected, fits = 0, None, True
    for length, step in zip(reversed(batch), reversed(steps[:-2]), strict=True):
        if length > 1:
            apart, fits = (step, fits) if expected is None else (apart, fits and step == expected)
            expected = step * length
    by_rows = steps[-1] == 1 or columns == 1, steps[-2] if rows > 1 else columns
    by_columns = steps[-2] == 1 or rows == 1, steps[-1] if columns > 1 else rows
    if fits and by_rows[0] and by_rows[1] >= columns:
        return x, _AS_IS, by_rows[1], apart
    if fits and by_columns[0] and by_columns[1] >= rows:
        return x, _TRANSPOSED, by_columns[1], apart
    return cupy.ascontiguousarray(x), _AS_IS, columns, rows * columns
