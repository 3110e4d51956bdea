"""Runs commands one after the other on the same ranks: what the fixture ``several_by_mpi`` starts.

Each command is an argument: its own arguments in JSON. Rank 0 prints a line at the end of each. A command that fails
ends the job, as it would have ended one of its own.
"""

import json
import sys

from spmd_engine.cli import main
from spmd_engine.runtime.launchers import launcher_rank

if __name__ == "__main__":
    sys.path[0] = ""  # where the ranks were started, as with python -m
    for arguments in map(json.loads, sys.argv[1:]):
        main(arguments)
        if launcher_rank() == 0:
            print("-- the end of a command", flush=True)
