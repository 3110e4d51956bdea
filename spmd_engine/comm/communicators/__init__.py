"""Messages between ranks that never block: by MPI, and between threads of one process."""
