"""CUDA without a GPU: the host's C++ compiler compiles the kernels' source.

Broadcasting, dtypes and the split into partial sums follow CuPy's ElementwiseKernel and ReductionKernel. This
does not test how threads of a GPU share memory, which is CuPy's code, nor speed.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from typing import NamedTuple

import numpy as np

from spmd_engine.arrays import cuda, cuda_images

ELEMENTWISE = cuda.ELEMENTWISE | cuda_images.ELEMENTWISE
REDUCTIONS = cuda.REDUCTIONS | cuda_images.REDUCTIONS

C_TYPES = {"float32": "float", "float64": "double", "int64": "int64_t", "bool": "bool"}
C_TYPES |= {"uint8": "uint8_t", "int32": "int32_t", "uint32": "uint32_t", "uint64": "uint64_t"}
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
#: The dtypes of S, each with that of T.
VARIANTS = {"float32": "float32", "float64": "float64", "bfloat16": "float32", "float16": "float32"}
#: CuPy's classes: they convert to float by themselves, and round a float that they are made of.
BFLOAT16 = """
    struct bfloat16 {
        uint16_t bits;
        __device__ bfloat16() {}
        __device__ bfloat16(float x) {
            uint32_t wide;
            memcpy(&wide, &x, 4);
            bits = x != x ? (wide >> 16) | 64 : (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16;
        }
        __device__ operator float() const {
            const uint32_t wide = uint32_t(bits) << 16;
            float x;
            memcpy(&x, &wide, 4);
            return x;
        }
    };"""
FLOAT16 = """
    struct float16 {
        _Float16 value;
        float16() {}
        float16(float x) : value(_Float16(x)) {}
        operator float() const { return float(value); }
    };"""
#: C++ allows an implicit conversion from float to double, which would be slow on a GPU.
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wdouble-promotion", "-Werror"]
LANES = 8  # partial results of a reduction; a power of 2, like a GPU's threads; some get no element
NUMBERS = {"epsilon"}  # inputs of a reduction that are numbers; its post-map expression may use these, but no array


class Parameter(NamedTuple):
    """One parameter of a text such as "raw T scores, int64 width"."""

    kind: str
    name: str
    raw: bool


def parameters(text):
    words = [each.split() for each in text.split(",")]
    assert all(len(each) == 2 or (len(each) == 3 and each[0] == "raw") for each in words), text
    return [Parameter(*each[-2:], raw=len(each) == 3) for each in words]


# --- from source to a library


def source():
    """C++ source of all kernels with each S that they have: functions NAME_DTYPE of pointers and strides in bytes."""
    kernels = []
    for dtype, wide in VARIANTS.items():
        c_types = C_TYPES | {"T": C_TYPES[wide], "S": C_TYPES.get(dtype, dtype)}
        for name, text in (ELEMENTWISE | REDUCTIONS).items():
            if dtype in C_TYPES or "S" in kinds_of(text):
                kernels.append(kernel(f"{name}_{dtype}", text, c_types))
    head = [f"#include <{name}>" for name in ("cmath", "cstddef", "cstdint", "cstring")]
    head += ["using namespace std;", "#define __device__", '#define KERNEL extern "C"']
    head += ["#define EACH(i, n) (ptrdiff_t i = 0; i < n; ++i)", BFLOAT16, FLOAT16]
    return "\n".join([*head, *kernels])


def kinds_of(text):
    return {parameter.kind for parameter in parameters(text.in_params) + parameters(text.out_params)}


def declared(text, c_types):
    """What CuPy declares of the types of parameters; ``T`` must not be declared where none has it."""
    return " ".join(f"typedef {c_types[kind]} {kind};" for kind in ("S", "T") if kind in kinds_of(text))


def kernel(name, text, c_types):
    return (reduction if hasattr(text, "reduce_expr") else elementwise)(name, text, c_types)


def element(parameter, c_types, number, index, const=""):
    kind = c_types[parameter.kind]
    return f"{const}{kind} &{parameter.name} = *({const}{kind} *)(memory[{number}] + ({index}) * strides[{number}]);"


def elementwise(name, text, c_types):
    inputs, outputs = parameters(text.in_params), parameters(text.out_params)
    raw, each = [], []
    for k, p in enumerate(inputs):
        if p.raw:
            raw.append(f"const {c_types[p.kind]} *{p.name} = (const {c_types[p.kind]} *)memory[{k}];")
        else:
            each.append(element(p, c_types, k, "i", "const "))
    for k, p in enumerate(outputs, len(inputs)):
        if p.raw:
            raw.append(f"{c_types[p.kind]} *{p.name} = ({c_types[p.kind]} *)memory[{k}];")
        else:
            each.append(element(p, c_types, k, "i"))
    return f"""
        namespace {name}_ {{
            {declared(text, c_types)}
            KERNEL void {name}(ptrdiff_t size, char **memory, const ptrdiff_t *strides) {{
                {" ".join(raw)}
                for EACH(i, size) {{
                    {" ".join(each)}
                    {text.operation};
                }}
            }}
        }}"""


def reduction(name, text, c_types):
    """Elements go to lanes in turn, and lanes are joined by halves, like the threads of a GPU, but sequentially."""
    inputs, outputs = parameters(text.in_params), parameters(text.out_params)
    numbers = [element(p, c_types, k, "0", "const ") for k, p in enumerate(inputs) if p.name in NUMBERS]
    arrays = [element(p, c_types, k, "j", "const ") for k, p in enumerate(inputs) if p.name not in NUMBERS]
    results = [element(p, c_types, len(inputs) + k, "row") for k, p in enumerate(outputs)]
    return f"""
        namespace {name}_ {{
            {declared(text, c_types)}
            {text.preamble}
            typedef {text.reduce_type} Sum;
            __device__ inline Sum join(const Sum &a, const Sum &b) {{ return {text.reduce_expr}; }}
            KERNEL void {name}(ptrdiff_t rows, ptrdiff_t length, char **memory, const ptrdiff_t *strides) {{
                {" ".join(numbers)}
                for EACH(row, rows) {{
                    Sum lanes[] = {{ {", ".join([f"Sum({text.identity})"] * LANES)} }};
                    for (ptrdiff_t j = row * length; j < (row + 1) * length; ++j) {{
                        {" ".join(arrays)}
                        lanes[j % {LANES}] = join(lanes[j % {LANES}], static_cast<Sum>({text.map_expr}));
                    }}
                    for (int half = {LANES} / 2; half > 0; half /= 2)
                        for (int k = 0; k < half; ++k) lanes[k] = join(lanes[k], lanes[k + half]);
                    const Sum &a = lanes[0];
                    {" ".join(results)}
                    ({text.post_map_expr});
                }}
            }}
        }}"""


def compiled(folder, name, text, flags):
    """The path of what the compiler makes of C++ text, by the first process that needs it and finds it not in the
    folder. The file's name has a digest of all that it is made of, so that the folder can be kept for later runs."""
    command, version = [str(COMPILER), *map(str, flags)], os.stat(str(COMPILER))
    made_of = repr((text, command, version.st_size, version.st_mtime_ns)).encode()
    path = folder / f"{name}-{hashlib.sha256(made_of).hexdigest()[:16]}"
    if not path.exists():
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                command += ["-x", "c++", "-"] if text else []
                done = subprocess.run([*command, "-o", f"{path}.part"], input=text, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                os.replace(f"{path}.part", path)
    return path


def compile_for_the_host(folder):
    """The library of all kernels."""
    return ctypes.CDLL(str(compiled(folder, "kernels", source(), FLAGS)))


# --- kernels on arrays of the host


class HostKernel:
    """A kernel that is called like CuPy's, on arrays of the host, and makes the same checks of shapes and dtypes."""

    def __init__(self, library, name):
        text = (ELEMENTWISE | REDUCTIONS)[name]
        self.library, self.name = library, name
        self.inputs, self.outputs = parameters(text.in_params), parameters(text.out_params)

    def __call__(self, args, axis=None, size=None):
        assert len(args) in (len(self.inputs), len(self.inputs) + len(self.outputs)), self.name
        inputs, outputs = args[: len(self.inputs)], args[len(self.inputs) :]
        if (self.name in REDUCTIONS) is not (axis is not None):
            raise TypeError(f"{self.name}: axis {axis}")
        arrays = [x for x, p in zip(inputs, self.inputs) if isinstance(x, np.ndarray) and not p.raw]
        shape = np.broadcast_shapes(*(x.shape for x in [*arrays, *(outputs if axis is None and size is None else [])]))
        assert size is None or not arrays, f"{self.name}: all arrays must be raw where a size is given"
        dtype = self.dtype_of([*inputs, *outputs])
        inputs = [self.spread(x, p, shape, dtype, axis) for x, p in zip(inputs, self.inputs)]
        if size is not None:
            self.run(inputs, outputs, dtype, size, [])
            return outputs
        result_shape = shape if axis is None else shape[:axis] + shape[axis + 1 :]
        kinds = [self.kind(p, dtype) for p in self.outputs]
        outputs = outputs or [np.empty(result_shape, kind) for kind in kinds]
        assert all(x.shape == result_shape and x.dtype == kind for x, kind in zip(outputs, kinds)), self.name
        if 0 not in result_shape:
            self.run(inputs, outputs, dtype, outputs[0].size, [] if axis is None else [shape[axis]])
        return outputs

    def kind(self, parameter, dtype):
        """The dtype of a parameter, where S is ``dtype``."""
        if parameter.kind == "S":
            return dtype
        return np.dtype(VARIANTS[dtype.name] if parameter.kind == "T" else parameter.kind)

    def dtype_of(self, args):
        """The dtype S, or T without S: equal for all arrays of this type; all others have what follows from it."""
        pairs = [pair for pair in zip(args, self.inputs + self.outputs) if isinstance(pair[0], np.ndarray)]
        letter = next((each for each in "ST" if any(p.kind == each for p in self.inputs + self.outputs)), None)
        kinds = {x.dtype for x, p in pairs if p.kind == letter}
        assert len(kinds) == (letter is not None), f"{self.name}: {letter} is {kinds}"
        dtype = kinds.pop() if kinds else np.dtype(np.float32)  # without S and T, all are the same
        for x, p in pairs:
            assert x.dtype == self.kind(p, dtype), f"{self.name}: {p.name} is {x.dtype}"
        return dtype

    def spread(self, x, parameter, shape, dtype, axis):
        if not isinstance(x, np.ndarray):
            return np.array(x, self.kind(parameter, dtype))
        assert axis is None or parameter.name not in NUMBERS
        if not parameter.raw:
            x = np.broadcast_to(x, shape)
        return np.ascontiguousarray(x if axis is None else np.moveaxis(x, axis, -1))

    def run(self, inputs, outputs, dtype, size, length):
        results = [np.array(x, order="C") for x in outputs]
        arrays = [*inputs, *results]
        function = getattr(self.library, f"{self.name}_{dtype}")
        memory = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))
        # A number is an array without dims, so its stride is 0.
        strides = (ctypes.c_ssize_t * len(arrays))(*(x.itemsize if x.ndim else 0 for x in arrays))
        function(*map(ctypes.c_ssize_t, [size, *length]), memory, strides)
        for x, result in zip(outputs, results):
            x[...] = result
