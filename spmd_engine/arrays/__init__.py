"""Arrays of one device, NumPy or CuPy, independent of ranks."""

from spmd_engine.arrays.backend import CPU, Backend, backend_of, get_backend
from spmd_engine.arrays.einsum_lowering import einsum

__all__ = ["CPU", "Backend", "backend_of", "einsum", "get_backend"]
