#!/usr/bin/env bash
# Install SGLang into a virtual environment of its own, once: bench/peers/install_sglang.sh FOLDER
#
# It computes on CPUs with `--attention-backend torch_native --model-impl transformers`, without its kernels: `sglang-kernel` on package
# registries is for CUDA alone and does not load without a driver (libcuda.so.1), and SGLang does without where it is
# not there.  So what its wheel needs is named here, less the packages for CUDA.  A minute or two and about 6 GB.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:?"install_sglang.sh: give the folder of the virtual environment, e.g. ~/.cache/pdcluster/sglang"}
version=0.5.23

stamp=$(echo "$version" && sed '/^#/d' "$root/bench/peers/install_sglang.sh" | sha256sum)
[ "$(cat "$folder/.ready" 2>/dev/null)" != "$stamp" ] || exit 0
uv=$root/.venv/bin/uv
[ -x "$uv" ] || { echo "install_sglang: no $uv: run \`make setup\` first" >&2; exit 1; }

echo "install_sglang: sglang $version into $folder"
[ ! -e "$folder" ] || [ -f "$folder/pyvenv.cfg" ] || { echo "install_sglang: $folder is there and is no virtual environment" >&2; exit 1; }
rm -rf "$folder"
"$uv" venv --quiet --python "$root/.venv/bin/python" "$folder"
"$uv" pip install --quiet --python "$folder/bin/python" \
    torch==2.13.0 torchvision torchaudio transformers==5.19.0 compressed-tensors==0.18.0 xgrammar==0.2.7 \
    openai==2.8.0 openai-harmony==0.0.4 apache-tvm-ffi aiohttp distro einops fastapi gguf interegular ipython \
    llguidance mistral_common msgspec numba orjson dill partial-json-parser pillow prometheus-client psutil pybase64 \
    python-multipart pyzmq requests scipy sentencepiece setproctitle soundfile tiktoken uvicorn uvloop watchfiles \
    xxhash zstandard
"$uv" pip install --quiet --python "$folder/bin/python" --no-deps "sglang==$version" outlines==0.1.11
"$folder/bin/python" -m sglang.launch_server --help >/dev/null
echo "$stamp" >"$folder/.ready"
