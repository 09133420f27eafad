#!/usr/bin/env bash
# Bring the real browser of the page's tests: Debian's chromium by apt-get, where it is missing and root may, and playwright,
# which drives it, into .venv.  Playwright's own browsers are not downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v chromium >/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "browser: no chromium: install Debian's package chromium, as root" >&2
        exit 1
    fi
    echo "browser: installing chromium"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
.venv/bin/uv pip install --quiet --python .venv/bin/python -c constraints.txt playwright
