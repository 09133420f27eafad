#!/bin/sh
# Installs sglang-router, smg and vllm-router, each into an environment of its own below the folder
# given; wheels only.  One that does not install is said and left out: the bench runs without it.
# Usage: bench/peers/install_routers.sh FOLDER
set -eu
folder=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
uv="$root/.venv/bin/uv"
stamp="sglang-router==0.3.2 smg==1.13.0 vllm-router==0.1.17"

if [ "$(cat "$folder/.ready" 2>/dev/null)" = "$stamp" ]; then exit 0; fi
mkdir -p "$folder"
for package in $stamp; do
    environment="$folder/${package%%=*}"
    rm -rf "$environment"
    "$uv" venv --quiet --python "$root/.venv/bin/python" "$environment"
    if ! "$uv" pip install --quiet --only-binary :all: --python "$environment/bin/python" "$package"; then
        echo "$package does not install here: it is left out" >&2
        rm -rf "$environment"
    fi
done
echo "$stamp" >"$folder/.ready"
