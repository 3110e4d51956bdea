"""NVRTC compiles every CUDA kernel for three architectures, within limits of registers, spills and shared memory.

``make cuda-compile`` installs its wheel, of 58 MB, and runs these tests; they need neither a GPU nor a driver.
"""

import ctypes
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from spmd_engine.arrays.flash_attention import KERNELS, SHARED, Variant, source
from support import cuda_on_host

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SPILLS = 32  # bytes of a thread
REGISTERS = 168  # of a thread: three blocks of 128 threads have 65,536
KERNEL_TEXTS = cuda_on_host.ELEMENTWISE | cuda_on_host.REDUCTIONS
VARIANTS = [
    Variant("float", "float", "float", 32),
    Variant("float", "float", "float", 64),
    Variant("float", "float", "float", 128),
    Variant("bfloat16", "float", "bfloat16", 64),
    Variant("float16", "float", "float", 96),
    Variant("double", "double", "double", 64),
]

HEAD = """
    typedef long long int64_t;
    typedef unsigned char uint8_t;
    typedef unsigned short uint16_t;
    typedef int int32_t;
    typedef unsigned int uint32_t;
    typedef unsigned long long uint64_t;
    #define KERNEL extern "C" __global__
    #define EACH(i, n) (ptrdiff_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
"""


@cache
def nvrtc():
    """The library of the wheel nvidia-cuda-nvrtc, or None."""
    found = importlib.util.find_spec("nvidia")
    folders = found.submodule_search_locations if found else None
    files = [path for folder in folders or () for path in Path(folder).rglob("libnvrtc.so.*")]
    return ctypes.CDLL(str(max(files))) if files else None


pytestmark = [
    pytest.mark.cuda_compile,
    pytest.mark.skipif(nvrtc() is None, reason="NVRTC is not installed: make cuda-compile installs it"),
]


def compiled(text, architecture):
    """The log of ptxas; fails if the text is not compiled."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={architecture}", "--std=c++14", "--ptxas-options=-v"]  # CuPy's default is C++14
    assert not library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    arguments = (ctypes.c_char_p * len(options))(*map(str.encode, options))
    failed = library.nvrtcCompileProgram(program, len(options), arguments)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert not failed, log.value.decode()
    return log.value.decode()


def used(log, what):
    return [int(number) for number in re.findall(rf"(\d+) {what}", log)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda each: f"{each.stored}-{each.result}-{each.width}")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fused_attention(architecture, name, variant):
    log = compiled(source(name, variant)[0], architecture)
    assert used(log, "registers") and max(used(log, "registers")) <= REGISTERS
    assert max(used(log, "bytes spill stores")) <= SPILLS
    assert 0 < max(used(log, "bytes smem")) <= SHARED


@pytest.mark.parametrize("dtype", ["float", "double", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_elementwise_kernels_and_reductions(architecture, dtype):
    """In one program, in loops of ``cuda_on_host`` instead of those that CuPy puts around them."""
    types = cuda_on_host.C_TYPES | {"S": dtype, "T": "float" if dtype == "bfloat16" else dtype}
    kernels = [cuda_on_host.kernel(name, text, types) for name, text in KERNEL_TEXTS.items()]
    log = compiled("\n".join([HEAD, cuda_on_host.BFLOAT16, *kernels]), architecture)
    assert len(used(log, "registers")) == len(KERNEL_TEXTS)
    assert max(used(log, "registers")) <= 96 and not max(used(log, "bytes spill stores"))
