# Sourced by quickstart.sh and test.sh: `make_venv run|dev` makes .venv with the versions of constraints-cpu.txt.
# Installs nothing when neither pyproject.toml, the constraints nor the Python have changed. pip's own settings
# (an index, a proxy, a cache) hold. PEARL_PYTHON names the Python to use.

find_python() {
    local candidate
    for candidate in ${PEARL_PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer found${PEARL_PYTHON:+ as $PEARL_PYTHON}." >&2
    echo "Install one (Debian, Ubuntu: apt install python3 python3-venv) or name it: PEARL_PYTHON=/path/to/python3.12" >&2
    return 1
}

need_venv_module() {
    local package
    "$1" -c 'import venv, ensurepip' 2>/dev/null && return
    package="$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing $package"
        apt-get update -qq && apt-get install -y -qq "$package" >/dev/null && return
    fi
    echo "error: $1 cannot make virtual environments. Install its venv module (apt install $package)." >&2
    return 1
}

make_venv() {
    local kind="$1" python stamp
    python="$(find_python)"
    stamp="$(cat pyproject.toml constraints-cpu.txt <("$python" -VV; pwd) | cksum)"
    if [ "$(cat ".venv/stamp-$kind" 2>/dev/null)" = "$stamp" ] && .venv/bin/python -c '' 2>/dev/null; then
        return
    fi
    if [ ! -f .venv/stamp-run ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        need_venv_module "$python"
        rm -rf .venv # one that was cut short, or whose Python is gone
        "$python" -m venv .venv
    fi
    echo "Installing into .venv (once; a few minutes) ..."
    local target="."
    [ "$kind" = dev ] && target=".[dev]"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e "$target"
    echo "$stamp" >.venv/stamp-run
    if [ "$kind" = dev ]; then echo "$stamp" >.venv/stamp-dev; fi
}
