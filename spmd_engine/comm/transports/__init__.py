"""Transports: one file for each, with all operations that it moves."""
