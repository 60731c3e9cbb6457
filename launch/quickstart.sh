#!/usr/bin/env bash
# Trains a small agent to repair programs, from nothing, on this machine.
#
# Needs:    2 CPU cores, 4 GB of memory, Python 3.11 or newer. No GPU.
# Takes:    about a minute; the first time also the installation into .venv, a few minutes.
# You see:  a line for each of 40 training steps while the sampled reward rises, a worker that arrives and is reclaimed,
#           the training GPU lent between steps, the reward on unseen tasks before and after, and where the report of
#           the run is: one HTML file with all plots.
#
# Usage: launch/quickstart.sh [--run-dir D] [--resume] [--dry-run] [section.key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

make_venv run
export OMP_NUM_THREADS=1 # more threads a process make a small model several times slower
# exec: a signal to this script is a signal to the job, which then stops everything it started.
exec .venv/bin/pearl run launch/configs/quickstart.toml "$@"
