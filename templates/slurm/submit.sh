#!/bin/bash
# Submits a job as a Slurm array of shards:
#
#     templates/slurm/submit.sh job.yaml 64 [options of sbatch, such as --partition=gpu --gres=gpu:1]
#
# First prepare, then the shards in any order, then finish, each once the one before has succeeded.
# beam-inference must be on the PATH of the nodes (activate its environment before you submit), and
# the job's files where all nodes see them. Adjust cores, memory and time in the three files.
set -euo pipefail

if [ "$#" -lt 2 ]; then
    echo "usage: $0 JOB.YAML SHARDS [options of sbatch]" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
job=$1
shards=$2
shift 2
export JOB=$job SHARDS=$shards

prepared=$(sbatch --parsable "$@" "$here/prepare.sbatch")
array=$(sbatch --parsable --dependency="afterok:$prepared" --kill-on-invalid-dep=yes \
    --array="0-$((shards - 1))" "$@" "$here/shards.sbatch")
finish=$(sbatch --parsable --dependency="afterok:$array" --kill-on-invalid-dep=yes \
    "$@" "$here/finish.sbatch")
echo "prepare: $prepared, shards: $array, finish: $finish"
echo "progress: beam-inference status $job"
