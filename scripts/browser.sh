#!/usr/bin/env bash
# The report is tested in a real browser: says where it is, and installs Debian's Chromium where we may.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  if command -v $name >/dev/null 2>&1; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing Chromium for the report's test"
  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
else
  echo "no Chromium found: install it (Debian: apt-get install chromium) so that the report can be tested" >&2
  exit 2
fi
