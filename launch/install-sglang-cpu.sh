#!/usr/bin/env bash
# Installs SGLang for hosts without a GPU: the rollout engine of launch/configs/sglang-cpu.toml and of its tests.
# On a GPU host use pip install "pearl[sglang]" instead.
#
# Needs:    Python 3.11 or newer, 3 GB of disk; for prefill-decode pairs three small libraries of the system (RDMA and
#           NUMA), which are installed here by root where apt is.
# Takes:    about two minutes.
# You see:  the interpreter to name: sglang.python=... in a job's settings, PEARL_SGLANG_PYTHON=... for the tests.
#
# Usage: launch/install-sglang-cpu.sh [VENV]      default .venv; made when it is not there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

venv="${1:-.venv}"
requirements=launch/requirements-sglang-cpu.txt
libraries=(libibverbs1 librdmacm1 libnuma1)

if [ ! -x "$venv/bin/python" ]; then
    python="$(find_python)"
    need_venv_module "$python"
    "$python" -m venv "$venv"
fi

if ! ldconfig -p | grep -q libibverbs.so.1 && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing ${libraries[*]}"
    apt-get update -qq && apt-get install -y -qq "${libraries[@]}" >/dev/null
fi
if ! ldconfig -p | grep -q libibverbs.so.1; then
    echo "warning: ${libraries[*]} are missing: SGLang will serve, but not in prefill-decode pairs" >&2
fi

echo "Installing SGLang into $venv (once; about two minutes) ..."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$requirements"
"$venv/bin/python" -c 'import importlib.metadata as m; print("SGLang", m.version("sglang"), "is installed")'
echo "sglang.python=$(cd "$venv/bin" && pwd)/python"
