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
"${uv[@]}" pip install --quiet --compile-bytecode --python "$venv/bin/python" --editable '.[dev,mooncake]'

# What the Mooncake client's shared objects are linked against; without them its tests are skipped.
libraries=(libibverbs1 librdmacm1 libnuma1 ibverbs-providers)
missing=()
if command -v dpkg-query >/dev/null; then
  for library in "${libraries[@]}"; do
    dpkg-query -W -f '${Status}' "$library" 2>/dev/null | grep -q 'install ok installed' || missing+=("$library")
  done
elif ! "$venv/bin/python" -c 'import mooncake.store' 2>/dev/null; then
  missing=("${libraries[@]}")
fi
if [ "${#missing[@]}" -gt 0 ]; then
  as_root=()
  [ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
  if ! command -v apt-get >/dev/null ||
    ! { "${as_root[@]}" apt-get update -qq &&
      "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
      >/dev/null; then
    echo "The Mooncake tier needs system packages that could not be installed: ${missing[*]}" >&2
    echo "Install them by hand (their names are Debian's); everything else works without." >&2
  fi
fi
