#!/usr/bin/env bash
# Trains under Slurm, across time limits and failures of ranks:
#
#     sbatch --nodes 2 --ntasks-per-node 8 scripts/slurm.sh --run mine --mesh data=8,model=2
#
# Five minutes before the limit Slurm sends SIGTERM: all ranks save and exit with 75, and the job is requeued and
# resumes. If a rank dies, all ranks restart at once from the last checkpoint. Arguments go to 'train'; --run is
# required. Submit it from the folder of the virtual environment .venv, or set VENV.
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
