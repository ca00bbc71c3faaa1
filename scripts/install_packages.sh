#!/usr/bin/env bash
# Installs system packages, which are named as Debian does, as root: install_packages.sh PACKAGE...
set -euo pipefail

as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
if ! command -v apt-get >/dev/null ||
  ! { "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } >/dev/null; then
  echo "These system packages could not be installed: $*" >&2
  echo "Install them by hand (their names are Debian's)." >&2
  exit 1
fi
