"""CUDA kernels, under the names of the NumPy functions that they replace."""
