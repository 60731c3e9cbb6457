#!/usr/bin/env bash
# Installs SGLang for hosts without a GPU: the rollout engine of launch/configs/sglang-cpu.toml and of its tests.
# On a GPU host use pip install "pearl[sglang]" instead.
#
# Needs:    Python 3.11 or newer, 3 GB of disk; for prefill-decode pairs three small libraries of the system (RDMA and
#           NUMA), which are installed here by root where apt is.
# Takes:    about two minutes; nothing when it is there already.
# You see:  the interpreter to name: sglang.python=... in a job's settings, PEARL_SGLANG_PYTHON=... for the tests.
#
# Usage: launch/install-sglang-cpu.sh [VENV [BASE]]     default .venv; made when it is not there
#        BASE: another environment, made by launch/venv.sh, whose packages VENV uses too: then it needs 2 GB less
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/venv.sh

venv="${1:-.venv}" base="${2:-}"
python="$(if [ -n "$base" ]; then echo "$base/bin/python"; else find_python; fi)"
requirements=launch/requirements-sglang-cpu.txt
libraries=(libibverbs1 librdmacm1 libnuma1)

has_libraries() {
    "$python" -c 'import ctypes
for name in ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1"): ctypes.CDLL(name)' 2>/dev/null
}

make_environment() {
    if [ -n "$base" ]; then
        rm -rf "$venv"
        "$python" -m venv --without-pip "$venv"
        # Its own packages come first on the path; pip, torch and the like are those of the base.
        site_of "$base" >"$(site_of "$venv")/base.pth"
    elif [ ! -x "$venv/bin/python" ]; then
        need_venv_module "$python"
        "$python" -m venv "$venv"
    fi
}

site_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if ! has_libraries && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing ${libraries[*]}"
    timeout 120 apt-get update -qq && timeout 120 apt-get install -y -qq "${libraries[@]}" >/dev/null || true
fi
if ! has_libraries; then
    echo "warning: ${libraries[*]} are missing: SGLang will serve, but not in prefill-decode pairs" >&2
fi

stamp() {
    cat "$requirements" <("$venv/bin/python" -VV; "$python" -VV; pwd; echo "$base") | cksum
}

if [ "$(cat "$venv/stamp-sglang" 2>/dev/null)" != "$(stamp 2>/dev/null)" ]; then
    make_environment
    echo "Installing SGLang into $venv (once; about two minutes) ..."
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$requirements"
    stamp >"$venv/stamp-sglang"
fi
"$venv/bin/python" -c 'import importlib.metadata as m; print("SGLang", m.version("sglang"), "is installed")'
echo "sglang.python=$(cd "$venv/bin" && pwd)/python"
