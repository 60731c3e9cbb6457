#!/usr/bin/env bash
# The paper's evaluation, simulated: Figs. 2, 4 to 8, Tables 2 and 3, and what is better than the paper.
#
# Needs:    2 CPU cores, 4 GB of memory, Python 3.11 or newer. No GPU.
# Takes:    about 20 minutes on two idle cores; --full takes hours: more seeds, all ratios, larger workloads for the regret.
# You see:  a line for each simulated run, then where the page is: each figure of the paper beside ours. Results lie in
#           benchmarks/paper/results; runs that are there with the same parameters are not run again.
#
# Usage: launch/reproduce.sh [--full] [--only fig5,table2] [--processes 2] [--minutes M] [--results DIR]
#
# Two parts of the page measure this machine and are made by themselves: python -m benchmarks.paper.scaling (512 GPUs,
# 4,096 with --full) and python -m benchmarks.paper.validation (live runs beside simulated ones; two idle cores).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

make_venv run
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD"
exec .venv/bin/python -m benchmarks.paper "$@"
