#!/bin/bash
#SBATCH --job-name=my-run
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --chdir=/data/work
#SBATCH --requeue
#SBATCH --open-mode=append
# The processes get SIGTERM this many seconds before the time limit, save and end.
#SBATCH --signal=TERM@120
#SBATCH --partition=a3
#SBATCH --exclusive

export AUTOSHARD_RESTARTS="${SLURM_RESTART_COUNT:-0}"
export TEXT='two words, "a" '"'"'b'"'"' $(HOME) 😀
and a line'
# srun kills all tasks once one fails, and returns the highest exit code. After an error this is 255, which is above the
# codes of killed tasks.
task='trap : TERM; "$@"; code=$?; if [ $code -gt 0 ] && [ $code -lt 128 ] && [ $code -ne 75 ]; then exit 255; fi; exit $code'
srun --kill-on-bad-exit=1 bash -c "$task" task autoshard train --preset quick --data text.txt --run-dir /data/runs/My_run --resume-if-started --max-failures 3
code=$?

# 75 asks for a restart. Codes above 128 are of processes that a signal killed.
if [ "$code" -eq 75 ] || { [ "$code" -gt 128 ] && [ "$code" -ne 255 ]; }; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
