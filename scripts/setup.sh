#!/usr/bin/env bash
# Creates or updates the project's virtual environment, with nothing but a Python 3.11 given.
set -euo pipefail

python=${PYTHON:-python3.11}
venv=${VENV:-.venv}
command -v "$python" >/dev/null || python=python3

if [ ! -x "$venv/bin/python" ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "krul-sglang needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
    exit 1
  }
  "$python" -m venv "$venv"
fi

# Bytecode is compiled once, here: where Python may not write it, each server would compile for half a minute.
# uv installs SGLang's wheels in about a minute, pip in about five.
if command -v uv >/dev/null; then
  uv=(uv)
else
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip --upgrade
  "$venv/bin/python" -m pip install --quiet uv
  uv=("$venv/bin/python" -m uv)
fi
"${uv[@]}" pip install --quiet --compile-bytecode --python "$venv/bin/python" --editable '.[dev,mooncake,bucket]'
