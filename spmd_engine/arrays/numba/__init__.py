"""Loops that Numba compiles, kept as object code, under the names of the NumPy functions that they replace."""
