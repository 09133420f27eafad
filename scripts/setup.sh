#!/usr/bin/env bash
# Make .venv at the root: uv, every dependency at its pin, the four distributions in editable form with compiled kernels.
# The worker's extras nixl and ucx are 5 s and 0.4 GB of it, for tests of these transports.
# Without an NVIDIA GPU, CUDA's libraries (3 GB) stay out: torch links them, and a CPU calls none of their functions.
# CUDA=yes or CUDA=no decides it by hand.
# Runs again only when a file that it depends on has changed (see Makefile).
set -euo pipefail
cd "$(dirname "$0")/.."

[ -x .venv/bin/uv ] || {
    echo "setup: creating .venv"
    python3 -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
}
echo "setup: installing packages (torch is large; the first time takes a minute or two)"
without=(--excludes scripts/cuda_packages.txt)
[ "${CUDA:-}" = no ] || { [ -z "${CUDA:-}" ] && [ ! -e /dev/nvidiactl ]; } || without=()
.venv/bin/uv pip install --quiet --python .venv/bin/python "${without[@]}" -c constraints.txt --build-constraint constraints.txt -r requirements-dev.txt -e schema -e "operator[worker,plot,plan]" -e "worker[nixl,ucx]" -e simulator
[ "${#without[@]}" = 0 ] || .venv/bin/uv run --quiet --script scripts/torch_without_cuda.py .venv/bin/python || CUDA=yes exec scripts/setup.sh
# Compiled here, once: where Python may not write bytecode, every start of a worker would take 7 s longer, of pdctl 1 s.
# Without the tests that packages bring, some of which are no valid Python on purpose.
.venv/bin/python -m compileall -q -j 0 -x '/(tests?|testing/_internal)/' .venv/lib/python3*/site-packages schema/src worker/src operator/src simulator/src
