#!/usr/bin/env bash
# All checks: style, types, import contracts, tests.
#
# Needs:    2 CPU cores, 4 GB of memory, Python 3.11 or newer. No GPU (tests that need one are skipped without).
# Takes:    about 10 minutes; the first time also the installation into .venv.
# You see:  one heading a check, the slowest tests, and pytest's count at the end. Exit code 0: all is well.
#
# Usage: launch/test.sh [--full] [pytest arguments ...]      --full adds the long soaks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

selection=(-m "not slow")
if [ "${1:-}" = --full ]; then
    selection=()
    shift
fi

make_venv dev
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"

heading() { printf '\n== %s (%d s) ==\n' "$1" "$SECONDS"; }
heading "ruff"
ruff check .
ruff format --check .
heading "mypy"
mypy --strict pearl tests
heading "import contracts"
lint-imports
heading "tests"
# ${x[@]+...}: an empty array is an unset one for older versions of bash
# A file's tests stay together; two files at a time, since many tests wait for processes more than they compute.
pytest -n 2 --dist loadfile --durations=25 ${selection[@]+"${selection[@]}"} "$@"
heading "done"
