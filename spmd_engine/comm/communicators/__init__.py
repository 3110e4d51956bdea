"""Nonblocking messages between ranks: by MPI, and between threads of one process."""
