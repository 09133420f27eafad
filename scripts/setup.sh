#!/usr/bin/env bash
# setup.sh [run]: make .venv at the root: uv, every dependency at its pin, the four distributions in editable form with
# compiled kernels.  With `run` only what `make run` needs, without what tests, checks and GPUs do; the rest may follow.
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
packages=(-e schema -e "operator[worker,plot]" -e "worker[gguf]" -e simulator)
everything=(-r requirements-dev.txt -e "operator[plan]" -e "worker[nixl,ucx]")
without=(--excludes scripts/cuda_packages.txt)
[ "${CUDA:-}" = no ] || { [ -z "${CUDA:-}" ] && [ ! -e /dev/nvidiactl ]; } || without=()
if [ "${1:-}" != run ]; then
    packages+=("${everything[@]}")
elif [ "${#without[@]}" != 0 ]; then
    echo triton >.venv/left_out.txt
    without+=(--excludes .venv/left_out.txt)
fi
.venv/bin/uv pip install --quiet --python .venv/bin/python "${without[@]}" -c constraints.txt --build-constraint constraints.txt "${packages[@]}"
[ "${#without[@]}" = 0 ] || .venv/bin/uv run --quiet --script scripts/torch_without_cuda.py .venv/bin/python || CUDA=yes exec scripts/setup.sh "$@"
[ "${1:-}" = run ] || exit 0
# Compiled here, once: where Python may not write bytecode, every start of a worker would take 7 s longer, of pdctl 1 s.
# By importing: of all that is installed, a tenth is.
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python scripts/import_all.py
