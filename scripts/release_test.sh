#!/usr/bin/env bash
# release_test.sh DIST MODEL: install the wheels as a user does, without this repository, and serve the sample model by them.
# CUDA's libraries and Triton stay out; torch's build for CUDA runs on CPUs with stand-ins.  PORT: of the API.
set -euo pipefail
tools=$(cd "$(dirname "$0")/.." && pwd)
dist=$(cd "$1" && pwd)
model=$(cd "$2" && pwd)
uv=$tools/.venv/bin/uv
port=${PORT:-18473}

(cd "$dist" && sha256sum --quiet --check SHA256SUMS)
work=$(mktemp -d)
up=
trap '[ -z "$up" ] || { kill "$up" 2>/dev/null; wait "$up" || true; }; rm -rf "$work"' EXIT
cd "$work"
UV_CACHE_DIR=$("$uv" cache dir)
export UV_CACHE_DIR HOME=$work
unset PYTHONPATH

start=$SECONDS
"$uv" venv --quiet env
"$uv" pip install --quiet --python env/bin/python --find-links "$dist" -c "$dist"/pdcluster-*-constraints.txt \
    --excludes "$tools/scripts/cuda_packages.txt" --excludes <(echo triton) 'pdcluster[worker,simulate]'
"$uv" run --quiet --script "$tools/scripts/torch_without_cuda.py" env/bin/python
echo "installed in $((SECONDS - start)) s: $(du -sm env | cut -f1) MB"
ask() { curl -sS "http://127.0.0.1:$port/v1/$1" -H 'Content-Type: application/json' "${@:2}"; }

env/bin/pdctl --version | grep -F "$(sed -n 's/.*  pdcluster-\(.*\)\.tgz$/\1/p' "$dist/SHA256SUMS")"
env/bin/pdctl init "$model" --output served.yaml
env/bin/pdctl validate served.yaml
for i in 1 2 3 4; do echo '{"timestamp": '"$i"'00, "input_length": 200, "output_length": 20}'; done >requests.jsonl
env/bin/pdctl simulate "$tools/examples/traces/llm-70b.yaml" --trace requests.jsonl --model "$model" | head -1
env/bin/pdctl up served.yaml --port "$port" >up.log 2>&1 &
up=$!
for _ in $(seq 180); do
    ! grep -q '^ready: ' up.log || break
    kill -0 "$up" || { cat up.log; exit 1; }
    sleep 1
done
name=$(ask models | env/bin/python -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
ask chat/completions -i -d '{"model": "'"$name"'", "temperature": 0, "pdcluster": {"prefill": "remote"},
    "messages": [{"role": "user", "content": "What is the capital of France?"}]}' >answer
grep -o 'The capital of France is Paris' answer && grep -i 'x-pdcluster-prefill: remote' answer || { cat answer up.log; exit 1; }
kill -INT "$up" && wait "$up"
up=
"$tools/.venv/bin/helm" lint --strict "$dist"/pdcluster-*.tgz | tail -1
