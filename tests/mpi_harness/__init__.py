"""MPI tests for people who just type `pytest --with-mpi`.

    @pytest.mark.mpi(min_size=4)                  # also: ranks=N (exactly N), timeout_s=S (of each phase)
    def test_sum():
        assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size

`pytest --with-mpi` runs the serial tests itself, then starts `mpiexec -n N python -m pytest` once for each
N that tests ask for, and reports what the ranks tell it (parent.py, batch.py). With `--jobs 2` those jobs run
beside a process that runs serial tests; when they are done, two processes share what is left of these, a file
at a time (serial.py). The report is the same, in the same order. `mpiexec -n 4 python -m pytest --with-mpi`
skips the parent: it runs the tests that fit on 4 ranks (ranks.py). In every case

* a test passes only if it passes on every rank: after each phase the ranks compare their outcomes;
* a rank that raises while others wait in a collective ends the job after a few seconds, and a test in which
  nothing moves any more ends it after `timeout_s` with the stack of every rank: a failure, never a hang;
* under the parent the rest of the tests then go on in a new job, so that one failure costs only itself.

SPMD_TEST_GRACE is what the other ranks get to finish a test that raised on one of them, in seconds (3).
SPMD_TEST_TIMEOUT is the limit in seconds of MPI tests that name none (60). Serial ones have that of pytest-timeout
(setup.cfg) and, in a process of their own, ten times SPMD_TEST_TIMEOUT if that should not help.
SPMD_TEST_SHARED is a folder for what all processes of a run need once: the parent makes it, and removes it.
"""
