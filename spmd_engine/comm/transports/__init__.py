"""Transports: one file for each route, with all operations that can take it."""
