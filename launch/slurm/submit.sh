#!/usr/bin/env bash
# Submits a run and the array of preemptible nodes that it may use. Edit the values on top of the two .sbatch files first.
#
# Usage: launch/slurm/submit.sh [--dry-run] CONFIG RUN_DIR [section.key=value ...]
#        --dry-run prints both files and both commands, and submits nothing.
# Logs are in RUN_DIR.slurm/, a file a job; RUN_DIR is a directory that all nodes share.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

dry_run=
if [ "${1:-}" = --dry-run ]; then dry_run=1; shift; fi
if [ $# -lt 2 ]; then sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; fi
config=$(realpath -- "$1") run_dir=$(realpath -m -- "$2")
shift 2
[ -f "$config" ] || { echo "error: $config is no file" >&2; exit 2; }

logs=$run_dir.slurm
train=(sbatch --parsable --output="$logs/train-%j.log" "$here/train.sbatch" "$config" "$run_dir" "elastic.inter=true" "$@")
spot=(sbatch --parsable --output="$logs/spot-%A-%a.log" "$here/spot.sbatch" "$run_dir")

if [ -n "$dry_run" ]; then
    for file in train.sbatch spot.sbatch; do printf '# %s\n' "$here/$file"; cat "$here/$file"; echo; done
    printf 'would submit:\n'
    printf ' %q' "${train[@]}"; echo
    printf ' %q' "${spot[@]:0:2}" --dependency=after:TRAIN_JOB "${spot[@]:2}"; echo
    exit 0
fi
mkdir -p "$logs"
job=$("${train[@]}")
array=$("${spot[@]:0:2}" --dependency="after:${job%%;*}" "${spot[@]:2}") ||
    { echo "error: the array was refused, so job ${job%%;*} is cancelled" >&2; scancel "${job%%;*}"; exit 1; }
echo "train: job ${job%%;*}, spot: array ${array%%;*}, logs: $logs"
echo "end both with: scancel ${job%%;*} ${array%%;*}"
