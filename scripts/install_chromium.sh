#!/usr/bin/env bash
# Installs the browser that the tests of the daemon's page use, and a font for it, as root.
set -euo pipefail

command -v chromium >/dev/null && exit 0
packages=(chromium fonts-dejavu-core)
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
if ! command -v apt-get >/dev/null ||
  ! { "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"; } \
    >/dev/null; then
  echo "These system packages could not be installed: ${packages[*]}" >&2
  echo "Install them by hand (their names are Debian's)." >&2
  exit 1
fi
