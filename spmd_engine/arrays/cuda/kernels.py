"""The CUDA kernels as text: parameters and operation, as cupy.ElementwiseKernel and cupy.ReductionKernel take them.

T is float or double, the same for all of a kernel's T. An input may be an array, broadcast with the others, or a
number. An output that an operation reads is updated in place. Literals are integers or in T(...): a bare 0.5 would
turn a float's arithmetic into double's. Text needs neither CuPy nor a GPU, so that any C++ compiler can check it.
"""

from typing import NamedTuple

from spmd_engine.arrays.factors import GELU_A, GELU_C


class Elementwise(NamedTuple):
    """``operation`` is done for every element of the broadcast arrays; ``i`` counts them in C order."""

    in_params: str
    out_params: str
    operation: str


class Reduction(NamedTuple):
    """``map_expr`` of every element, joined two by two as ``a`` and ``b``, then ``post_map_expr`` of the last ``a``."""

    in_params: str
    out_params: str
    map_expr: str
    reduce_expr: str
    post_map_expr: str
    identity: str  # what the constructor of reduce_type is given for none at all
    reduce_type: str
    preamble: str


# --- activations

_GELU = f"""
    const T square = z * z;
    const T gate = 1 / (1 + exp(z * (square * T({-2.0 * GELU_C * GELU_A!r}) - T({2.0 * GELU_C!r}))));
    const T value = z * gate;
    y = value;
"""
_GELU_SLOPE = f"""
    slope = gate + (1 - gate) * value * (square * T({6.0 * GELU_C * GELU_A!r}) + T({2.0 * GELU_C!r}));
"""

_SILU = """
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

# --- the kernels

ELEMENTWISE = {
    "relu": Elementwise("T z", "T y, bool slope", "y = z <= 0 ? T(0) : z; slope = z > 0"),  # a NaN stays one
    "relu_value": Elementwise("T z", "T y", "y = z <= 0 ? T(0) : z"),
    "gelu": Elementwise("T z", "T y, T slope", _GELU + _GELU_SLOPE),
    "gelu_value": Elementwise("T z", "T y", _GELU),
    "normalize": Elementwise(
        "T x, T mean, T inverse, T scale, T shift",
        "T y, T normal",
        """
        const T n = (x - mean) * inverse;
        normal = n;
        y = n * scale + shift;
        """,
    ),
    "normalize_backward": Elementwise(
        "T dy, T normal, T inverse, T scale, T total, T projection, T share",
        "T dx",
        "dx = (dy * scale - share * total - normal * (share * projection)) * inverse",
    ),
    "silu_gate": Elementwise("T z, T u", "T h, T of_gate, T of_value", _SILU + _SILU_SLOPES),
    "silu_gate_value": Elementwise("T z, T u", "T h", _SILU),
    "rotate": Elementwise(
        "T first, T second, T cosine, T sine, T way",
        "T turned_first, T turned_second",
        """
        turned_first = first * cosine - second * (way * sine);
        turned_second = second * cosine + first * (way * sine);
        """,
    ),
    "scale_rows": Elementwise(
        "T x, T inverse, T scale", "T y, T normal", "const T n = x * inverse; normal = n; y = n * scale"
    ),
    "scale_rows_backward": Elementwise(
        "T dy, T normal, T inverse, T scale, T projection, T share",
        "T dx",
        "dx = (dy * scale - normal * (share * projection)) * inverse",
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
        """
        const T v = velocity * momentum + g * scale;
        velocity = v;
        p = p * kept - v * rate;
        """,
    ),
    "exponentiate": Elementwise("T shift", "T score", "score = exp(score - shift)"),
    "hide_and_exponentiate": Elementwise("T shift, T hidden", "T score", "score = exp(score + hidden - shift)"),
    "softmax_backward": Elementwise("T p, T projection", "T ds", "ds = (ds - projection) * p"),
    "scores_of_targets": Elementwise(
        "raw T scores, T top, int64 target, int64 width",
        "T score",
        "score = 0 <= target && target < width ? scores[i * width + target] - top : T(0)",
    ),
    "cross_entropy_gradient": Elementwise(
        "T total, T weight, int64 target, int64 width",
        "T p",
        "p = p * (weight / total) - (i % width == target ? weight : T(0))",
    ),
}

REDUCTIONS = {
    "moments": Reduction(  # Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm" (1979)
        in_params="T x, T epsilon",
        out_params="T mean, T inverse",
        map_expr="Moments(1, x, 0)",
        reduce_expr="together(a, b)",
        post_map_expr="mean = a.mean, inverse = 1 / sqrt(a.squares / a.count + epsilon)",
        identity="0, 0, 0",
        reduce_type="Moments",
        preamble=_MOMENTS,
    ),
    "root_mean_square": Reduction(
        in_params="T x, T epsilon",
        out_params="T inverse",
        map_expr="Pair(x * x, 1)",
        reduce_expr="a + b",
        post_map_expr="inverse = 1 / sqrt(a.first / a.second + epsilon)",
        identity="0, 0",
        reduce_type="Pair",
        preamble=_PAIR,
    ),
    "row_sums": Reduction(
        in_params="T dy, T scale, T normal",
        out_params="T total, T projection",
        map_expr="Pair(dy * scale, dy * scale * normal)",
        reduce_expr="a + b",
        post_map_expr="total = a.first, projection = a.second",
        identity="0, 0",
        reduce_type="Pair",
        preamble=_PAIR,
    ),
    "column_sums": Reduction(
        in_params="T dy, T normal",
        out_params="T dscale, T dshift",
        map_expr="Pair(dy * normal, dy)",
        reduce_expr="a + b",
        post_map_expr="dscale = a.first, dshift = a.second",
        identity="0, 0",
        reduce_type="Pair",
        preamble=_PAIR,
    ),
}
