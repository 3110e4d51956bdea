"""Loops that Numba compiles and that are cached, linked, named as the NumPy functions that they replace."""
