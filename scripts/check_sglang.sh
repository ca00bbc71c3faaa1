#!/usr/bin/env bash
# Compares what krul hooks of SGLang with another release, whose wheel is installed into a temporary folder.
set -euo pipefail

version=${1:?the release to look at, as VERSION=0.5.23}
python=${VENV:-.venv}/bin/python
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

if command -v uv >/dev/null; then
  uv pip install --quiet --no-deps --python "$python" --target "$folder" "sglang==$version"
else
  "$python" -m pip install --quiet --no-deps --target "$folder" "sglang==$version"
fi
export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import sglang; print("SGLang", sglang.__version__, "in", sglang.__path__[0])'
"$python" -m pytest -q -p no:cacheprovider tests/unit/test_hook_targets.py -k test_the_installed_release_has
