#!/usr/bin/env bash
# Trains under PBS, across time limits and failures of ranks:
#
#     qsub -v ARGUMENTS="--run mine --mesh data=8,model=2" -l select=2:ncpus=8:mpiprocs=8 scripts/pbs.sh
#
# PBS sends SIGTERM before it kills a job: all ranks save and exit with 75, and the job is queued again. If a rank dies,
# all ranks restart at once from the last checkpoint. ARGUMENTS go to 'train'; --run is required.
#PBS -N spmd_engine
#PBS -l walltime=04:00:00
#PBS -r y
set -uo pipefail

cd "${PBS_O_WORKDIR:-$PWD}" || exit 1
PATH="${VENV:-$PWD/.venv}/bin:$PATH"
ranks=$(wc -l < "${PBS_NODEFILE:-/dev/null}")
hosts=$(sort -u "${PBS_NODEFILE:-/dev/null}" | paste -sd, -)

# shellcheck disable=SC2086  # several arguments in one variable
python -m spmd_engine launch -n "$((ranks > 0 ? ranks : 1))" ${hosts:+--hosts "$hosts"} --max-restarts 3 -- \
    train --requeue --save-every 50 ${ARGUMENTS:-} &
supervisor=$!
trap 'kill -TERM "$supervisor"' TERM USR1
wait "$supervisor"; code=$?
while kill -0 "$supervisor" 2>/dev/null; do wait "$supervisor"; code=$?; done  # a trap ends the first wait

if [ "$code" -eq 75 ]; then  # asked to end, and saved
    qsub -v ARGUMENTS="${ARGUMENTS:-}" "$0"
    exit 0
fi
exit "$code"
