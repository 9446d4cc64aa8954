#!/bin/sh
# Find a Python that can make .venv, then hand over to environment.py, which does the work.
# $PYTHON, when set, is the only candidate. Otherwise the Python of an existing .venv stays, so that a second run
# never rebuilds because another version appeared on PATH.

fail() {
    echo "perilune: $*" >&2
    exit 1
}

# A name on PATH proves nothing (pyenv leaves names for versions that are not active): ask the program itself.
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
can_make_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

start() {
    exec "$1" make/environment.py --torch "$TORCH" "--pip-args=$PIP_ARGS" --extras "$EXTRAS" --disk-gb "$DISK_GB"
}

if [ -n "$PYTHON" ]; then
    is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python >= 3.11 that runs; name another one or leave PYTHON unset"
    can_make_venv "$PYTHON" || fail "PYTHON=$PYTHON has no venv and ensurepip modules; on Debian install python3-venv"
    start "$PYTHON"
fi

without_venv=
for candidate in .venv/bin/python python3.13 python3.12 python3.11 python3; do
    is_new_enough "$candidate" || continue
    if can_make_venv "$candidate"; then start "$candidate"; fi
    without_venv=${without_venv:-$candidate}
done
[ -z "$without_venv" ] || fail "$without_venv has no venv and ensurepip modules; on Debian install python3-venv"
fail "needs Python >= 3.11: none of python3.13, python3.12, python3.11, python3 is one; install it or set PYTHON=/path/to/python"
