"""Runs commands one after the other on the same ranks: what the fixture ``several_by_mpi`` starts.

The first argument is the size of gpt-nano. Each other is a command: its own arguments in JSON. Rank 0 prints a line at
the end of each. A command that fails ends the job, as it would have ended one of its own.
"""

import json
import sys
from dataclasses import replace

from spmd_engine.cli import main
from spmd_engine.models.decoder import GPT_SIZES
from spmd_engine.runtime.launchers import launcher_rank

if __name__ == "__main__":
    sys.path[0] = ""  # where the ranks were started, as with python -m
    size, *commands = map(json.loads, sys.argv[1:])
    GPT_SIZES["gpt-nano"] = replace(GPT_SIZES["gpt-nano"], **size)
    for arguments in commands:
        main(arguments)
        if launcher_rank() == 0:
            print("-- the end of a command", flush=True)
