"""Runs MPI tests under a plain `pytest --with-mpi`.

    @pytest.mark.mpi(min_size=4)                  # also: ranks=N (exactly N), timeout_s=S (of each phase)
    def test_sum():
        assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size

`pytest --with-mpi` runs the serial tests itself, then starts `mpiexec -n N python -m pytest` once for each
N that tests require, and reports the results of the ranks (parent.py, batch.py). With `--jobs 2`, these jobs run in
parallel to a process that runs serial tests; after them, two processes share the remaining serial tests, a file at a
time (serial.py). The report is the same, in the same order. `mpiexec -n 4 python -m pytest --with-mpi`
skips the parent: it runs the tests that fit on 4 ranks (ranks.py). In every case

* a test passes only if it passes on every rank: after each phase the ranks compare their outcomes;
* a rank that raises while others wait in a collective ends the job after a few seconds, and a test that hangs
  ends it after `timeout_s` with the stack of every rank; both are failures;
* under the parent, the remaining tests then continue in a new job, so that a failure affects no other test.

SPMD_TEST_GRACE is the time in seconds that the other ranks have to finish a test that raised on one of them (3).
SPMD_TEST_TIMEOUT is the limit in seconds of MPI tests without their own limit (60). Serial tests have the limit of
pytest-timeout (setup.cfg); in their own process, a second limit is ten times SPMD_TEST_TIMEOUT.
SPMD_TEST_SHARED is a folder for data that all processes of a run share; the parent creates and removes it.
`--cost FILE` writes what each file of tests costs in CPU seconds (cost.py).
"""
