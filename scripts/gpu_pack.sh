#!/usr/bin/env bash
# gpu_pack.sh FOLDER: what scripts/gpu_run.py wants on a machine without registries, made on one that has them:
# tiny models, wheels for Python 3.12 that images with torch seldom have, and FlashAttention 3 as a library.
# The library is that of a wheel of vLLM built for torch 2.11 and CUDA 13; on another torch it is left out.
set -euo pipefail
cd "$(dirname "$0")/.."

pack=$1
vllm=0.23.0
wheels=(msgspec pyzmq cryptography cffi pycparser pytest-asyncio pytest-timeout)
mkdir -p "$pack/models" "$pack/wheels" "$pack/fa3"
for kind in llama qwen3; do
    [ -e "$pack/models/$kind/config.json" ] || .venv/bin/python -m tests.make_tiny_model "$kind" "$pack/models/$kind"
done
fetch=(.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp)
for platform in manylinux_2_34_x86_64 manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64; do
    fetch+=(--platform "$platform")
done
"${fetch[@]}" -c constraints.txt -d "$pack/wheels" "${wheels[@]}"
if [ ! -e "$pack/fa3/_vllm_fa3_C.abi3.so.xz" ]; then
    temporary=$(mktemp -d)
    trap 'rm -rf "$temporary"' EXIT
    "${fetch[@]}" -d "$temporary" "vllm==$vllm"
    .venv/bin/python -m zipfile -e "$temporary"/vllm-*.whl "$temporary/vllm"
    xz -9e -T0 <"$temporary"/vllm/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so >"$pack/fa3/_vllm_fa3_C.abi3.so.xz"
fi
du -sh "$pack"
