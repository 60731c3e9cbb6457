#!/usr/bin/env bash
# All checks: style, types, import contracts, tests.
#
# Needs:    2 CPU cores, 8 GB of memory, Python 3.11 or newer. No GPU (tests that need one are skipped without).
#           Installs Debian's bubblewrap, for the sandboxes' tests, when run by root where apt is; --full Slurm too.
# Takes:    about 10 minutes; the first time 4 more for the installation into .venv, SGLang's beside it.
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
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH" PEARL_SGLANG_PYTHON="$PWD/.venv/sglang/bin/python"

heading() { printf '\n== %s (%d s) ==\n' "$1" "$SECONDS"; }
install_bubblewrap() {
    if ! command -v bwrap >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing bubblewrap"
        timeout 120 apt-get update -qq && timeout 120 apt-get install -y -qq bubblewrap >/dev/null || true
    fi
    command -v bwrap >/dev/null || echo "warning: bubblewrap is missing: its sandbox tests will be skipped" >&2
}
install_bubblewrap
install_slurm() {
    if ! command -v slurmctld >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing Slurm"
        # At runlevel 1 no service is started: the tests start their own, on ports of their own.
        RUNLEVEL=1 timeout 300 apt-get install -y -qq slurmctld slurmd slurm-client munge >/dev/null || true
    fi
    command -v slurmctld >/dev/null || echo "warning: Slurm is missing: its test will be skipped" >&2
}
[ "${#selection[@]}" -gt 0 ] || install_slurm
# Meanwhile: it waits for downloads and disks more than it computes.
bash launch/install-sglang-cpu.sh .venv/sglang .venv >.venv/sglang.log 2>&1 &
installer=$!
trap 'kill "$installer" 2>/dev/null || true' EXIT

heading "ruff"
ruff check .
ruff format --check .
heading "mypy"
mypy --strict pearl tests
heading "import contracts"
lint-imports
heading "SGLang's installation"
wait "$installer" || { cat .venv/sglang.log; exit 1; }
cat .venv/sglang.log

heading "tests"
# A file's tests stay together, those that wait longest first (tests/conftest.py). Three files at a time on two cores:
# many tests wait for processes more than they compute.
# ${x[@]+...}: an empty array is an unset one for older versions of bash
pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=25 ${selection[@]+"${selection[@]}"} "$@"
heading "done"
