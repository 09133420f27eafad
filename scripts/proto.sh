#!/usr/bin/env bash
# Generate the gRPC code of worker/proto into the worker package.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m grpc_tools.protoc -I worker/proto \
    --python_out=worker/src --mypy_out=worker/src --grpc_python_out=worker/src --mypy_grpc_out=worker/src \
    worker/proto/pdcluster_worker/proto/worker.proto
