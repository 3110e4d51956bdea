"""Loops that Numba compiles and that are cached as object code, named as the NumPy functions that they replace."""
