#!/usr/bin/env bash
# A training under Slurm that survives its time limit and a dead rank:
#
#     sbatch --nodes 2 --ntasks-per-node 8 scripts/slurm.sh --run mine --mesh data=8,model=2
#
# Five minutes before the limit Slurm sends SIGTERM: all ranks save and end with 75, and the job goes back into the
# queue, to go on where it was. A rank that dies is started again at once, with all others, from the last checkpoint.
# What is given goes to 'train'; --run is needed. Start it where the virtual environment .venv is, or set VENV.
#SBATCH --job-name=spmd_engine
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

PATH="${VENV:-$PWD/.venv}/bin:$PATH"

python -m spmd_engine launch -n "${SLURM_NTASKS:-1}" --max-restarts 3 -- train --requeue --save-every 50 "$@" &
supervisor=$!
trap 'kill -TERM "$supervisor"' TERM USR1
wait "$supervisor"; code=$?
while kill -0 "$supervisor" 2>/dev/null; do wait "$supervisor"; code=$?; done  # a trap ends the first wait

if [ "$code" -eq 75 ]; then  # asked to end, and saved
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
