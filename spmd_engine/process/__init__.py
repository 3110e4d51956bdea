"""One process of a job: what its launcher tells it, how it joins MPI, how signals reach it, and how it ends."""
