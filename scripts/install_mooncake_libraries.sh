#!/usr/bin/env bash
# Installs the system packages that the Mooncake client's shared objects are linked against, as root.
set -euo pipefail

venv=${VENV:-.venv}
if "$venv/bin/python" -c 'import mooncake.store' 2>/dev/null; then
  exit 0
fi
libraries=(libibverbs1 librdmacm1 libnuma1 ibverbs-providers)
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
if ! command -v apt-get >/dev/null ||
  ! { "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${libraries[@]}"; } \
    >/dev/null; then
  echo "These system packages could not be installed: ${libraries[*]}" >&2
  echo "Install them by hand (their names are Debian's)." >&2
  exit 1
fi
"$venv/bin/python" -c 'import mooncake.store'
